"""Preconditioners computed in groups of replicas, in the style of distributed Shampoo."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

GROUPS = [[0, 1, 2, 3], [4, 5, 6, 7]]


def inverse_root(matrix):
    values, vectors = jnp.linalg.eigh(matrix + 1e-3 * jnp.eye(matrix.shape[0]))
    return vectors @ jnp.diag(values**-0.25) @ vectors.T


@functools.partial(jax.pmap, axis_name="replicas")
def update(params, statistics, batch):
    grads = jax.tree_map(lambda p: batch.T @ (batch @ p) / batch.shape[0], params)
    # Statistics are shared within a group, gradients with everybody.
    own = jax.tree_map(lambda g: g @ g.T, grads)
    shared = lax.psum(own, "replicas", axis_index_groups=GROUPS)
    statistics = jax.tree_multimap(lambda s, o: 0.9 * s + 0.1 * o, statistics, shared)
    grads = lax.pmean(grads, "replicas")
    flat, treedef = jax.tree_flatten(params)
    steps = [
        inverse_root(s) @ g
        for s, g in zip(jax.tree_leaves(statistics), jax.tree_leaves(grads))  # noqa: B905
    ]
    flat = [p - 0.1 * lax.pmean(s, "replicas") for p, s in zip(flat, steps)]  # noqa: B905
    return jax.tree_unflatten(treedef, flat), statistics


def main():
    data = np.random.default_rng(8)
    params = {"w": jnp.asarray(data.normal(size=(3, 2)).astype(np.float32))}
    params = jax.device_put_replicated(params, jax.local_devices())
    statistics = jax.device_put_replicated({"w": jnp.eye(3)}, jax.local_devices())
    for _ in range(2):
        batch = data.normal(size=(8, 4, 3)).astype(np.float32)
        params, statistics = update(params, statistics, batch)
    first = jax.tree_map(lambda x: x[0], params)
    return {"w": first["w"], "statistics": statistics["w"]}
