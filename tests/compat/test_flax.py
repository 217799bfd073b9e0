"""What Flax offered around pmap: one body, two implementations (Flax's own, and ours)."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import jax_utils
from flax.training import common_utils

import compat

FLAX = types.SimpleNamespace(
    shard=common_utils.shard,
    shard_prng_key=common_utils.shard_prng_key,
    stack_forest=common_utils.stack_forest,
    get_metrics=common_utils.get_metrics,
    onehot=common_utils.onehot,
    scan_in_dim=jax_utils.scan_in_dim,
    pad_shard_unpad=jax_utils.pad_shard_unpad,
    replicate=jax_utils.replicate,
    unreplicate=jax_utils.unreplicate,
)


@pytest.fixture(params=[FLAX, compat], ids=["flax", "compat"])
def utils(request):
    return request.param


def test_shard_splits_the_leading_dimension_over_the_devices(utils):
    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    out = utils.shard({"x": x})["x"]
    np.testing.assert_array_equal(out, x.reshape(8, 2, 2))


def test_shard_prng_key_gives_each_device_a_key(utils):
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        assert jnp.array_equal(utils.shard_prng_key(key), jax.random.split(key, 8))


def test_stack_forest_turns_a_list_of_trees_into_a_tree_of_series(utils):
    out = utils.stack_forest([{"loss": np.float32(i), "n": np.ones(2)} for i in range(3)])
    np.testing.assert_array_equal(out["loss"], [0, 1, 2])
    assert out["n"].shape == (3, 2)


def test_get_metrics_reads_the_first_replica_of_every_step(utils):
    step = compat.pmap(lambda x: {"loss": jax.lax.pmean(x, "i")}, "i")
    history = [step(np.full(8, i, np.float32)) for i in range(3)]
    np.testing.assert_array_equal(utils.get_metrics(history)["loss"], [0, 1, 2])


def test_onehot_takes_any_rank_and_other_values(utils):
    labels = jnp.array([[0, 2, 5]])
    out = utils.onehot(labels, 3, on_value=0.9, off_value=0.1)
    want = np.float32([[[0.9, 0.1, 0.1], [0.1, 0.1, 0.9], [0.1, 0.1, 0.1]]])
    np.testing.assert_array_equal(out, want)
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [(0,), (1,), (2, 0)])
def test_scan_in_dim_scans_over_any_dimensions(utils, axis, keepdims):
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    def body(carry, row):
        carry = carry + row.sum()
        return carry, row * 0 + carry

    carry, ys = utils.scan_in_dim(body, 0.0, x, axis=axis, keepdims=keepdims)
    rest = tuple(d for d in range(3) if d not in axis)
    running = x.transpose(*axis, *rest).reshape(-1, *[x.shape[d] for d in rest])
    running = running.sum(axis=tuple(range(1, running.ndim))).cumsum()
    shape = [x.shape[d] for d in axis] + [1] * len(rest)
    want = np.broadcast_to(running.reshape(shape), [x.shape[d] for d in (*axis, *rest)])
    assert carry == x.sum()
    np.testing.assert_array_equal(ys, want.transpose(np.argsort((*axis, *rest))))


def test_pad_shard_unpad_takes_a_batch_of_any_size(utils):
    seen = []
    double = compat.pmap(lambda w, x: (seen.append(x.shape), w * x)[1], in_axes=(None, 0))
    f = utils.pad_shard_unpad(double)
    x = np.arange(26, dtype=np.float32).reshape(13, 2)
    np.testing.assert_array_equal(f(np.float32(2), x), 2 * x)
    np.testing.assert_array_equal(f(np.float32(2), x[:3], min_device_batch=2), 2 * x[:3])
    assert seen == [(2, 2)]


def test_pad_shard_unpad_can_pass_arguments_and_results_on(utils):
    total = compat.pmap(
        lambda w, x, *, k: jax.lax.psum(w * x.sum() + k, "i"), "i", in_axes=(None, 0)
    )
    f = utils.pad_shard_unpad(total, static_argnames=("k",), static_return=True)
    out = f(np.float32(1), np.ones((9, 1), np.float32), k=np.zeros(8, np.float32))
    np.testing.assert_array_equal(out, [9.0] * 8)


def test_replicate_and_unreplicate_undo_each_other(utils):
    tree = {"w": np.arange(3, dtype=np.float32), "step": np.int32(4)}
    copies = utils.replicate(tree)
    assert copies["w"].shape == (8, 3)
    back = utils.unreplicate(copies)
    np.testing.assert_array_equal(back["w"], tree["w"])
    assert back["step"] == 4


def test_a_batch_that_does_not_divide_is_named():
    with pytest.raises(ValueError) as e:
        compat.shard({"x": np.ones((12, 2)), "y": np.ones(16), "n": np.float32(3)})
    assert str(e.value) == (
        "2 leaves of the batch do not divide over 8 devices:\n"
        "  batch['n']: ()\n"
        "  batch['x']: (12, 2)\n"
        "Make the leading dimension a multiple of 8, or wrap the mapped function in "
        "compat.pad_shard_unpad."
    )


def test_pad_shard_unpad_names_sizes_that_differ():
    with pytest.raises(ValueError) as e:
        compat.pad_shard_unpad(lambda w, x, y: x)(0, np.ones(3), np.ones(4))
    assert str(e.value) == (
        "pad_shard_unpad was given batches of [3, 4] rows. Give batches of one size, and name "
        "the other arguments in static_argnums or static_argnames."
    )


def test_tree_map_and_tree_multimap_take_one_tree_or_more():
    a, b = {"x": 1, "y": (2, 3)}, {"x": 10, "y": (20, 30)}
    assert compat.tree_map(lambda x: -x, a) == {"x": -1, "y": (-2, -3)}
    assert compat.tree_multimap(lambda p, g: p + g, a, b) == {"x": 11, "y": (22, 33)}


@pytest.mark.parametrize(("forest", "what"), [([], "no trees"), ({"loss": 1}, "a dict")])
def test_metrics_must_be_a_list(forest, what):
    with pytest.raises(ValueError) as e:
        compat.get_metrics(forest)
    assert str(e.value) == (
        f"stack_forest was given {what}. Give a list of trees of one structure, such as the "
        "metrics of each step."
    )


def test_pad_shard_unpad_names_a_batch_without_rows():
    f = compat.pad_shard_unpad(lambda w, x: x, static_argnums=0)
    with pytest.raises(ValueError) as e:
        f(0, {"x": np.ones(3), "n": 3.0})
    assert str(e.value) == (
        "pad_shard_unpad was given batches of ['no', 3] rows. Give batches of one size, and "
        "name the other arguments in static_argnums or static_argnames."
    )


def test_scan_in_dim_wants_a_dimension():
    with pytest.raises(ValueError) as e:
        compat.scan_in_dim(lambda c, x: (c, x), 0.0, np.ones(3), axis=())
    assert str(e.value) == "scan_in_dim was given no axis. Give at least one dimension, axis=0."
