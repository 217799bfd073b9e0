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
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from .. import _jaxapi
from .._spec import entries, from_entries

# A weight used more often than this outside loops is gathered once and kept: a gather per use
# would cost more than the memory it saves.
MAX_USES = 4


@dataclasses.dataclass(frozen=True)
class Sharded:
    """One device's piece of a weight.

    `dims` has for each dimension the mesh axes that split it, slowest first; those in
    `manual` are already split away in `piece`, the others are the compiler's.
    """

    piece: jax.Array
    dims: tuple[tuple[str, ...], ...]
    manual: frozenset[str]
    sizes: tuple[tuple[str, int], ...]

    def split(self, dim: int) -> tuple[str, ...]:
        """The manual axes that split a dimension."""
        return tuple(a for a in self.dims[dim] if a in self.manual)

    def ways(self, dim: int) -> int:
        sizes = dict(self.sizes)
        return math.prod(sizes[a] for a in self.split(dim))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape once gathered."""
        return tuple(n * self.ways(d) for d, n in enumerate(self.piece.shape))

    def gather(self) -> jax.Array:
        """The whole weight, still split over the axes that are not manual."""
        return _collect(self.piece, self.dims, self.manual)


def _collect(x, dims, manual: frozenset[str]):
    auto = tuple(tuple(a for a in d if a not in manual) for d in dims)
    gathers = [
        (i, tuple(a for a in d if a in manual)) for i, d in enumerate(dims) if set(d) & manual
    ]

    def gather(x):
        for dim, axes in gathers:
            x = lax.all_gather(x, axes, axis=dim, tiled=True)
        return x

    return inside(gather, auto, auto, mixed=any(auto[i] for i, _ in gathers))(x)


def inside(collective: Callable, auto_in, auto_out, *, mixed: bool = False) -> Callable:
    """Runs a collective over manual axes with the automatic axes made manual too.

    Left automatic, the compiler first gathers the operand over them. `auto_in` and
    `auto_out` give the automatic axes of each dimension. A dimension split over both kinds
    (`mixed`) changes order when it is gathered, so there the compiler must see it whole.
    """
    free = {a for d in auto_in for a in d}
    if not free:
        return collective
    if mixed:
        return lambda x: constrain_auto(collective(x), auto_out)
    return _jaxapi.shard_map(
        collective,
        in_specs=from_entries(auto_in),
        out_specs=from_entries(auto_out),
        axis_names=_jaxapi.automatic_axes(),
    )


def constrain_auto(x, auto):
    return lax.with_sharding_constraint(x, from_entries(auto))


def sharded(x, spec: P, manual: frozenset[str], sizes: dict[str, int]):
    """`x` as a `Sharded` if the spec splits it at all, else `x` itself."""
    dims = tuple(tuple(a for a in e if sizes.get(a, 1) > 1) for e in entries(spec, x.ndim))
    if not any(dims):
        return x
    return Sharded(x, dims, manual, tuple(sizes.items()))


def gather(x):
    return x.gather() if isinstance(x, Sharded) else x


# Primitives that keep a weight a weight. Each rule gets the `Sharded`, the other operands and
# the parameters, and returns the `Sharded` of the result, or None if the split does not carry
# through.


def _replace(w: Sharded, piece, dims) -> Sharded:
    return dataclasses.replace(w, piece=piece, dims=tuple(dims))


def _convert(w, _, new_dtype, **__):
    return _replace(w, lax.convert_element_type(w.piece, new_dtype), w.dims)


def _transpose(w, _, permutation):
    return _replace(w, lax.transpose(w.piece, permutation), [w.dims[i] for i in permutation])


def _squeeze(w, _, dimensions):
    if any(w.dims[d] for d in dimensions):
        return None
    keep = [i for i in range(len(w.dims)) if i not in dimensions]
    return _replace(w, lax.squeeze(w.piece, dimensions), [w.dims[i] for i in keep])


def _broadcast_in_dim(w, others, shape, broadcast_dimensions, **_):
    if others:
        return None
    local, dims = list(shape), [()] * len(shape)
    for i, d in enumerate(broadcast_dimensions):
        if w.dims[i]:
            if w.shape[i] != shape[d]:
                return None
            local[d], dims[d] = w.piece.shape[i], w.dims[i]
    return _replace(w, lax.broadcast_in_dim(w.piece, local, broadcast_dimensions), dims)


def _slice(w, _, start_indices, limit_indices, strides):
    local = list(limit_indices)
    for i, d in enumerate(w.dims):
        if d:
            whole = (start_indices[i], limit_indices[i]) == (0, w.shape[i])
            if not whole or (strides and strides[i] != 1):
                return None
            local[i] = w.piece.shape[i]
    return _replace(w, lax.slice(w.piece, start_indices, local, strides), w.dims)


def _dynamic_slice(w, starts, slice_sizes):
    local = list(slice_sizes)
    for i, d in enumerate(w.dims):
        if d:
            if slice_sizes[i] != w.shape[i]:
                return None
            local[i] = w.piece.shape[i]
    return _replace(w, lax.dynamic_slice(w.piece, starts, local), w.dims)


def _reshape(w, others, new_sizes, dimensions, **_):
    if others or dimensions is not None:
        return None
    local, dims, before = list(new_sizes), [()] * len(new_sizes), w.shape
    for i, d in enumerate(w.dims):
        if not d:
            continue
        # The split dimension must stay the slowest of whatever it becomes.
        ahead = math.prod(before[:i])
        found = [
            j
            for j in range(len(new_sizes))
            if math.prod(new_sizes[:j]) == ahead and new_sizes[j] > 1
        ]
        if not found:
            return None
        j, ways = found[-1], w.ways(i)
        auto = math.prod(dict(w.sizes)[a] for a in d) // ways
        if dims[j] or before[i] % new_sizes[j] or new_sizes[j] % (ways * auto):
            return None
        local[j], dims[j] = new_sizes[j] // ways, d
    return _replace(w, lax.reshape(w.piece, local), dims)


_VIEWS = {
    "convert_element_type": _convert,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "reshape": _reshape,
}


def run(closed, args: Sequence[Any]) -> list[Any]:
    """Runs a closed jaxpr whose arguments may be `Sharded`, gathering at each use."""
    jaxpr, consts = _jaxapi.program(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    uses = collections.Counter(
        a for e in jaxpr.eqns for a in e.invars if not _jaxapi.is_literal(a)
    )
    for var in jaxpr.invars:
        if isinstance(env[var], Sharded) and uses[var] > MAX_USES:
            env[var] = env[var].gather()

    def read(atom):
        return atom.val if _jaxapi.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(a) for a in eqn.invars]
        with _jaxapi.eqn_context(eqn):
            outs = _eqn(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _eqn(eqn, values) -> list[Any]:
    if not any(isinstance(v, Sharded) for v in values):
        return _jaxapi.bind(eqn, values)
    name = eqn.primitive.name
    if name in _VIEWS and isinstance(values[0], Sharded):
        view = _VIEWS[name](values[0], values[1:], **eqn.params)
        if view is not None:
            return [view]
    if name in ("jit", "pjit"):
        return run(eqn.params["jaxpr"], values)
    if name in ("checkpoint", "remat", "remat2"):
        return _remat(eqn, values)
    if name == "scan":
        return _scan(eqn, values)
    if _jaxapi.has_subprogram(eqn) and name != "custom_jvp_call":
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


def _remat(eqn, values) -> list[Any]:
    pieces, rebuild = _strip(values)

    def body(pieces):
        return [gather(o) for o in run(eqn.params["jaxpr"], rebuild(pieces))]

    wrap = partial(
        jax.checkpoint, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
    )
    return wrap(body)(pieces)


def _scan(eqn, values) -> list[Any]:
    p = eqn.params
    num_consts, num_carry = _jaxapi.scan_sizes(eqn)
    consts = [gather(v) for v in values[:num_consts]]
    init = [gather(v) for v in values[num_consts : num_consts + num_carry]]
    xs = values[num_consts + num_carry :]
    # A stack split along the scanned dimension has no layer to slice off a piece.
    xs = [gather(x) if isinstance(x, Sharded) and x.dims[0] else x for x in xs]
    pieces, rebuild = _strip(
        [dataclasses.replace(x, dims=x.dims[1:]) if isinstance(x, Sharded) else x for x in xs]
    )

    def step(carry, pieces):
        outs = run(p["jaxpr"], [*consts, *carry, *rebuild(pieces)])
        outs = [gather(o) for o in outs]
        return outs[:num_carry], outs[num_carry:]

    carry, ys = lax.scan(
        step,
        init,
        pieces,
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    return [*carry, *ys]
