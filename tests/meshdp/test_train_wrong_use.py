"""Nothing silently trains on garbage: what a training step says of wrong use."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import meshdp
from meshdp import Mean

ROWS, CLASSES = 16, 10
X = np.random.default_rng(0).standard_normal((ROWS, 4)).clip(-1.5, 1.5).astype(np.float32)
Y = np.arange(ROWS) % CLASSES
KEY = jax.random.key(0)
ADVICE = (
    "Look for labels out of range, a logarithm of or division by 0, or a learning rate that is "
    "too high."
)


def with_labels(*labels):
    """The first labels replaced by these."""
    return {"x": X, "y": np.array([*labels, *Y[len(labels) :]], np.int32)}


def make(
    loss_fn, make_model=lambda key: 0.1 * jnp.ones((4, CLASSES)), optimizer=None, **options
):
    loss_fn.__qualname__ = "loss_fn"
    step = meshdp.make_train_step(
        loss_fn, optimizer or optax.sgd(0.1), mesh=meshdp.make_mesh(data=2, fsdp=4), **options
    )
    return step, step.init(make_model, KEY)


def said(call, *args):
    """What a call warns of, with the kind of each warning, and what it returns."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = call(*args)
    return [(w.category, str(w.message)) for w in found], out


def by_optax(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def classify(losses):
    return lambda w, batch, keys: Mean.of(losses(batch["x"] @ w, batch["y"]))


def test_a_loss_that_is_nan_from_the_start_is_named_at_the_first_step():
    def loss_fn(w, batch, keys):
        return Mean.of(jnp.log(-jnp.square(batch["x"] @ w)).sum(-1))

    step, state = make(loss_fn, skip=False)
    found, (state, _) = said(step, state, {"x": X})
    assert found == [
        (
            RuntimeWarning,
            (
                "The loss was not finite at step 0, the first. It was taken, as skip=False "
                f"says. The batch:\n  batch['x']: float32[16, 4] from -1.5 to 1.5\n{ADVICE}"
            ),
        )
    ]
    # Of later ones `skipped` tells; a run says it once.
    assert said(step, state, {"x": X})[0] == []


def test_a_gradient_that_is_not_finite_from_the_start_is_named():
    def loss_fn(model, batch, keys):
        return Mean.of((batch["x"] @ jnp.sqrt(model["w"])).sum(-1) + model["b"])

    zeros = lambda key: {"w": jnp.zeros((4, 2)), "b": jnp.zeros(())}
    step, state = make(loss_fn, zeros)
    found, _ = said(step, state, {"x": X})
    assert found == [
        (
            RuntimeWarning,
            (
                "The gradient of model['w'] was not finite at step 0, the first. It was "
                "skipped: the model is as it was before. The batch:\n"
                f"  batch['x']: float32[16, 4] from -1.5 to 1.5\n{ADVICE}"
            ),
        )
    ]


def test_a_schedule_that_returns_nan_spoils_nothing_and_is_named():
    # A warmup of no steps: 0 / 0.
    schedule = lambda count: 0.1 * jnp.minimum(1.0, (count - 1) / (0 * count))
    loss_fn = lambda w, batch, keys: Mean.of((batch["x"] @ w).sum(-1))
    step, state = make(loss_fn, optimizer=optax.adam(schedule), stop_after=1)
    before = np.asarray(state.model)
    (found, *_), (state, metrics) = said(step, state, {"x": X})
    assert found[1].startswith(
        "The update that the optimizer made of the gradient was not finite at step 0, the "
        "first. It was skipped: the model is as it was before. The batch:\n"
    )
    np.testing.assert_array_equal(state.model, before)
    assert (metrics["skipped"], state.guard.leaf) == (1, 2)


def test_a_mask_that_leaves_nothing_is_named():
    loss_fn = lambda w, batch, keys: Mean.of((batch["x"] @ w).sum(-1), batch["mask"])
    step, state = make(loss_fn)
    found, _ = said(step, state, {"mask": np.zeros(ROWS, bool), "x": X})
    assert found == [
        (
            RuntimeWarning,
            (
                "No example counts, all weights are 0, at step 0, the first. It was skipped: "
                "the model is as it was before. The batch:\n"
                "  batch['mask']: bool[16]\n"
                "  batch['x']: float32[16, 4] from -1.5 to 1.5\n"
                "Look at the mask."
            ),
        )
    ]


@pytest.mark.parametrize("shape, here", [((ROWS, 3), "(2, 3)"), ((ROWS, 1), "(2, 1)")])
def test_a_mask_of_the_wrong_shape_is_refused(shape, here):
    loss_fn = lambda w, batch, keys: Mean.of((batch["x"] @ w).sum(-1), batch["mask"])
    step, state = make(loss_fn)
    with pytest.raises(ValueError) as e:
        step(state, {"x": X, "mask": np.ones(shape)})
    assert str(e.value) == (
        f"Mean.of got values of shape (2,) and a mask of shape {here} (in a step, those of one "
        "device's examples). Give one weight per value, or one for each of the leading "
        "dimensions: shape (2,)."
    )


def test_a_mask_of_another_length_is_refused():
    step, state = make(classify(by_optax))
    with pytest.raises(ValueError) as e:
        step(state, {"mask": np.ones(8), **with_labels()})
    assert str(e.value) == (
        "The leaves of the batch disagree about the number of rows, their leading dimension:\n"
        "  ['mask']: shape (8,)\n  ['x']: shape (16, 4)\n  ['y']: shape (16,)\n"
        "Give all the same number; what is not one per example can be a scalar, or be "
        "replicated with meshdp.place."
    )


@pytest.mark.parametrize(
    "batch, what",
    [
        (np.float32(1), "  (root): shape ()"),
        ({"x": 3}, "  ['x']: shape ()"),
        ({"key": KEY}, "  ['key']: shape ()"),
        ({}, "  it has no arrays"),
        ("x", "  it has no arrays"),
    ],
    ids=["scalar", "number", "key", "empty", "text"],
)
def test_a_batch_without_a_leading_dimension_is_refused(batch, what):
    step, state = make(classify(by_optax))
    with pytest.raises(ValueError) as e:
        step(state, batch)
    assert str(e.value) == (
        "The batch has no leaf with rows, so there is nothing to split:\n"
        f"{what}\n"
        "Give leaves a leading dimension, one row for each example, or replicate them with "
        "meshdp.place."
    )


class Dropped(eqx.Module):
    linear: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, key):
        self.linear = eqx.nn.Linear(4, CLASSES, key=key)
        self.drop = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        return self.drop(self.linear(x), key=key, inference=key is None)


