"""Rays through a small field, in the style of JaxNeRF: a key for each device, pmap(partial)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from jax import random


def shard(xs):
    """Split data into shards for multiple devices along the first dimension."""
    return jax.tree_map(lambda x: x.reshape((jax.local_device_count(), -1) + x.shape[1:]), xs)


def train_step(width, rng, params, batch, lr):
    rng, key = random.split(rng)
    noise = random.normal(key, (width,))

    def loss_fn(params):
        color = jax.nn.sigmoid(batch["rays"] @ params["w"] + noise[None])
        return jnp.mean((color - batch["pixels"]) ** 2)

    loss, grad = jax.value_and_grad(loss_fn)(params)
    grad = jax.lax.pmean(grad, axis_name="batch")
    stats = jax.lax.pmean(loss, axis_name="batch")
    return jax.tree_multimap(lambda p, g: p - lr * g, params, grad), stats, rng


def main():
    data = np.random.default_rng(1)
    rng = random.PRNGKey(20200823)
    # Shift the numpy random seed by host_id() to shuffle data loaded by different hosts.
    seed = 20201473 + jax.process_index()
    train_pstep = jax.pmap(
        functools.partial(train_step, 3),
        axis_name="batch",
        in_axes=(0, 0, 0, None),
        donate_argnums=(1,),
    )
    params = jax_utils.replicate({"w": jnp.zeros((5, 3))})
    keys = random.split(rng, jax.local_device_count())  # For pmapping RNG keys.
    stats_trace = []
    for step in range(3):
        lr = 0.5 / (1 + step)
        batch = {
            "rays": data.normal(size=(16, 5)).astype(np.float32),
            "pixels": data.uniform(size=(16, 3)).astype(np.float32),
        }
        params, stats, keys = train_pstep(keys, params, shard(batch), lr)
        stats_trace.append(float(stats[0]))
    params = jax.device_get(jax.tree_map(lambda x: x[0], params))
    return {"losses": stats_trace, "w": params["w"], "seed": seed}
