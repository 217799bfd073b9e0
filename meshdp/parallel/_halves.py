"""One layer's backward pass in two halves: for its input now, for its weights later.

The split of zero-bubble schedules (Qi et al. 2023, section 2), made from the layer's traced
gradient: what the input's gradient needs is done first; of what it leaves, the weights'
gradients are finished whenever there is time, from the values that both halves use.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
import jax
from jax import lax

from .. import _jaxapi


class Halves:
    """`f(w, x, rest) -> x`, which gets gradients for `w` and `x`, taken apart.

    Traced once, for arrays of these shapes; the weights' part is of lists of leaves.
    """

    def __init__(self, f: Callable[[Any, Any, Any], Any], w: Any, x: Any, rest: Any):
        self.w, self.x = jax.tree.structure(w), jax.tree.structure(x)
        trees: list[Any] = []

        def forward(w, x, rest):
            y, pull = jax.vjp(lambda w, x: f(w, x, rest), w, x)
            leaves, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return jax.tree.leaves(y), leaves

        closed, (y, leaves) = jax.make_jaxpr(forward, return_shape=True)(w, x, rest)
        self.go = _Program(closed)
        n = len(jax.tree.leaves(w))
        outs = self.go.outs[len(y) :]
        # What comes of weights alone, such as a transposed one, is made anew and not kept.
        moving = self.go.reached(self.go.ins[n:])
        self.own = [a for a in outs if _jaxapi.is_literal(a) or a not in moving]
        self.kept = [a for a in outs if not _jaxapi.is_literal(a) and a in moving]
        self.ys, self.residuals = self.go.outs[: len(y)], outs
        self.from_weights = self.go.ins[:n]

        def backward(leaves, dy):
            pull = jax.tree.unflatten(trees[-1], leaves)
            dw, dx = pull(jax.tree.unflatten(self.x, dy))
            return jax.tree.leaves(dw), jax.tree.leaves(dx)

        self.back = _Program(jax.make_jaxpr(backward)(leaves, y))
        first = self.back.needed(self.back.outs[n:])
        made = {v for e in first for v in e.outvars} | set(self.back.ins)
        later = self.back.needed(self.back.outs[:n], done=made)
        reads = [a for e in later for a in e.invars] + self.back.outs[:n]
        crossing = dict.fromkeys(a for a in reads if _is_var(a) and a in made)
        held = dict(zip(self.back.ins, outs, strict=False))
        own = {a for a in self.own if _is_var(a)}
        self.first, self.later = first, later
        self.again = [
            a for a in crossing if a in held and (not _is_var(held[a]) or held[a] in own)
        ]
        self.saved = [a for a in crossing if a not in self.again]

    def forward(self, w: Any, x: Any, rest: Any) -> tuple[Any, list[Any]]:
        """The layer's result, and what its backward pass takes of it."""
        env = self.go.run(self.go.jaxpr.eqns, jax.tree.leaves((w, x, rest)))
        return jax.tree.unflatten(self.x, [_read(env, a) for a in self.ys]), [
            env[a] for a in self.kept
        ]

    def inputs(self, w: Any, kept: Sequence[Any], dy: Any) -> tuple[Any, list[Any]]:
        """The gradient of the layer's input, and what the other half takes."""
        leaves = [*self._residuals(w, kept), *jax.tree.leaves(dy)]
        env = self.back.run(self.first, leaves)
        dx = [_read(env, a) for a in self.back.outs[self.w.num_leaves :]]
        return jax.tree.unflatten(self.x, dx), [env[a] for a in self.saved]

    def weights(self, w: Any, saved: Sequence[Any]) -> Any:
        """The gradient of the layer's weights."""
        env = dict(zip(self.saved, saved, strict=True))
        if self.again:
            made = dict(zip(self.back.ins, self._residuals(w, None), strict=False))
            env.update((a, made[a]) for a in self.again)
        env = self.back.run(self.later, None, env)
        dw = [_read(env, a) for a in self.back.outs[: self.w.num_leaves]]
        return jax.tree.unflatten(self.w, dw)

    def _residuals(self, w: Any, kept: Sequence[Any] | None) -> list[Any]:
        env: dict[Any, Any] = dict(zip(self.from_weights, jax.tree.leaves(w), strict=True))
        env = self.go.run(self.go.needed(self.own), None, env)
        if kept is not None:
            env.update(zip(self.kept, kept, strict=True))
        return [_read(env, a) if not _is_var(a) or a in env else None for a in self.residuals]


