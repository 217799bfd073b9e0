"""verify: what it lets pass, what it catches, and what it says."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdp
from meshdp.testing import verify

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
BATCH = {"x": X}


@pytest.fixture(scope="module")
def mesh():
    return meshdp.make_mesh(data=2, fsdp=4)


class Power(eqx.Module):
    w: jax.Array
    times: int


def test_a_number_of_a_module_that_the_step_is_compiled_for_stays_one(mesh):
    def repeat(state, batch):
        w = state.w
        for _ in range(state.times):
            w = w @ w
        return Power(w, state.times), batch["x"].sum()

    state = Power(jnp.eye(8), 2)
    assert verify(meshdp.distributed(repeat, mesh=mesh), state, BATCH).leaves == 3


def test_a_number_of_a_state_is_one_of_its_arrays(mesh):
    def step(state, batch):
        w = state["w"] * state["decay"] ** state["step"] + batch["x"].mean()
        return {**state, "w": w, "step": state["step"] + 1}, w.sum()

    state = {"w": jnp.eye(8), "decay": 0.3, "step": 3}
    parity = verify(meshdp.distributed(step, mesh=mesh), state, BATCH)
    assert (parity.leaves, parity.worst < 1e-5) == (4, True)


def test_a_number_given_to_a_step_has_no_type_of_its_own_on_one_device_either(mesh):
    decay = lambda state, batch, rate: (state - rate * state, rate * state)
    state = jnp.linspace(0, 1, 64).astype(jnp.bfloat16).reshape(8, 8)
    assert verify(meshdp.distributed(decay, mesh=mesh), state, BATCH, 0.3).worst == 0


def test_a_number_in_a_model_is_no_parameter_and_does_not_train(mesh):
    def loss(model, batch, keys):
        return meshdp.Mean.of((batch["x"] @ model["w"] * model["scale"]).sum(-1) ** 2)

    step = meshdp.make_train_step(loss, optax.sgd(0.1), mesh=mesh)
    state = step.init(lambda key: {"w": jnp.ones((8, 8)), "scale": 0.5}, jax.random.key(0))
    verify(step, state, BATCH)


def square(model, batch, keys):
    x = batch["x"].astype(model.layers[0].weight.dtype)
    return meshdp.Mean.of((jax.vmap(model)(x) ** 2).sum(-1))


@pytest.mark.parametrize(
    ("dtype", "precision"), [(jnp.bfloat16, "full"), (jnp.float32, "bf16")]
)
def test_what_is_computed_in_bfloat16_may_differ_by_its_rounding(mesh, dtype, precision):
    step = meshdp.make_train_step(
        square, optax.adam(1e-2), mesh=mesh, layout=meshdp.fsdp(min_size=1), precision=precision
    )
    make = lambda key: eqx.nn.MLP(8, 8, 64, 1, dtype=dtype, key=key)
    state = step.init(make, jax.random.key(0))
    assert verify(step, state, BATCH).worst < 0.0625
    with pytest.raises(AssertionError, match="leaves differ"):
        verify(step, state, BATCH, rtol=1e-5)


def test_under_a_mesh_of_the_users_own_the_one_device_is_still_one(mesh):
    step = meshdp.make_train_step(
        square, optax.sgd(0.1), mesh=mesh, layout=meshdp.fsdp(min_size=1)
    )
    plain = meshdp.distributed(lambda w, batch: (w * 2, (batch["x"] @ w).sum()), mesh=mesh)
    with jax.set_mesh(mesh):
        state = step.init(lambda key: eqx.nn.MLP(8, 8, 8, 0, key=key), jax.random.key(0))
        verify(step, state, BATCH)
        verify(plain, jnp.ones((8, 8)), BATCH)
