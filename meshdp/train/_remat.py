"""Rematerialisation layer by layer, wherever the layers come from.

Saving nothing but what enters a layer needs to know where layers begin. Of a `lax.scan` over
stacked weights the body is a layer. Otherwise the weights tell: `.blocks[3].mlp.weight` and
`['Block_3']['Dense_0']['kernel']` belong to layer 3 of a row of like layers, and in the traced
loss a layer goes from the first use of its weights to the first use of another's.
"""

import collections
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .. import _jaxapi

NAMED = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
}


def policy_of(remat: Any):
    """`(whether, policy)` of an argument `remat=`."""
    if isinstance(remat, str):
        if remat == "none":
            return False, None
        if remat in NAMED:
            return True, NAMED[remat]
        remat = (remat,)
    if callable(remat):
        return True, remat
    if isinstance(remat, (tuple, list)) and remat and all(isinstance(n, str) for n in remat):
        return True, jax.checkpoint_policies.save_only_these_names(*remat)
    raise ValueError(
        f'remat: {remat!r}; it takes "none", "full", "dots", a policy of '
        "jax.checkpoint_policies, or names given to jax.ad_checkpoint.checkpoint_name"
    )


def check_names(remat: Any, closed: Any, loss: str) -> None:
    """Refuses names that the program of a loss gives to nothing: all would be computed again.

    **Raises:**

    - `ValueError`: naming them.
    """
    if callable(remat) or remat == "none" or (isinstance(remat, str) and remat in NAMED):
        return
    asked = (remat,) if isinstance(remat, str) else remat
    there = _jaxapi.names_given(closed)
    missing = [n for n in asked if n not in there]
    if missing:
        close = difflib.get_close_matches(missing[0], [*NAMED, "none", *sorted(there)], 1)
        raise ValueError(
            f"remat names {', '.join(map(repr, missing))}, but {loss} gives that name to "
            f"nothing; it names {', '.join(map(repr, sorted(there))) or 'nothing at all'}. "
            + (f"Did you mean {close[0]!r}? " if close else "")
            + "jax.ad_checkpoint.checkpoint_name(x, name) gives one."
        )


def layers(paths: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """For each weight the layer it belongs to, or `None`: paths that differ in a number."""
    rows: dict[Any, list[tuple[int, Any]]] = collections.defaultdict(list)
    for i, (path, shape) in enumerate(zip(paths, shapes, strict=True)):
        for m in re.finditer(r"\d+", path):
            row = (path[: m.start()], path[m.end() :], shape)
            rows[row].append((i, (path[: m.start()], int(m.group()))))
    out: list[Any] = [None] * len(paths)
    for members in rows.values():
        if len(members) > 1:
            for i, layer in members:
                # The outermost number: a layer's own list of weights is inside it.
                if out[i] is None or len(layer[0]) < len(out[i][0]):
                    out[i] = layer
    return out


def segments(
    jaxpr: Any, weights: Mapping[Any, Any], views: frozenset[str]
) -> list[tuple[bool, list[Any]]]:
    """Splits a program into runs of equations, each with whether it is a layer.

    `weights` has for each input that is a weight the layer it belongs to, or `None`. What only
    looks at a weight (one of `views`) comes first, in no layer, and its result is a weight
    too. An equation that uses no weight belongs to the layer before it.
    """
    owner = dict(weights)
    looks: list[Any] = []
    out: list[tuple[bool, list[Any]]] = [(False, looks)]
    now: Any = None
    for eqn in jaxpr.eqns:
        used = [v for v in eqn.invars if not _jaxapi.is_literal(v)]
        if eqn.primitive.name in views and len(used) == 1 and used[0] in owner:
            owner[eqn.outvars[0]] = owner[used[0]]
            looks.append(eqn)
            continue
        mine = {owner[v] for v in used if v in owner}
        layer = mine.pop() if len(mine) == 1 else None if mine else now
        if len(out) == 1 or layer != now:
            out.append((layer is not None, []))
            now = layer
        out[-1][1].append(eqn)
    return out
