"""A mesh that the user has set (`jax.set_mesh`) is none of our business."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.testing import verify

X = np.arange(64, dtype=np.float32).reshape(16, 4) / 64
W = np.ones((4, 8), np.float32)


def descend(w, x, *, rate=0.1):
    loss, grad = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
    return w - rate * grad, loss


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def outer(request):
    """A mesh of all eight devices is set; ours has four of them."""
    with jax.set_mesh(jax.make_mesh((8,), ("z",), axis_types=(request.param,))):
        yield


@pytest.fixture
def mesh():
    return meshdp.make_mesh(data=2, fsdp=2, devices=jax.devices()[4:])


def test_distributed_runs_on_its_own_devices(outer, mesh):
    step = meshdp.distributed(descend, mesh=mesh, layout=meshdp.fsdp(min_size=1))
    state = step.init(lambda: jnp.ones((4, 8)))
    state, loss = step(state, X)
    with jax.set_mesh(None):
        want, want_loss = jax.jit(descend)(W, X)
    np.testing.assert_allclose(meshdp.to_host(state), want, rtol=1e-6)
    np.testing.assert_allclose(meshdp.to_host(loss), want_loss, rtol=1e-6)
    assert state.sharding.device_set == set(jax.devices()[4:])
    assert verify(step, state, X).leaves == 2
    assert "all-reduce" in str(meshdp.report(step, state, X))
    assert step.lower(state, X).compile().input_shardings[0][0][0].mesh == mesh


def test_a_training_step_and_its_loop_run_on_their_own_devices(outer, mesh, tmp_path):
    def loss(w, batch, keys):
        return meshdp.Mean.of(((batch["x"] @ w) ** 2).sum(-1))

    step = meshdp.make_train_step(
        loss, optax.sgd(0.1), mesh=mesh, layout=meshdp.fsdp(min_size=1)
    )
    state = step.init(lambda key: jnp.ones((4, 8)), jax.random.key(0))
    evaluate = meshdp.Evaluation(lambda w, b: {"loss": loss(w, b, None)}, lambda: [{"x": X}])
    fitted = meshdp.fit(
        step,
        state,
        ({"x": X} for _ in range(2)),
        steps=2,
        evaluate=evaluate,
        checkpoint=tmp_path,
        log=[],
    )
    w = W
    for _ in range(2):
        w = w - 0.1 * 2 / 16 * X.T @ (X @ w)
    np.testing.assert_allclose(meshdp.to_host(fitted.state.model), w, rtol=1e-5)
    np.testing.assert_allclose(
        fitted.evaluation["loss"], ((X @ w) ** 2).sum(-1).mean(), rtol=1e-5
    )
    assert verify(step, fitted.state, {"x": X}).worst < 1e-5
    assert meshdp.report(step, fitted.state, {"x": X}).least is not None


def test_what_is_placed_lies_on_the_devices_that_were_named(outer, mesh):
    there = NamedSharding(mesh, P("fsdp"))
    tree = meshdp.place({"w": W}, there)
    again = meshdp.reshard(tree, NamedSharding(mesh, P(None, "data")))
    assert [x["w"].sharding.spec for x in (tree, again)] == [P("fsdp"), P(None, "data")]
    np.testing.assert_array_equal(meshdp.to_host(again)["w"], W)
    assert meshdp.shard_batch(X, mesh).sharding.device_set == set(jax.devices()[4:])
