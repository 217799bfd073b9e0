"""Labels, tokens and other indices in a batch that are out of range are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdp import Mean
from meshdp.train._lookups import lookups

from .test_train_wrong_use import (
    ADVICE,
    CLASSES,
    ROWS,
    Y,
    by_optax,
    classify,
    make,
    said,
    with_labels,
)

FIX = (
    "JAX takes the nearest entry for them, one counted from the end, NaN or, in one_hot, "
    "zeros. Correct the data or the number of classes. What does not count anyway, replace "
    "before it is used: jnp.where(mask, labels, 0)."
)


def outside(high, low=0, count=1):
    return (
        f"  batch['y']: int32[16] from {low} to {high}; {count} used as an index of 10, but "
        "not in 0 to 9\n"
    )


def by_index(logits, y):
    return -jax.nn.log_softmax(logits)[jnp.arange(len(y)), y]


def by_one_hot(logits, y):
    return -(jax.nn.one_hot(y, CLASSES) * jax.nn.log_softmax(logits)).sum(-1)


def by_comparison(logits, y):
    chosen = (y[:, None] == jnp.arange(CLASSES)[None]).astype(jnp.float32)
    return -(chosen * jax.nn.log_softmax(logits)).sum(-1)


def one_by_one(logits, y):
    return jax.vmap(lambda row, label: -jax.nn.log_softmax(row)[label])(logits, y)


def in_a_scan(logits, y):
    return jax.lax.map(lambda given: -jax.nn.log_softmax(given[0])[given[1]], (logits, y))


def in_a_checkpointed_jit(logits, y):
    return jax.checkpoint(jax.jit(by_index))(logits, y)


LOOKUPS = [
    by_optax,
    by_index,
    by_one_hot,
    by_comparison,
    one_by_one,
    in_a_scan,
    in_a_checkpointed_jit,
]


def outside_by_leaf(losses, y):
    """`(leaf, classes, how many are out of range)` of each lookup, without running a step."""
    logits, y = jnp.zeros((ROWS, CLASSES)), jnp.asarray(y)
    found = lookups(jax.make_jaxpr(losses)(logits, y), 1, 1)
    return {(f.leaf, f.size, float(f.outside(y))) for f in found}


@pytest.mark.parametrize("losses", LOOKUPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.float32])
def test_labels_are_seen_however_they_are_looked_up(losses, dtype):
    y = with_labels(12, -1, 10, 9)["y"].astype(dtype)
    cast = lambda logits, y: losses(logits, y.astype(jnp.int32))
    assert outside_by_leaf(cast, y) == {(0, CLASSES, 3)}


def test_labels_out_of_range_are_named_with_their_range_and_the_classes():
    step, state = make(classify(by_index))
    found, _ = said(step, state, with_labels(9, -1, 0))
    assert found == [
        (
            RuntimeWarning,
            "At step 0 loss_fn used indices that are out of range:\n" + outside(9, -1, 1) + FIX,
        )
    ]


def test_labels_that_make_the_loss_nan_are_named_with_it():
    step, state = make(classify(by_optax), accumulate=2)
    found, (state, metrics) = said(step, state, with_labels(12, 0, 10))
    assert found == [
        (
            RuntimeWarning,
            "The loss was not finite at step 0, the first. It was skipped: the model is as it "
            "was before. The batch:\n"
            "  batch['x']: float32[16, 4] from -1.5 to 1.5\n" + outside(12, 0, 2) + ADVICE,
        )
    ]
    assert (metrics["skipped"], state.step) == (1, 1)
    assert "watch" not in metrics


def test_labels_that_go_out_of_range_later_are_named_once_with_their_step():
    step, state = make(classify(by_one_hot))
    heard = []
    for last in (0, 9, 10, 11, 0):
        found, (state, metrics) = said(step, state, with_labels(last))
        heard.append(found)
        # Steps that are done are read by the next call, which waits for none.
        jax.block_until_ready(metrics)
    assert [len(found) for found in heard] == [0, 0, 0, 1, 0]
    assert heard[3][0][1] == (
        "At step 2 loss_fn used indices that are out of range:\n" + outside(10, 0, 1) + FIX
    )


def test_a_run_that_is_stopped_names_the_labels():
    step, state = make(classify(by_optax), stop_after=1)
    with (
        pytest.warns(RuntimeWarning, match="^At step 1 loss_fn used indices"),
        pytest.raises(FloatingPointError) as e,
    ):
        for label in (0, 10, 0, 0):
            state, _ = step(state, with_labels(label))
    assert str(e.value) == (
        "The loss was not finite at step 1, the last of 1 such steps in a row.\n"
        "They were skipped: the model is as it was before them. The batch of that step:\n"
        "  batch['x']: float32[16, 4] from -1.5 to 1.5\n" + outside(10, 0, 1) + ADVICE
    )


def masked(logits, y):
    return by_optax(logits, jnp.where(y < 0, 0, y))


def asked_for_the_nearest(logits, y):
    return -jnp.take(jax.nn.log_softmax(logits).T, y, axis=0, mode="clip")


def asked_for_zero(logits, y):
    return -jax.nn.log_softmax(logits).T.at[y].get(mode="fill", fill_value=0)


def one_column_of_several(logits, y):
    columns = jnp.stack([y * 0 + 500, jnp.maximum(y, 0)], 1)
    return by_optax(logits, columns[:, 1])


@pytest.mark.parametrize(
    "losses",
    [masked, asked_for_the_nearest, asked_for_zero, one_column_of_several],
    ids=lambda f: f.__name__,
)
def test_indices_that_the_loss_puts_in_range_itself_are_its_own_affair(losses):
    assert outside_by_leaf(losses, with_labels(-1)["y"]) == set()


def test_only_the_values_that_are_used_as_indices_count():
    def loss_fn(w, batch, keys):
        return Mean.of(by_optax(w[batch["columns"][:, 1]], batch["columns"][:, 0]))

    step, state = make(loss_fn)
    columns = np.stack([Y, Y % 4, 99 + Y], 1).astype(np.int32)
    assert said(step, state, {"columns": columns})[0] == []
    columns[3, 1] = 4
    step, state = make(loss_fn)
    (found,) = said(step, state, {"columns": columns})[0]
    assert found[1].split("\n")[1] == (
        "  batch['columns']: int32[16, 3] from 0 to 108; 1 used as an index of 4, but not in 0 "
        "to 3"
    )


def test_looking_at_indices_adds_no_message_between_devices():
    def messages(losses):
        step, state = make(classify(losses), shard_update=False)
        text = step.lower(state, with_labels()).compile().as_text()
        return text.count(" all-reduce(")

    assert messages(by_optax) == messages(lambda logits, y: logits.sum(-1) * y)
