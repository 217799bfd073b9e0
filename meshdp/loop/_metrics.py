"""A step's results as numbers, read one step late."""

from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np


def scalars(aux: Any) -> dict[str, jax.Array]:
    """The scalars among a step's results, by name; the copies to the host begin.

    A lone scalar is the loss. Others have their path as name: `loss`, `aux.error`, `0`.
    """
    found = {}
    for path, x in jtu.tree_leaves_with_path(aux):
        if isinstance(x, jax.Array) and x.size == 1 and _real(x):
            name = jtu.keystr(path, simple=True, separator=".") or "loss"
            x.copy_to_host_async()
            found[name] = x
    return found


def _real(x: jax.Array) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.numpy.number) and not np.iscomplexobj(x)


def read(found: dict[str, jax.Array]) -> dict[str, float]:
    """Waits for the step that makes them."""
    return {
        name: float(np.asarray(x.addressable_data(0)).reshape(())) for name, x in found.items()
    }
