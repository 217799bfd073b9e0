"""Helpers that ask whether they run inside a pmap, in the style of K-FAC."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

AXIS = "kfac"


def in_pmap(axis_name: str) -> bool:
    """Whether we are inside a pmap with this axis."""
    try:
        # The way to check is to ask for the frame.
        core.axis_frame(axis_name)
        return True
    except NameError:
        return False


def pmean_if_pmap(obj: Any, axis_name: str) -> Any:
    return lax.pmean(obj, axis_name) if in_pmap(axis_name) else obj


def get_first(obj):
    return jax.tree_map(lambda x: x[0], obj)


broadcast_all_local_devices = jax.pmap(lambda x: x)


def step(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    factor = pmean_if_pmap(batch.T @ batch / batch.shape[0], AXIS)
    grads = pmean_if_pmap(grads, AXIS)
    factor = 0.5 * state["factor"] + 0.5 * factor
    w = state["w"] - jnp.linalg.solve(factor + 0.1 * jnp.eye(3), grads)
    return {"w": w, "factor": factor}


def main():
    data = np.random.default_rng(9)
    state = {"w": jnp.arange(3.0), "factor": jnp.eye(3)}
    count = jax.local_device_count()
    stacked = jax.tree_map(lambda x: jnp.stack([x] * count), state)
    replicated = broadcast_all_local_devices(stacked)
    p_step = jax.pmap(step, axis_name=AXIS)
    for _ in range(2):
        batch = data.normal(size=(8, 4, 3)).astype(np.float32)
        replicated = p_step(replicated, batch)
    alone = step(state, batch.reshape(-1, 3))
    return {**get_first(replicated), "alone": alone["w"]}
