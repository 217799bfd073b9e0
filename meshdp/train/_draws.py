"""Whether a loss draws its random numbers from its keys, found in its traced program."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .. import _jaxapi

DRAWS = ("random_bits", "threefry2x32", "random_gamma")


def reads(closed: Any, argument: int) -> bool:
    """Whether a program does anything with this argument."""
    jaxpr, _ = _jaxapi.program(closed)
    var = jaxpr.invars[argument]
    within = [a for e in jaxpr.eqns for a in e.invars]
    return any(not _jaxapi.is_literal(a) and a is var for a in [*within, *jaxpr.outvars])


def draws_alone(closed: Any, varies: Sequence[bool]) -> bool:
    """Whether a program draws random numbers that depend on no argument that varies.

    `varies` says of each argument whether it differs from step to step.
    """
    jaxpr, _ = _jaxapi.program(closed)
    varying = {v for v, x in zip(jaxpr.invars, varies, strict=True) if x}
    for eqn in jaxpr.eqns:
        varied = [not _jaxapi.is_literal(a) and a in varying for a in eqn.invars]
        if any(varied):
            varying.update(eqn.outvars)
        elif eqn.primitive.name in DRAWS:
            return True
        if any(draws_alone(p, _passed(eqn, p, varied)) for p in _jaxapi.subprograms(eqn)):
            return True
    return False


def _passed(eqn, closed, varied: list[bool]) -> list[bool]:
    """Which arguments of a program inside an equation vary; if in doubt, all."""
    count = len(_jaxapi.program(closed)[0].invars)
    if not any(varied):
        return [False] * count
    if count != len(varied):
        return [True] * count
    if eqn.primitive.name == "scan":
        consts, carry = _jaxapi.scan_sizes(eqn)
        return [v or consts <= i < consts + carry for i, v in enumerate(varied)]
    return varied


def dropouts(model: Any) -> list[str]:
    """The dropout layers of Equinox in a model, each with its rate."""
    is_dropout = lambda x: isinstance(x, eqx.nn.Dropout)
    found = jtu.tree_leaves_with_path(model, is_leaf=is_dropout)
    return [
        f"model{jtu.keystr(path)} (p={x.p})"
        for path, x in found
        if is_dropout(x) and not x.inference and not (isinstance(x.p, float) and x.p == 0)
    ]
