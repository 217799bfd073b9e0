"""Which arrays of a model train."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .. import _tree


def trainable(x: Any) -> bool:
    """Whether a leaf of a model can get a gradient: floating or complex arrays can."""
    return _tree.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def which(model: Any, trains: Any) -> list[int]:
    """The indices, among a model's arrays, of those that train.

    `trains` is a filter as Equinox has them: a function of a leaf, or a pytree of booleans and
    functions that may be a prefix of the model.

    **Raises:**

    - `ValueError`: if nothing trains, or the filter does not fit the model.
    """
    try:
        chosen = jtu.tree_leaves(eqx.filter(model, trains), is_leaf=lambda x: x is None)
    except ValueError as e:
        why = " ".join(str(e).split())
        raise ValueError(
            "trains does not fit the model. It takes a function of a leaf, or a pytree of "
            "booleans and functions of the structure of the model or of a prefix of it, such "
            f"as jax.tree.map(equinox.is_inexact_array, model). Equinox says: {why}"
        ) from None
    leaves = jtu.tree_leaves(model, is_leaf=lambda x: x is None)
    arrays = [c for c, x in zip(chosen, leaves, strict=True) if _tree.is_array(x)]
    out = [i for i, c in enumerate(arrays) if c is not None and trainable(c)]
    if not out:
        raise ValueError(
            f"Nothing in the model trains: of its {len(arrays)} arrays none is floating-point "
            "and chosen by trains=. Give a filter that keeps some, such as "
            "equinox.is_inexact_array."
        )
    return out


def only(structure: _tree.Structure, indices: Sequence[int], values: Sequence[Any]) -> Any:
    """A model with `values` for these of its arrays and `None` for every other leaf."""
    leaves = [None] * (len(structure.positions) + len(structure.static))
    for i, x in zip(indices, values, strict=True):
        leaves[structure.positions[i]] = x
    return jtu.tree_unflatten(structure.treedef, leaves)
