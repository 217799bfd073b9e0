"""Evolution strategies: every device perturbs, all gather the fitness."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

SIGMA, STEP = 0.1, 0.2
TARGET = np.array([1.0, -2.0, 0.5], np.float32)


@partial(jax.pmap, axis_name="pop", in_axes=(None, 0))
def generation(theta, key):
    n = jax.lax.psum(1, "pop")
    epsilon = jax.random.normal(key, theta.shape)
    reward = -jnp.sum((theta + SIGMA * epsilon - TARGET) ** 2)
    rewards = jax.lax.all_gather(reward, "pop")
    advantage = (reward - rewards.mean()) / (rewards.std() + 1e-8)
    gradient = jax.lax.psum(advantage * epsilon, "pop") / (n * SIGMA)
    next_key, _ = jax.random.split(key)
    return theta + STEP * SIGMA * gradient, rewards, next_key


def main():
    theta = jnp.zeros(3)
    n_devices = jax.local_device_count()
    keys = jax.random.split(jax.random.PRNGKey(3), n_devices)
    best = []
    for _ in range(3):
        thetas, rewards, keys = generation(theta, keys)
        theta = thetas[0]
        best.append(float(rewards[0].max()))
        # Fresh keys out of the first one, so that a run depends on one key alone.
        keys = jax.random.split(keys[0], n_devices)
    return {"theta": theta, "best": best, "zeros": jax.tree_map(jnp.zeros_like, theta)}
