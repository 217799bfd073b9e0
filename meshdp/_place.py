"""Trees and batches onto a mesh and back, shard by shard.

Everything but an array that already lies as asked goes by way of host memory: no leaf is ever
whole on a device that does not keep it whole, and nothing is compiled. `jax.device_put` alone
slices on the source device (a program of about 0.1 s per shape), and resharding under `jit`
sometimes replicates the array first ("involuntary full rematerialization").
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

BATCH = P(("data", "fsdp"))


def place(tree: Any, shardings: Any, *, share: bool = False) -> Any:
    """Puts every array of a tree onto a mesh, shard by shard.

    **Arguments:**

    - `tree`: any pytree. Arrays (NumPy or JAX, on the host, on one device or on another mesh;
        typed PRNG keys too) are placed, and so are Python numbers, unless they are inside an
        Equinox module, where they are configuration. Every other leaf, flags included, passes
        through untouched.
    - `shardings`: one `NamedSharding` for all, or a pytree of them, which may be a prefix of
        `tree`. `None` leaves what is below it where it is.
    - `share`: by default the result has memory of its own, so donating it does not touch what
        the caller holds, and changing a NumPy array in place does not touch the result. With
        `share=True` arrays already in place are passed through as they are, and others may
        share memory with the argument: faster, for what will not be donated or changed.

    **Returns:**

    The tree with global arrays, committed to the mesh.
    """
    leaves, treedef, positions = _flatten(tree)
    where = _match(shardings, tree, leaves)
    positions = [i for i in positions if where[i] is not None]
    out = _put([leaves[i] for i in positions], [where[i] for i in positions], share=share)
    for i, x in zip(positions, out, strict=True):
        leaves[i] = x
    return jtu.tree_unflatten(treedef, leaves)


def reshard(tree: Any, to: Any) -> Any:
    """Moves a tree to another layout or another mesh; see `place`."""
    return place(tree, to)


def shard_batch(batch: Any, mesh: Mesh, spec: P = BATCH, *, share: bool = False) -> Any:
    """Splits the leading dimension of every leaf of a batch over the mesh."""
    size = int(np.prod([mesh.shape[a] for a in _axes(spec[0] if len(spec) else None)]))
    rows = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
    for n in rows:
        if n % size:
            raise ValueError(
                f"The batch of {n} rows does not divide over {size} devices: {n % size} over. "
                f"Add {size - n % size} rows: `batch, mask = meshdp.pad_batch(batch, {size})`."
            )
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, P(*spec[: np.ndim(x)])), batch)
    return place(batch, shardings, share=share)


def pad_batch(batch: Any, multiple: int) -> tuple[Any, np.ndarray]:
    """Repeats the last row until the number of rows is a multiple; returns the mask."""
    n = next(np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x))
    extra = -n % multiple
    mask = np.zeros(n + extra, np.float32)
    mask[:n] = 1

    def pad(x):
        if not np.ndim(x) or not extra:
            return x
        np_or_jnp = jax.numpy if isinstance(x, jax.Array) else np
        return np_or_jnp.concatenate([x, np_or_jnp.repeat(x[-1:], extra, axis=0)])

    return jax.tree.map(pad, batch), mask


def to_host(tree: Any) -> Any:
    """Brings every array back whole, as NumPy arrays of its own."""
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, jax.Array) else x, tree)


def _axes(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and x.dtype != jax.dtypes.float0


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, complex)) and not isinstance(x, bool)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _flatten(tree: Any) -> tuple[list[Any], Any, list[int]]:
    """The leaves, the treedef, and the positions of the leaves to be placed."""
    leaves: list[Any] = []
    positions: list[int] = []
    for o in jtu.tree_leaves(tree, is_leaf=lambda x: isinstance(x, eqx.Module)):
        inside = isinstance(o, eqx.Module)
        for x in jtu.tree_leaves(o) if inside else (o,):
            if _is_array(x) or (not inside and _is_number(x)):
                positions.append(len(leaves))
            leaves.append(x)
    return leaves, jtu.tree_structure(tree), positions


def _match(shardings: Any, tree: Any, leaves: Sequence[Any]) -> list[Any]:
    """One sharding, or None, for each leaf."""
    if isinstance(shardings, Sharding):
        return [shardings] * len(leaves)
    stop = lambda x: x is None or isinstance(x, Sharding)
    flat, prefix = jtu.tree_flatten(shardings, is_leaf=stop)
    where: list[Any] = []
    for s, below in zip(flat, prefix.flatten_up_to(tree), strict=True):
        where += [s] * jtu.tree_structure(below).num_leaves
    return where


def _put(leaves: list[Any], where: list[Any], *, share: bool) -> list[Any]:
    keys = [jax.random.key_impl(x) if _is_key(x) else None for x in leaves]
    leaves = [jax.random.key_data(x) if k else x for x, k in zip(leaves, keys, strict=True)]
    if share:
        out = jax.device_put(leaves, where)
    else:
        still = [_in_place(x, s) for x, s in zip(leaves, where, strict=True)]
        given = [
            x if ok or not isinstance(x, (jax.Array, np.ndarray)) else np.array(x)
            for x, ok in zip(leaves, still, strict=True)
        ]
        out = jax.device_put(given, where, may_alias=False)
    return [
        jax.random.wrap_key_data(x, impl=k) if k else x for x, k in zip(out, keys, strict=True)
    ]


def _in_place(x: Any, s: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and x.committed and x.sharding.is_equivalent_to(s, x.ndim)
