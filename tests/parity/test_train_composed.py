"""Everything that make_train_step can be asked for, asked for at once."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp

ROWS, D, RATE, DECAY, CLIP, ACCUMULATE = 32, 16, 0.2, 0.5, 0.25, 2
RNG = np.random.default_rng(0)
BATCH = {
    "x": (RNG.standard_normal((ROWS, D)) + np.arange(ROWS)[:, None] / 16).astype(np.float32),
    "y": RNG.standard_normal((ROWS, D)).astype(np.float32),
    "mask": np.arange(ROWS) % 5 > 0,
}
KEY = jax.random.key(0)


class Net(eqx.Module):
    first: eqx.nn.Linear  # frozen
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key, axes):
        keys = jax.random.split(key, 5)
        self.first, self.last, *self.layers = [eqx.nn.Linear(D, D, key=k) for k in keys]
        self.norm = eqx.nn.BatchNorm(D, axes, mode="ema", momentum=0.5)

    def __call__(self, x, state):
        x = self.first(x)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        x, state = self.norm(x, state)
        return self.last(x), state


def low(x):
    return jnp.asarray(x, jnp.bfloat16) if hasattr(x, "dtype") else x


class Lower(Net):
    """As precision="bf16" is to compute it."""

    def __call__(self, x, state):
        half = lambda layer, x: jax.tree.map(low, layer)(low(x))
        x = half(self.first, x)
        for layer in self.layers:
            x = x + jnp.tanh(half(layer, x))
        x, state = self.norm(x.astype(jnp.float32), state)
        return half(self.last, x).astype(jnp.float32), state


def over_rows(model, x, state):
    return jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(x, state)


def loss_fn(model, batch, keys, state):
    out, state = over_rows(model, batch["x"], state)
    return meshdp.Mean.of(jnp.square(out - batch["y"]).mean(-1), batch["mask"]), state


def trains(model):
    """What `trains=` freezes, as booleans."""
    everything = jax.tree.map(eqx.is_inexact_array, model)
    frozen = jax.tree.map(lambda _: False, model.first)
    return eqx.tree_at(lambda m: m.first, everything, frozen)


def one_device(steps, devices):
    """Plain JAX: parameters, running averages, the average of parameters, losses, norms."""
    model, state = eqx.nn.make_with_state(Lower)(KEY, "rows")
    params, rest = eqx.partition(model, trains(model))
    average, seen = params, []
    # Each of the devices that share the batch splits its own rows into microbatches.
    rows = np.arange(ROWS).reshape(devices, ACCUMULATE, -1).swapaxes(0, 1)

    @jax.jit
    def gradient(params, state):
        def mean(params):
            total, now = 0.0, state
            for part in rows.reshape(ACCUMULATE, -1):
                # No gradient goes from one microbatch to another.
                now = jax.lax.stop_gradient(now)
                out, now = over_rows(eqx.combine(params, rest), BATCH["x"][part], now)
                # The batch is cast whole, its targets too.
                losses = jnp.square(out - low(BATCH["y"][part])).mean(-1)
                total += (losses * BATCH["mask"][part]).sum()
            return total / BATCH["mask"].sum(), now

        return jax.value_and_grad(mean, has_aux=True)(params)

    for _ in range(steps):
        (loss, state), grads = gradient(params, state)
        norm = optax.tree.norm(grads)
        rate = RATE * min(1.0, CLIP / float(norm))
        params = optax.tree.add_scale(params, -rate, grads)
        average = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, average, params)
        seen.append((float(loss), float(norm)))
    return params, state, average, seen


TENSOR = meshdp.by_path({r"layers.*weight": P("tensor")})


@pytest.mark.parametrize(
    "sizes", [dict(fsdp=8), dict(data=4, tensor=2)], ids=["fsdp", "data_tensor"]
)
def test_all_options_together_give_the_numbers_of_one_device(sizes):
    step = meshdp.make_train_step(
        loss_fn,
        optax.chain(optax.sgd(RATE), meshdp.ema(DECAY)),
        mesh=meshdp.make_mesh(**sizes),
        layout=TENSOR | meshdp.fsdp(min_size=D),
        precision="bf16",
        accumulate=ACCUMULATE,
        remat="full",
        clip=CLIP,
        stateful=True,
        trains=trains(eqx.nn.make_with_state(Net)(KEY, "rows")[0]),
        stop_after=3,
    )
    axes = ("rows", *meshdp.BATCH_AXES)
    state = step.init(lambda key: eqx.nn.make_with_state(Net)(key, axes), KEY)
    frozen = jax.device_get(eqx.filter(state.model.first, eqx.is_array))
    seen = []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    params, carried, average, want = one_device(3, sizes.get("fsdp", 1) * sizes.get("data", 1))
    assert want[0][1] > 2 * CLIP  # it was clipped
    # bfloat16 has 8 bits, and a sum in another order may round another way.
    np.testing.assert_allclose(seen, want, rtol=2e-2)
    of_params = lambda tree: jax.tree.leaves(jax.device_get(eqx.filter(tree, trains(tree))))
    for have, expected in (
        (of_params(state.model), jax.tree.leaves(params)),
        (of_params(meshdp.ema_model(state)), jax.tree.leaves(average)),
        (jax.tree.leaves(jax.device_get(state.model_state)), jax.tree.leaves(carried)),
    ):
        chex.assert_trees_all_close(have, jax.device_get(expected), rtol=5e-3, atol=3e-3)
    chex.assert_trees_all_equal(
        jax.device_get(eqx.filter(state.model.first, eqx.is_array)), frozen
    )
    assert {x.dtype for x in of_params(state.model)} == {np.dtype(np.float32)}
    assert (state.guard.good, state.guard.skipped) == (3, 0)
