"""A model that is a dict and a function: Flax's, trained as on one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp

ROWS, D = 16, 8
RNG = np.random.default_rng(0)
X = RNG.standard_normal((ROWS, D)).astype(np.float32)
Y = RNG.integers(0, 4, (ROWS,)).astype(np.int32)
MASK = np.arange(ROWS) > 2


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, *, training):
        x = nn.relu(nn.LayerNorm()(nn.Dense(32)(x)))
        x = nn.Dropout(0.5, deterministic=not training)(x)
        return nn.Dense(4)(x)


MODEL = Classifier()


def init(key):
    return MODEL.init(key, jnp.zeros((1, D)), training=False)


def losses(params, x, y, keys):
    one = lambda x, key: MODEL.apply(params, x, training=True, rngs={"dropout": key})
    logits = jax.vmap(one)(x, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def test_a_flax_model_trains_as_on_one_device():
    optimizer = optax.adamw(0.01)
    layout = meshdp.by_path(
        {r"Dense_0.*kernel": P(None, "tensor"), r"Dense_1.*kernel": P("tensor")}
    )
    step = meshdp.make_train_step(
        lambda params, batch, keys: meshdp.Mean.of(
            losses(params, batch["x"], batch["y"], keys), batch["mask"]
        ),
        optimizer,
        mesh=meshdp.make_mesh(data=2, fsdp=2, tensor=2),
        layout=layout | meshdp.fsdp(min_size=32),
        accumulate=2,
    )
    state = step.init(init, jax.random.key(0))

    @jax.jit
    def plain(params, opt_state, i):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2**31 - 1), i)
        keys = jax.vmap(lambda j: jax.random.fold_in(key, j))(jnp.arange(ROWS))
        mean = lambda p: jnp.where(MASK, losses(p, X, Y, keys), 0).sum() / MASK.sum()
        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init(jax.random.key(0))
    opt_state = optimizer.init(params)
    for i in range(3):
        state, metrics = step(state, {"x": X, "y": Y, "mask": MASK})
        params, opt_state, loss = plain(params, opt_state, jnp.int32(i))
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state.model), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    kernel = state.model["params"]["Dense_0"]["kernel"]
    assert kernel.addressable_data(0).shape == (D // 2, 32 // 2)


class Normed(nn.Module):
    axes: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x):
        # `axis_name` is typed as a name, and handed to `pmean`, which takes several.
        norm = nn.BatchNorm(False, momentum=0.9, axis_name=self.axes or None)
        return nn.Dense(4)(nn.relu(norm(nn.Dense(32)(x))))


def make_normed(key):
    variables = Normed().init(key, jnp.zeros((2, D)))
    return variables["params"], variables["batch_stats"]


def apply_normed(model, params, stats, x):
    variables = {"params": params, "batch_stats": stats}
    logits, new = model.apply(variables, x, mutable=["batch_stats"])
    return logits, new["batch_stats"]


def normed_loss(params, batch, keys, stats):
    logits, stats = apply_normed(Normed(meshdp.BATCH_AXES), params, stats, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return meshdp.Mean.of(losses, batch["mask"]), stats


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batch_stats_are_of_each_microbatch_on_all_devices_and_carried_on(accumulate):
    step = meshdp.make_train_step(
        normed_loss,
        optax.sgd(0.1),
        mesh=meshdp.make_mesh(data=2, fsdp=4),
        layout=meshdp.fsdp(min_size=32),
        stateful=True,
        accumulate=accumulate,
    )
    state = step.init(make_normed, jax.random.key(0))
    # Each of 8 devices splits its own rows into microbatches.
    parts = np.arange(ROWS).reshape(8, accumulate, -1).swapaxes(0, 1).reshape(accumulate, -1)

    @jax.jit
    def plain(params, stats):
        def mean(params):
            now, total = stats, 0.0
            for rows in parts:
                logits, now = apply_normed(Normed(), params, now, X[rows])
                chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), Y[rows][:, None], 1)
                total -= (chosen[:, 0] * MASK[rows]).sum()
            return total / MASK.sum(), now

        (loss, new), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new, loss

    params, stats = make_normed(jax.random.key(0))
    for _ in range(3):
        state, metrics = step(state, {"x": X, "y": Y, "mask": MASK})
        params, stats, loss = plain(params, stats)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    have, want = (state.model, state.model_state), (params, stats)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert state.model["Dense_1"]["kernel"].addressable_data(0).shape == (D, 32 // 4)
    mean = state.model_state["BatchNorm_0"]["mean"]
    assert mean.addressable_data(0).shape == (32,)
