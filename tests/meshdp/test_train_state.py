"""`Mean`, exact under any split, and `TrainState`, a pytree that is built when looked into."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdp
from meshdp import Mean, TrainState

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)
MASKS = {
    "each_value": VALUES % 2 == 0,
    "whole_rows": np.array([True, False, True]),
    "one_column": np.array([[1], [0], [0.5]]),
    "one_row": np.array([[1, 0, 0, 2]]),
    "one_number": np.array(3),
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mean_is_weighted_by_its_mask(mask):
    weights = np.float64(MASKS[mask])
    weights = weights[:, None] if weights.shape == (3,) else weights
    weights = np.broadcast_to(weights, VALUES.shape)
    mean = Mean.of(VALUES, MASKS[mask])
    np.testing.assert_allclose(mean.value(), np.average(VALUES, weights=weights), rtol=1e-6)
    np.testing.assert_allclose(mean.weight, weights.sum(), rtol=1e-6)


def test_without_a_mask_each_value_counts_once():
    mean = Mean.of(VALUES)
    assert (float(mean.total), float(mean.weight)) == (66, 12)


def test_sums_are_taken_in_float32_at_least():
    values = jnp.full(4096, 1.001, jnp.bfloat16)
    for mean in (Mean.of(values), Mean.of(values, values > 0)):
        assert (mean.total.dtype, mean.weight.dtype) == (jnp.float32, jnp.float32)
        assert float(mean.weight) == 4096
    assert Mean.of(np.arange(3)).total.dtype == jnp.float32


def test_what_is_masked_out_may_be_nan_and_gets_no_gradient():
    mask = jnp.array([True, False])
    mean, grad = jax.value_and_grad(lambda v: Mean.of(v, mask).total)(jnp.array([2.0, jnp.nan]))
    assert float(mean) == 2
    np.testing.assert_array_equal(grad, [1, 0])


def test_a_mean_of_nothing_is_nan():
    assert np.isnan(Mean.of(VALUES, np.zeros(3)).value())


@pytest.mark.parametrize("shape", [(4,), (3, 4, 1), (2, 4), (3, 3)], ids=str)
def test_a_mask_that_does_not_fit_is_refused(shape):
    with pytest.raises(ValueError) as e:
        Mean.of(VALUES, np.ones(shape))
    assert str(e.value) == (
        f"Mean.of got values of shape (3, 4) and a mask of shape {shape} (in a step, those of "
        "one device's examples). Give one weight per value, or one for each of the leading "
        "dimensions: shape (3, 4) or (3,)."
    )


def trained():
    """A state that has come out of a step, and not been looked into."""
    step = meshdp.make_train_step(
        lambda p, x, keys: Mean.of(x @ p["w"]), optax.sgd(0.1), mesh=meshdp.make_mesh(data=8)
    )
    state = step.init(lambda key: {"w": jnp.ones(4), "f": jnp.tanh}, jax.random.key(0))
    return step(state, np.ones((8, 4), np.float32))[0]


def test_a_state_out_of_a_step_is_a_pytree_like_any_other():
    state = trained()
    assert int(state.step) == 1
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(state)]
    assert paths[:2] == [".model['f']", ".model['w']"]
    assert paths[-2:] == [".step", ".key"]
    doubled = jax.tree.map(lambda x: x, state)
    assert isinstance(doubled, TrainState)
    np.testing.assert_allclose(doubled.model["w"], 0.9 * np.ones(4), rtol=1e-6)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)


def test_reading_the_step_or_the_key_builds_nothing():
    state = trained()
    assert (int(state.step), state.key.shape) == (1, ())
    assert state._fields is None
    assert state.model["f"] is jnp.tanh
    assert state._flat is None


def test_fields_are_replaced_in_a_copy():
    state = trained()
    other = state.replace(model={"w": jnp.zeros(4), "f": jnp.sin}, step=jnp.int32(7))
    assert (int(other.step), int(state.step)) == (7, 1)
    np.testing.assert_array_equal(other.model["w"], np.zeros(4))
    assert other.opt_state == state.opt_state
    with pytest.raises(ValueError) as e:
        state.replace(modle={}, stpe=1)
    assert str(e.value) == (
        "A TrainState has no modle, stpe; it has model, opt_state, guard, model_state, step, "
        "key."
    )


def test_it_prints_in_one_line_and_waits_for_nothing():
    assert repr(trained()) == "TrainState(dict of 4 numbers, step=...)"