class Stage:
    """A run of layers, forward and by halves backward. `w`: the learned and the fixed part of
    its parameters, `[layers, ...]`; `part`: what the layers read of a microbatch."""

    def __init__(self, f: Callable[[Any, Any, Any], Any], learned, fixed, x, part):
        self.f = f
        one = lambda tree: jax.tree.map(lambda w: w[0], tree)
        layer = lambda w, x, rest: f(eqx.combine(w, rest[0]), x, rest[1])
        self.layer = Halves(layer, one(learned), x, (one(fixed), part))
        shapes = jax.eval_shape(self.forward_and_keep, (learned, fixed), x, part)
        self.keeps = shapes[1]
        """The shapes of what the backward pass takes."""
        self.waits = jax.eval_shape(self.inputs, (learned, fixed), shapes[1], x)[1]
        """The shapes of what the weights' half takes."""

    def forward(self, w, x, part):
        step = lambda x, w: (self.f(eqx.combine(*w), x, part), None)
        return lax.scan(step, x, w)[0]

    def forward_and_keep(self, w, x, part):
        step = lambda x, w: self.layer.forward(w[0], x, (w[1], part))
        return lax.scan(step, x, w)

    def inputs(self, w, kept, dy):
        step = lambda dy, wk: self.layer.inputs(wk[0], wk[1], dy)
        return lax.scan(step, dy, (w[0], kept), reverse=True)

    def weights(self, w, waits):
        step = lambda _, ws: (None, self.layer.weights(*ws))
        return lax.scan(step, None, (w[0], waits))[1]

    def both(self, w, kept, dy):
        def step(dy, wk):
            dx, waits = self.layer.inputs(wk[0], wk[1], dy)
            return dx, self.layer.weights(wk[0], waits)

        return lax.scan(step, dy, (w[0], kept), reverse=True)


class _Program:
    """A traced function whose equations can be run by parts."""

    def __init__(self, closed: Any):
        self.closed = closed
        self.jaxpr, self.consts = _jaxapi.program(closed)
        self.ins, self.outs = list(self.jaxpr.invars), list(self.jaxpr.outvars)

    def reached(self, start: Sequence[Any]) -> set[Any]:
        """All that depends on these variables."""
        found = set(start)
        for e in self.jaxpr.eqns:
            if any(_is_var(a) and a in found for a in e.invars):
                found.update(e.outvars)
        return found

    def needed(self, ends: Sequence[Any], done: Collection[Any] = ()) -> list[Any]:
        """The equations that make these variables, in order, if those `done` are there."""
        wanted, found = {a for a in ends if _is_var(a)} - set(done), []
        for e in reversed(self.jaxpr.eqns):
            results = [v for v in e.outvars if v in wanted]
            if results:
                found.append(_jaxapi.equation_for(self.closed, e, results))
                wanted.update(a for a in found[-1].invars if _is_var(a) and a not in done)
        return found[::-1]

    def run(self, eqns, args: Sequence[Any] | None, env: dict[Any, Any] | None = None):
        env = dict(env or {})
        env.update(zip(self.jaxpr.constvars, self.consts, strict=True))
        if args is not None:
            env.update(zip(self.ins, args, strict=True))
        for e in eqns:
            with _jaxapi.eqn_context(e):
                outs = _jaxapi.bind(e, [_read(env, a) for a in e.invars])
            env.update(zip(e.outvars, outs, strict=True))
        return env


def _is_var(atom: Any) -> bool:
    return not _jaxapi.is_literal(atom)


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return env[atom] if _is_var(atom) else atom.val
