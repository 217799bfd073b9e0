"""A model that is a dict and a function: Flax's, trained as on one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
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
