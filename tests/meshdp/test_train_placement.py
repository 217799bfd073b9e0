"""Where a training state lies, when its step is compiled anew, and what it donates."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp._place import shard_batch

ROWS, D = 32, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, D)).astype(np.float32)
Y = RNG.normal(size=(ROWS,)).astype(np.float32)
W = RNG.normal(size=(D,)).astype(np.float32)
RATE = 0.1


def squares(w, batch, keys):
    return meshdp.Mean.of(jnp.square(batch["x"] @ w - batch["y"]))


def after(w):
    """The weights after one step, in NumPy."""
    return w - RATE * 2 * (X @ w - Y) @ X / ROWS


def make(loss_fn=squares, optimizer=None, sizes=(("data", 8),), **options):
    mesh = meshdp.make_mesh(**dict(sizes))
    return meshdp.make_train_step(loss_fn, optimizer or optax.sgd(RATE), mesh=mesh, **options)


def started(step, model=lambda key: jnp.asarray(W)):
    return step.init(model, jax.random.key(0))


def test_the_state_is_that_of_one_device_and_its_optimizers_state_lies_in_shares():
    model = lambda key, n: {"w": jax.random.normal(key, (n, 64)), "b": jnp.zeros(64)}
    step = make(optimizer=optax.adamw(RATE))
    state = step.init(model, jax.random.key(3), 128)
    want = model(jax.random.key(3), 128)
    np.testing.assert_allclose(state.model["w"], want["w"], rtol=1e-6)
    assert state.model["w"].addressable_data(0).shape == (128, 64)
    adam = state.opt_state[0]
    for moment in (adam.mu, adam.nu):
        assert moment["w"].addressable_data(0).shape == (16, 64)
        assert moment["b"].addressable_data(0).shape == (64,)
    assert (int(state.step), state.step.dtype) == (0, jnp.int32)
    assert state.key == jax.random.fold_in(jax.random.key(3), 2**31 - 1)


@pytest.mark.parametrize(
    "sizes, shard_update, weight, moment",
    [
        (dict(data=8), True, (64, 128), (8, 128)),
        (dict(data=8), False, (64, 128), (64, 128)),
        (dict(fsdp=8), True, (64, 16), (64, 16)),
        (dict(data=4, fsdp=2), True, (64, 64), (16, 64)),
        (dict(data=4, fsdp=2), False, (64, 64), (64, 64)),
    ],
    ids=["data", "data_whole", "fsdp", "data_fsdp", "data_fsdp_whole"],
)
def test_each_device_holds_its_share(sizes, shard_update, weight, moment):
    step = make(
        lambda w, x, keys: meshdp.Mean.of(x @ w),
        optax.adam(RATE),
        sizes=tuple(sizes.items()),
        layout=meshdp.fsdp(min_size=64),
        shard_update=shard_update,
    )
    shapes = jax.eval_shape(lambda: jnp.zeros((64, 128)))
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    opt_state = jax.eval_shape(optax.adam(RATE).init, shapes)
    found = step.shardings(meshdp.TrainState(shapes, opt_state, scalar, scalar))
    assert found.model.shard_shape((64, 128)) == weight
    assert found.opt_state[0].mu.shard_shape((64, 128)) == moment
    assert found.step == NamedSharding(step.mesh, P())


class Traces:
    """How often Python runs the loss."""

    def __init__(self):
        self.count = 0

    def __call__(self, w, batch, keys):
        self.count += 1
        return squares(w, batch, keys)


def test_the_loss_is_traced_for_the_first_call_only():
    loss_fn = Traces()
    step = make(loss_fn, sizes=(("data", 4), ("fsdp", 2)))
    state = started(step)
    state, _ = step(state, {"x": X, "y": Y})
    first = loss_fn.count
    for rows in (32, 32, 32):
        state, _ = step(state, {"x": X[:rows] + 1, "y": Y[:rows]})
    assert loss_fn.count == first
    # The last, smaller batch of an epoch is compiled for once, and the former remembered.
    for rows in (16, 32, 16):
        state, _ = step(state, {"x": X[:rows], "y": Y[:rows]})
    assert loss_fn.count == 2 * first


def test_placed_arguments_are_not_moved_and_the_state_is_donated():
    step = make()
    batch = shard_batch({"x": X, "y": Y}, step.mesh)
    state, _ = step(started(step), batch)
    old = jax.tree.leaves(state)
    with jax.transfer_guard("disallow"):
        state, metrics = step(state, batch)
    assert all(x.is_deleted() for x in old)
    assert not any(x.is_deleted() for x in [*jax.tree.leaves(batch), *metrics.values()])


def test_a_donated_training_state_is_refused_by_name():
    step = make()
    old = started(step)
    step(old, {"x": X, "y": Y})
    with pytest.raises(ValueError) as e:
        step(old, {"x": X, "y": Y})
    lines = str(e.value).split("\n")
    assert lines[0].endswith(
        "arrays of the state were deleted, or donated to an earlier step, whose new state has "
        "their memory:"
    )
    assert lines[1] == "  state.model: float32[4]"


def test_hyperparameters_changed_in_place_take_effect_without_a_new_trace():
    loss_fn = Traces()
    step = make(loss_fn, optax.inject_hyperparams(optax.sgd)(learning_rate=RATE))
    state, _ = step(started(step), {"x": X, "y": Y})
    traces = loss_fn.count
    before = np.asarray(state.model)
    state.opt_state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    state, _ = step(state, {"x": X, "y": Y})
    np.testing.assert_array_equal(state.model, before)
    state.opt_state.hyperparams["learning_rate"] = np.float32(RATE)
    state, _ = step(state, {"x": X, "y": Y})
    np.testing.assert_allclose(state.model, after(before), rtol=1e-5)
    assert loss_fn.count == traces


def test_an_error_in_the_loss_leaves_step_and_state_usable():
    broken = SimpleNamespace(now=True)

    def loss_fn(w, batch, keys):
        if broken.now:
            raise KeyError("mine")
        return squares(w, batch, keys)

    step = make(loss_fn)
    state = started(step)
    with pytest.raises(KeyError, match="mine"):
        step(state, {"x": X, "y": Y})
    broken.now = False
    np.testing.assert_allclose(step(state, {"x": X, "y": Y})[0].model, after(W), rtol=1e-5)


def test_the_step_returns_before_its_work_is_done():
    def slow(w, x, keys):
        w = jax.lax.fori_loop(0, 100, lambda i, w: jnp.tanh(w @ w), w)
        return meshdp.Mean.of(x @ w)

    step = make(slow)
    state = started(step, lambda key: jnp.full((256, 256), 0.01))
    batch = np.ones((8, 256), np.float32)
    jax.block_until_ready(state)
    state, metrics = step(state, batch)
    state, metrics = step(state, batch)
    assert not metrics["loss"].is_ready()
