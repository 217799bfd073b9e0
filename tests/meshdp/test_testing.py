"""`force_devices`, and what `verify` says of steps that are wrong."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.testing import Parity, force_devices, verify

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def mesh():
    return meshdp.make_mesh(data=8)


def python(code, **environment):
    env = {**os.environ, "JAX_PLATFORMS": "", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_forced_devices_are_there_also_where_xlas_own_flag_said_otherwise():
    code = """
import meshdp.testing
meshdp.testing.force_devices(3)
import jax
print(jax.device_count(), jax.devices()[0].platform)
meshdp.testing.force_devices(3)
try:
    meshdp.testing.force_devices(5)
except RuntimeError as e:
    print(e)
"""
    assert python(code, XLA_FLAGS="--xla_force_host_platform_device_count=2") == [
        "3 cpu",
        (
            "force_devices(5) comes too late: JAX has started with 3 cpu devices. Call it "
            "before anything asks for devices or makes an array, at the head of the script or "
            "conftest.py."
        ),
    ]


@pytest.mark.parametrize("n", [0, -1, 2.0, "8", True, None])
def test_what_is_no_number_of_devices_is_refused(n):
    with pytest.raises(ValueError) as e:
        force_devices(n)
    assert str(e.value) == (f"force_devices takes a whole number of devices from 1, not {n!r}.")


def test_forcing_the_devices_that_are_there_is_no_error():
    force_devices(8)


def good(state, x, key):
    noise = jax.random.normal(key, state["w"].shape)
    grad = jax.grad(lambda w: jnp.tanh(x @ w).mean())(state["w"])
    return {**state, "w": state["w"] - 0.1 * grad + noise}, {"n": x.shape[0], "name": "good"}


def test_a_good_step_passes_and_its_state_stays_alive(mesh):
    step = meshdp.distributed(good, mesh=mesh)
    state = step.init(lambda: {"w": jnp.eye(8), "f": jnp.tanh})
    found = verify(step, state, X, jax.random.key(0))
    assert (found.devices, found.leaves, found.worst < 1e-4) == (8, 2, True)
    assert not state["w"].is_deleted()
    verify(step, {"w": np.eye(8), "f": jnp.tanh}, X, jax.random.key(0))


def test_a_step_without_a_mesh_chooses_one():
    assert (
        verify(meshdp.distributed(good), {"w": jnp.eye(8)}, X, jax.random.key(0)).devices == 8
    )


def test_a_good_training_step_passes_with_masks_dropout_and_accumulation():
    def loss_fn(p, batch, keys):
        keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (8,)))(keys)
        h = jnp.where(keep, jnp.tanh(batch["x"] @ p["w"]), 0)
        losses = jnp.square(h).sum(-1)
        return meshdp.Mean.of(losses, batch["mask"]), {"size": meshdp.Mean.of(jnp.abs(h))}

    step = meshdp.make_train_step(
        loss_fn,
        optax.adamw(0.1),
        mesh=meshdp.make_mesh(data=2, fsdp=2, tensor=2),
        layout=meshdp.fsdp(min_size=8),
        accumulate=2,
    )
    state = step.init(lambda key: {"w": jax.random.normal(key, (8, 8))}, jax.random.key(0))
    verify(step, state, {"x": X, "mask": np.arange(16) > 5})
    assert not state.model["w"].is_deleted()


def test_a_sum_over_devices_that_should_be_a_mean_is_named_with_its_factor(mesh):
    @meshdp.distributed(mesh=mesh)
    def step(state, x):
        def per_device(w, x):
            grad = jax.grad(lambda w: jnp.tanh(x @ w).mean())(w)
            return jax.lax.psum(grad, "data")

        grad = jax.shard_map(
            per_device, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )(state["w"], x)
        return {"w": state["w"], "grad": grad}, None

    with pytest.raises(AssertionError) as e:
        verify(step, {"w": jnp.eye(8), "grad": jnp.zeros((8, 8))}, X)
    assert str(e.value) == (
        "1 of 2 leaves differ between 8 devices and one:\n"
        "  state['grad']: 8 times what one device gives: a sum where a mean was expected?"
    )


def test_a_mean_over_devices_that_should_be_a_sum_is_named_too(mesh):
    @meshdp.distributed(mesh=mesh)
    def step(state, x):
        per_device = lambda x: jax.lax.pmean(x.sum(), "data")
        return state, jax.shard_map(per_device, in_specs=P("data"), out_specs=P())(x)

    with pytest.raises(AssertionError) as e:
        verify(step, {"w": jnp.eye(8)}, X)
    assert str(e.value) == (
        "1 of 2 leaves differ between 8 devices and one:\n"
        "  aux: 0.125 times what one device gives: a mean where a sum was expected?"
    )


def position():
    """Which device this is, which one device alone cannot tell."""
    return jax.lax.axis_index("data").astype(jnp.float32)


def on_each(f):
    return jax.shard_map(f, in_specs=P("data"), out_specs=P("data"))


def test_other_differences_are_told_by_their_largest_number(mesh):
    step = meshdp.distributed(
        lambda w, x: (w, on_each(lambda x: x.at[0, 0].add(position()))(x)), mesh=mesh
    )
    with pytest.raises(AssertionError) as e:
        verify(step, jnp.eye(8), X)
    want = X[14, 0]
    assert str(e.value) == (
        "1 of 2 leaves differ between 8 devices and one:\n"
        f"  aux: differs by 7: {want + 7:.6g} on the mesh, {want:.6g} on one device"
    )


def test_what_is_not_finite_on_the_mesh_alone_is_counted(mesh):
    step = meshdp.distributed(
        lambda w, x: (w, on_each(lambda x: jnp.where(position() > 5, jnp.nan, x))(x)), mesh=mesh
    )
    with pytest.raises(AssertionError) as e:
        verify(step, jnp.eye(8), X)
    assert str(e.value) == (
        "1 of 2 leaves differ between 8 devices and one:\n"
        "  aux: 32 numbers are not finite on the mesh, 0 on one device"
    )


def test_whole_numbers_must_be_the_same_and_of_many_leaves_eight_are_shown(mesh):
    count = lambda x: jax.shard_map(
        lambda x: jax.lax.psum(jnp.int32(5), "data"), in_specs=P("data"), out_specs=P()
    )(x)
    step = meshdp.distributed(lambda w, x: (w, [count(x)] * 10), mesh=mesh)
    with pytest.raises(AssertionError) as e:
        verify(step, jnp.eye(8), X)
    lines = str(e.value).split("\n")
    assert lines[0] == "10 of 11 leaves differ between 8 devices and one:"
    assert lines[1] == (
        "  aux[0]: 8 times what one device gives: a sum where a mean was expected?"
    )
    assert lines[-1] == "  and 2 more"
    assert len(lines) == 10


def test_the_difference_that_is_allowed_can_be_set(mesh):
    nudge = lambda x: x * (1 + 1e-3 * (position() == 7))
    step = meshdp.distributed(lambda w, x: (w, on_each(nudge)(x)), mesh=mesh)
    found = verify(step, jnp.eye(8), X, rtol=0.1)
    assert found.worst_leaf == "aux"
    assert 1e-4 < found.worst < 1e-2
    with pytest.raises(AssertionError, match="leaves differ"):
        verify(step, jnp.eye(8), X)


def test_a_loss_that_divides_by_itself_is_found_out(mesh):
    step = meshdp.make_train_step(
        lambda w, x, keys: meshdp.Mean(jnp.square(x @ w).sum(), 1.0), optax.sgd(0.1), mesh=mesh
    )
    state = step.init(lambda key: jnp.eye(8), jax.random.key(0))
    with pytest.raises(AssertionError) as e:
        verify(step, state, X)
    assert "metrics['loss']: 0.125 times what one device gives: a mean where a sum was" in str(
        e.value
    )


def test_what_is_no_step_of_ours_is_refused():
    with pytest.raises(TypeError) as e:
        verify(jax.jit(good), {}, X)
    assert str(e.value) == (
        "verify takes a step made by meshdp.distributed or meshdp.make_train_step, not a "
        "PjitFunction. Wrap the function: meshdp.distributed(step)."
    )


def test_the_result_can_be_read_as_a_sentence():
    assert str(Parity(8, 3, 1.234e-6, "state['w']")) == (
        "3 leaves agree on 8 devices and on one; the largest relative difference is 1.2e-06, "
        "in state['w']"
    )
    assert str(Parity(8, 3, 0.0, "none")) == "3 leaves are equal on 8 devices and on one"