def with_keys(model, batch, keys):
    return Mean.of(jax.vmap(model)(batch["x"], keys).sum(-1))


def without_keys(model, batch, keys):
    return Mean.of(jax.vmap(model, (0, None))(batch["x"], None).sum(-1))


def always_the_same_key(model, batch, keys):
    keys = jax.random.split(jax.random.key(1), len(batch["x"]))
    return with_keys(model, batch, keys)


def the_same_key_in_a_scan(model, batch, keys):
    layer = lambda x, _: (x + jax.random.normal(jax.random.PRNGKey(0), x.shape), None)
    return Mean.of(jax.lax.scan(layer, batch["x"] @ model.linear.weight.T, length=2)[0].sum(-1))


SAME = (
    "loss_fn draws random numbers, but not from its keys, so they are the same at every step. "
    "Draw them from keys, which has one PRNG key for each example: jax.vmap(model)(batch['x'], "
    "key=keys)."
)


@pytest.mark.parametrize(
    "loss_fn, words",
    [
        (with_keys, []),
        (always_the_same_key, [SAME]),
        (the_same_key_in_a_scan, [SAME]),
        (
            without_keys,
            [
                (
                    "loss_fn does not use its keys, so these drop nothing: model.drop (p=0.1). "
                    "Give each example its key: jax.vmap(model)(batch['x'], key=keys)."
                )
            ],
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_keys_that_are_not_used_where_something_is_random_are_named_once(loss_fn, words):
    step, state = make(loss_fn, Dropped, accumulate=2)  # which traces it several times
    found, _ = said(step.lower, state, {"x": X})
    assert found == [(UserWarning, w) for w in words]
    assert said(step.lower, state, {"x": np.concatenate([X, X])})[0] == []  # traced anew


def test_keys_in_the_batch_that_are_not_used_are_named():
    step, state = make(classify(by_optax))
    found, _ = said(step.lower, state, {**with_labels(), "key": jax.random.split(KEY, ROWS)})
    assert found == [
        (
            UserWarning,
            (
                "loss_fn does not use the PRNG keys in batch['key']. Draw from them, or leave "
                "them out: it gets a key for each example anyway, as keys."
            ),
        )
    ]


def test_random_numbers_drawn_from_keys_in_the_batch_are_fine():
    def loss_fn(model, batch, keys):
        later = jax.vmap(jax.random.fold_in, (0, None))(batch["key"], 1)
        return with_keys(model, batch, later)

    step, state = make(loss_fn, Dropped)
    assert said(step.lower, state, {"x": X, "key": jax.random.split(KEY, ROWS)})[0] == []


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd, optax.adamw, optax.inject_hyperparams(optax.adam)],
    ids=["sgd", "adamw", "injected"],
)
def test_a_schedule_that_returns_several_rates_is_refused(optimizer):
    # As many as there are classes: JAX would scale each column by its own.
    schedule = lambda count: jnp.full((CLASSES,), 0.1)
    step, state = make(classify(by_optax), optimizer=optimizer(schedule))
    with pytest.raises(ValueError) as e:
        step(state, with_labels())
    assert str(e.value) == (
        "The learning rate, or its schedule, is not one number: of a single number in place of "
        "model the optimizer makes an update of shape (10,). Let the schedule return a scalar, "
        "as optax.cosine_decay_schedule(1e-3, 1000) does."
    )


def test_of_many_parameters_the_first_is_named():
    step, state = make(with_keys, Dropped, optimizer=optax.sgd(lambda count: jnp.ones((1,))))
    with pytest.raises(ValueError) as e:
        step(state, {"x": X})
    assert str(e.value) == (
        "The learning rate, or its schedule, is not one number: of a single number in place of "
        "model.linear.weight the optimizer makes an update of shape (1,), and likewise 1 more. "
        "Let the schedule return a scalar, as optax.cosine_decay_schedule(1e-3, 1000) does."
    )


def test_an_optimizer_that_takes_matrices_only_is_no_fault():
    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g @ jnp.eye(g.shape[1]), updates), state

    only = optax.GradientTransformation(lambda params: (), update)
    step, state = make(classify(by_optax), optimizer=only)
    assert said(step, state, with_labels())[0] == []


