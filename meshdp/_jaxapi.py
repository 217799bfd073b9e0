"""The one module that knows which JAX this is.

Everything that differs between versions of JAX, or that JAX does not promise to keep, is
called from here and nowhere else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def auto_mesh(devices: np.ndarray, names: Sequence[str]) -> Mesh:
    """A mesh with every axis `Auto`, said aloud: JAX's default differs by version."""
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def shard_map(
    f: Callable,
    *,
    mesh: Any = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Sequence[str] | set[str] = (),
) -> Callable:
    """As `jax.shard_map` with `check_vma=False`.

    Without the check, collectives differentiate as under `jax.pmap` and `jax.vmap` with an
    axis name: the transpose of `psum` is `psum`.
    """
    kwargs = {} if mesh is None else {"mesh": mesh}
    return jax.shard_map(
        f,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axis_names),
        check_vma=False,
        **kwargs,
    )


def tracing_mesh(mesh: Mesh):
    """A context in which bare `PartitionSpec`s mean this mesh, legal while tracing."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
