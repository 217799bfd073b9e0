"""Flax's `TrainState`, whose step is a Python number at first, through `distributed`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import meshdp

X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
MODEL = nn.Dense(4)


def make(key):
    params = MODEL.init(key, jnp.zeros((1, 8)))
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=optax.adam(0.1))


def train(state, x):
    loss = lambda params: (state.apply_fn(params, x) ** 2).mean()
    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


@pytest.mark.parametrize("on_the_mesh", [True, False])
def test_a_train_state_of_flax_is_a_state(on_the_mesh):
    step = meshdp.distributed(
        train, mesh=meshdp.make_mesh(data=2, fsdp=4), layout=meshdp.fsdp(min_size=1)
    )
    state = step.init(make, jax.random.key(0)) if on_the_mesh else make(jax.random.key(0))
    alone, one = make(jax.random.key(0)), jax.jit(train)
    for _ in range(3):
        state, loss = step(state, X)
        alone, want = one(alone, X)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert (int(state.step), state.step.dtype) == (3, jnp.int32)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    kernel = state.params["params"]["kernel"]
    assert kernel.addressable_data(0).shape == (2, 4)


def test_a_run_with_a_train_state_of_flax_goes_on_where_it_was_saved(tmp_path):
    def fitted(steps, folder):
        step = meshdp.distributed(
            lambda state, batch: train(state, batch["x"]), mesh=meshdp.make_mesh(data=8)
        )
        state, batches = make(jax.random.key(0)), ({"x": X} for _ in range(steps))
        return meshdp.fit(step, state, batches, steps=steps, checkpoint=folder, log=[]).state

    fitted(2, tmp_path)
    state, whole = fitted(4, tmp_path), fitted(4, None)
    assert int(state.step) == 4
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)