def test_flags_are_true_or_false():
    with pytest.raises(ValueError) as e:
        make(with_keys, clip=True, skip="no", stateful=1, shard_update=None, donate="x")
    assert str(e.value) == (
        "make_train_step cannot use these arguments:\n"
        "  donate: 'x'; it takes True or False\n"
        "  shard_update: None; it takes True or False\n"
        "  skip: 'no'; it takes True or False\n"
        "  stateful: 1; it takes True or False\n"
        "  clip: True; it takes a number above 0, or None"
    )


@pytest.mark.parametrize(
    "remat, words",
    [
        (
            "ful",
            "'ful', but loss_fn gives that name to nothing; it names 'h'. Did you mean 'full'?",
        ),
        (("h", "g"), "'g', but loss_fn gives that name to nothing; it names 'h'."),
    ],
    ids=str,
)
def test_a_name_to_keep_that_the_loss_gives_to_nothing_is_refused(remat, words):
    def loss_fn(w, batch, keys):
        return Mean.of(jax.jit(checkpoint_name, static_argnums=1)(batch["x"] @ w, "h").sum(-1))

    step, state = make(loss_fn, remat=remat)
    with pytest.raises(ValueError) as e:
        step.lower(state, {"x": X})
    assert str(e.value) == (
        f"remat names {words} jax.ad_checkpoint.checkpoint_name(x, name) gives one."
    )


@pytest.mark.parametrize("trains", [{"weight": True}, None, "linear", 3], ids=str)
def test_a_filter_that_does_not_fit_the_model_is_refused(trains):
    with pytest.raises(ValueError) as e:
        make(with_keys, Dropped, trains=trains)
    assert str(e.value).partition(" Equinox says: ")[0] == (
        "trains does not fit the model. It takes a function of a leaf, or a pytree of booleans "
        "and functions of the structure of the model or of a prefix of it, such as "
        "jax.tree.map(equinox.is_inexact_array, model)."
    )
