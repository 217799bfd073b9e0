"""What a distributed step does with the memory of its arguments, and when."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


def descend(w, x):
    """One step of gradient descent: the mean over the batch couples all of its rows."""
    loss, grad = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
    return w - 0.1 * grad, loss


def one_device(w, x, steps=1):
    for _ in range(steps):
        w, loss = jax.jit(descend)(jnp.asarray(w), jnp.asarray(x))
    return np.asarray(w), np.asarray(loss)


def weights(rows=4, columns=8):
    return np.sin(np.arange(rows * columns, dtype=np.float32)).reshape(rows, columns)


MESHES = {
    "data": dict(data=8),
    "fsdp": dict(fsdp=8),
    "data_fsdp_tensor": dict(data=2, fsdp=2, tensor=2),
}


def test_shardings_are_told_of_shapes_without_making_anything():
    mesh = meshdp.make_mesh(fsdp=8)
    step = meshdp.distributed(descend, mesh=mesh, layout=meshdp.fsdp(min_size=64))
    shapes = {"w": jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32), "f": jnp.tanh}
    found = step.shardings({**shapes, "small": jax.ShapeDtypeStruct((3,), jnp.float32)})
    assert found == {
        "w": NamedSharding(mesh, P("fsdp")),
        "f": None,
        "small": NamedSharding(mesh, P()),
    }


def test_lower_takes_arrays_or_shapes_of_everything():
    step = meshdp.distributed(
        lambda w, b, key, n: (w + b["x"].mean() * b["n"], n), mesh=meshdp.make_mesh(data=8)
    )
    w, batch = jnp.asarray(weights()), {"x": X, "n": np.float32(2)}
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    shapes = jax.tree.map(shape, (w, batch, jax.random.key(0), np.float32(1)))
    texts = {
        step.lower(*args).as_text() for args in [(w, batch, jax.random.key(0), 1.0), shapes]
    }
    assert len(texts) == 1
    assert not w.is_deleted()


def test_the_callers_arrays_survive_the_donation_of_what_was_made_of_them():
    step = meshdp.distributed(descend, mesh=meshdp.make_mesh(data=8))
    committed = jax.device_put(weights(), jax.devices()[0])
    for mine in (weights(), jnp.asarray(weights()), committed):
        w, _ = step(mine, X)
        step(w, X)
        np.testing.assert_array_equal(mine, weights())


def test_a_numpy_array_changed_after_the_call_does_not_change_the_result():
    step = meshdp.distributed(lambda w, x: (w, w + x.mean()), mesh=meshdp.make_mesh(data=8))
    w, x = np.zeros((64, 64), np.float32), np.ones((64, 64), np.float32)
    state, aux = step(w, x)
    w[:], x[:] = 7, 7
    np.testing.assert_array_equal(state, np.zeros((64, 64)))
    np.testing.assert_array_equal(aux, np.ones((64, 64)))


def test_the_state_is_donated_and_only_the_state():
    step = meshdp.distributed(lambda w, x, y: (w + 1, None), mesh=meshdp.make_mesh(data=8))
    w, _ = step(weights(), X, X)
    x = meshdp._place.shard_batch(X, step.mesh)
    y = jax.device_put(X, NamedSharding(step.mesh, P()))
    step(w, x, y)
    assert [a.is_deleted() for a in (w, x, y)] == [True, False, False]


def test_with_donate_false_the_state_stays():
    step = meshdp.distributed(descend, mesh=meshdp.make_mesh(data=8), donate=False)
    w, _ = step(weights(), X)
    step(w, X)
    np.testing.assert_allclose(w, one_device(weights(), X)[0], rtol=1e-5)


def test_only_what_is_out_of_place_is_copied():
    step = meshdp.distributed(
        lambda s, x: ({"a": s["a"] + 1, "b": s["b"] + 1}, None), mesh=meshdp.make_mesh(data=8)
    )
    state, _ = step({"a": weights(), "b": weights()}, X)
    mixed = {"a": state["a"], "b": jnp.asarray(weights())}
    step(mixed, X)
    assert [mixed[k].is_deleted() for k in "ab"] == [True, False]


def test_an_array_that_is_in_the_state_twice_becomes_two():
    step = meshdp.distributed(
        lambda s, x: ({"w": s["w"] + 1, "ema": s["ema"] * 2}, None),
        mesh=meshdp.make_mesh(data=8),
    )
    w = step.init(lambda: jnp.ones(4))
    state, _ = step({"w": w, "ema": w}, X)
    state, _ = step(state, X)
    np.testing.assert_array_equal(state["w"], 3 * np.ones(4))
    np.testing.assert_array_equal(state["ema"], 4 * np.ones(4))


def test_an_error_inside_the_step_leaves_the_step_and_the_state_usable():
    broken = SimpleNamespace(now=True)

    @meshdp.distributed(mesh=meshdp.make_mesh(data=8))
    def step(w, x):
        if broken.now:
            raise KeyError("mine")
        return descend(w, x)

    w = step.init(lambda: jnp.asarray(weights()))
    with pytest.raises(KeyError, match="mine"):
        step(w, X)
    broken.now = False
    np.testing.assert_allclose(step(w, X)[0], one_device(weights(), X)[0], rtol=1e-5)


def test_the_call_returns_before_the_work_is_done():
    @meshdp.distributed(mesh=meshdp.make_mesh(data=8))
    def step(w, x):
        return jax.lax.fori_loop(0, 300, lambda i, w: jnp.tanh(w @ w), w), None

    w = jnp.full((256, 256), 0.01)
    w, _ = step(w, X)
    jax.block_until_ready(w)
    w, _ = step(w, X)
    assert not w.is_ready()
