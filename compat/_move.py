"""Moves arrays to where a compiled program wants them, shard by shard."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from meshdp._place import place


def moved(
    leaves: Sequence[Any], targets: Sequence[Any], stays: Callable[[Any], bool] | None = None
) -> tuple[list[Any], list[int]]:
    """The leaves laid out as `targets` say, and the positions of those that had to move.

    Arrays that lie as asked, but under the name of another mesh, share their memory with the
    result. `stays`: which others are right as they are.
    """
    out = list(leaves)
    renamed, elsewhere = [], []
    for i, (x, target) in enumerate(zip(leaves, targets, strict=True)):
        if isinstance(x, jax.Array):
            if x.sharding == target or (stays is not None and stays(x)):
                continue
            same = x.committed and x.sharding.is_equivalent_to(target, x.ndim)
            (renamed if same else elsewhere).append(i)
        elif getattr(x, "dtype", None) != jax.dtypes.float0:  # which has no values
            elsewhere.append(i)
            out[i] = np.bool_(x) if isinstance(x, bool) else x
    for group, share in ((renamed, True), (elsewhere, False)):
        if group:
            where = [targets[i] for i in group]
            new = place([out[i] for i in group], where, share=share)
            for i, x in zip(group, new, strict=True):
                out[i] = x
    return out, elsewhere


def give_up(given: Sequence[Any], used: Sequence[Any]) -> None:
    """Deletes the donated arrays that had to be moved: the copy is what gets donated."""
    for x, y in zip(given, used, strict=True):
        if isinstance(x, jax.Array) and x is not y and not x.is_deleted():
            x.delete()
