"""Weights gathered where they are used, freed, and gathered again in the backward pass.

The loss is traced once with whole weights, which costs nothing, and the traced program is
run again with each sharded weight as a `Sharded`: its local piece and how it is split. What
only looks at a weight (a cast, a transpose, a slice of a stack) is done on the piece. What
computes with it gathers it there, inside a `jax.checkpoint` of that one operation, so that
the whole weight is never kept for the backward pass: it is gathered again, and the transpose
of the gather is the reduce-scatter of the gradient. A `lax.scan` over stacked layers is
entered, so that one layer at a time is gathered. ZeRO-3 of Rajbhandari et al. 2020 (section
5.3), as a program transformation.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from .. import _jaxapi
from ._remat import segments
from ._sharded import VIEWS, Sharded, gather

# A weight used more often than this outside loops is gathered once and kept: a gather per use
# would cost more than the memory it saves.
MAX_USES = 4


@dataclasses.dataclass(frozen=True)
class Remat:
    """How layers are rematerialised: nothing is kept but what `policy` says."""

    policy: Any = None
    inside: bool = False
    """Within such a layer: what is gathered there is not kept anyway."""


def run(closed, args: Sequence[Any], remat: Remat | None = None) -> list[Any]:
    """Runs a jaxpr whose arguments may be `Sharded`, gathering at each use."""
    jaxpr, consts = _jaxapi.program(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    uses = collections.Counter(
        a
        for e in jaxpr.eqns
        if e.primitive.name not in VIEWS
        for a in e.invars
        if not _jaxapi.is_literal(a)
    )
    for var in jaxpr.invars:
        if isinstance(env[var], Sharded) and env[var].is_split and uses[var] > MAX_USES:
            env[var] = dataclasses.replace(
                env[var], piece=env[var].gather(), dtype=None, dims=_only_auto(env[var])
            )
    weights = {v: env[v].layer for v in jaxpr.invars if isinstance(env[v], Sharded)}
    if remat is None or remat.inside or not any(weights.values()):
        _run_equations(jaxpr.eqns, env, remat)
    else:
        found = segments(jaxpr, weights, frozenset(VIEWS))
        for i, (is_layer, eqns) in enumerate(found):
            if is_layer:
                later = {a for _, es in found[i + 1 :] for e in es for a in _reads(e)}
                later.update(a for a in jaxpr.outvars if not _jaxapi.is_literal(a))
                _run_layer(eqns, env, later, remat)
            else:
                _run_equations(eqns, env, remat)
    return [a.val if _jaxapi.is_literal(a) else env[a] for a in jaxpr.outvars]


def _only_auto(w: Sharded):
    return tuple(tuple(a for a in d if a not in w.manual) for d in w.dims)


def _reads(eqn):
    return [a for a in eqn.invars if not _jaxapi.is_literal(a)]


def _run_equations(eqns, env, remat) -> None:
    for eqn in eqns:
        values = [a.val if _jaxapi.is_literal(a) else env[a] for a in eqn.invars]
        with _jaxapi.eqn_context(eqn):
            outs = _eqn(eqn, values, remat)
        env.update(zip(eqn.outvars, outs, strict=True))


def _run_layer(eqns, env, later, remat: Remat) -> None:
    """Runs a layer's equations under `jax.checkpoint`."""
    made = {v for e in eqns for v in e.outvars}
    entering = list(dict.fromkeys(a for e in eqns for a in _reads(e) if a not in made))
    leaving = [v for e in eqns for v in e.outvars if v in later]
    pieces, rebuild = _strip([env[v] for v in entering])

    def layer(pieces):
        inner = dict(zip(entering, rebuild(pieces), strict=True))
        _run_equations(eqns, inner, dataclasses.replace(remat, inside=True))
        return [gather(inner[v]) for v in leaving]

    outs = jax.checkpoint(layer, policy=remat.policy)(pieces)
    env.update(zip(leaving, outs, strict=True))


def _eqn(eqn, values, remat: Remat | None) -> list[Any]:
    if not any(isinstance(v, Sharded) for v in values):
        return _jaxapi.bind(eqn, values)
    name = eqn.primitive.name
    if name in VIEWS and isinstance(values[0], Sharded):
        view = VIEWS[name](values[0], values[1:], **eqn.params)
        if view is not None:
            return [view]
    if name in ("jit", "pjit"):
        return run(eqn.params["jaxpr"], values, remat)
    if name in ("checkpoint", "remat", "remat2"):
        return _remat(eqn, values, remat)
    if name == "scan":
        return _scan(eqn, values, remat)
    split = any(isinstance(v, Sharded) and v.is_split for v in values)
    whole = _jaxapi.has_subprogram(eqn) and name != "custom_jvp_call"
    if whole or not split or (remat is not None and remat.inside):
        # A loop, a branch or a hand-written derivative: whole, before it starts.
        return _jaxapi.bind(eqn, [gather(v) for v in values])
    return _use(eqn, values)


def _use(eqn, values) -> list[Any]:
    """One operation on gathered weights, which are not kept for its backward pass."""
    pieces, rebuild = _strip(values)

    @jax.checkpoint
    def use(pieces):
        return _jaxapi.bind(eqn, [gather(v) for v in rebuild(pieces)])

    return use(pieces)


def _strip(values) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    """The plain arrays among and inside `values`, and the way back."""
    pieces = [v.piece if isinstance(v, Sharded) else v for v in values]

    def rebuild(pieces):
        return [
            dataclasses.replace(v, piece=p) if isinstance(v, Sharded) else p
            for v, p in zip(values, pieces, strict=True)
        ]

    return pieces, rebuild


def _remat(eqn, values, remat) -> list[Any]:
    pieces, rebuild = _strip(values)
    policy = eqn.params["policy"]
    # The user has drawn this layer: what is gathered inside lives no longer than it.
    mode = Remat(policy, inside=True)

    def body(pieces):
        return [gather(o) for o in run(eqn.params["jaxpr"], rebuild(pieces), mode)]

    return jax.checkpoint(body, prevent_cse=eqn.params["prevent_cse"], policy=policy)(pieces)


def _scan(eqn, values, remat) -> list[Any]:
    p = eqn.params
    num_consts, num_carry = _jaxapi.scan_sizes(eqn)
    consts = [gather(v) for v in values[:num_consts]]
    init = [gather(v) for v in values[num_consts : num_consts + num_carry]]
    xs = values[num_consts + num_carry :]
    stacked = any(isinstance(x, Sharded) for x in xs)
    # A stack split along the scanned dimension has no layer to slice off a piece.
    xs = [gather(x) if isinstance(x, Sharded) and x.dims[0] else x for x in xs]
    pieces, rebuild = _strip(
        [
            dataclasses.replace(x, dims=x.dims[1:], layer=None) if isinstance(x, Sharded) else x
            for x in xs
        ]
    )
    layer = remat if remat is not None and not remat.inside and stacked else None
    mode = remat if layer is None else dataclasses.replace(layer, inside=True)

    def step(carry, pieces):
        outs = run(p["jaxpr"], [*consts, *carry, *rebuild(pieces)], mode)
        outs = [gather(o) for o in outs]
        return outs[:num_carry], outs[num_carry:]

    if layer is not None:
        # Nothing outside a loop's body can be merged with what is inside.
        step = jax.checkpoint(step, policy=layer.policy, prevent_cse=False)
    carry, ys = lax.scan(
        step,
        init,
        pieces,
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    return [*carry, *ys]
