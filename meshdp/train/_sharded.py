"""One device's piece of a weight, how it is gathered, and what looks at it ungathered."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from .. import _jaxapi
from .._spec import entries, from_entries
from ._plan import Plan


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
    dtype: Any = None
    """The type it is used in, if not that of `piece`: it is gathered in this type, and its
    gradient is summed over the devices in that of `piece`."""
    layer: Any = None
    """Which of a row of like layers it belongs to, if any; see `_remat`."""

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

    @property
    def is_split(self) -> bool:
        """Whether it must be gathered to be used."""
        return any(self.split(d) for d in range(len(self.dims)))

    def gather(self) -> jax.Array:
        """The whole weight, still split over the axes that are not manual."""
        if self.dtype is None or self.dtype == self.piece.dtype:
            return _collect(self.piece, self.dims, self.manual)
        if not self.is_split:
            return _collect(self.piece.astype(self.dtype), self.dims, self.manual)
        return _fetch(self.dims, self.manual, self.dtype, self.piece.dtype, self.piece)


def _collect(x, dims, manual: frozenset[str]):
    auto, gathers = _gathers(dims, manual)

    def gather(x):
        for dim, axes in gathers:
            x = lax.all_gather(x, axes, axis=dim, tiled=True)
        return x

    return inside(gather, auto, auto, mixed=any(auto[i] for i, _ in gathers))(x)


def _gathers(dims, manual: frozenset[str]):
    auto = tuple(tuple(a for a in d if a not in manual) for d in dims)
    over = [(i, tuple(a for a in d if a in manual)) for i, d in enumerate(dims)]
    return auto, [(i, axes) for i, axes in over if axes]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _fetch(dims, manual, dtype, kept, piece):
    """Gathers in one type; sums the gradient over the devices in the type that is kept."""
    return _collect(piece.astype(dtype), dims, manual)


def _fetch_forward(dims, manual, dtype, kept, piece):
    return _fetch(dims, manual, dtype, kept, piece), None


def _fetch_backward(dims, manual, dtype, kept, _, g):
    auto, gathers = _gathers(dims, manual)

    def scatter(g):
        for dim, axes in reversed(gathers):
            g = lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)
        return g

    mixed = any(auto[i] for i, _ in gathers)
    return (inside(scatter, auto, auto, mixed=mixed)(g.astype(kept)),)


_fetch.defvjp(_fetch_forward, _fetch_backward)


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


def sharded(x, spec: P, plan: Plan, layer: Any):
    """`x` as a `Sharded` if it is split at all or layers are of interest, else `x` itself."""
    sizes = dict(plan.sizes)
    dims = tuple(tuple(a for a in e if sizes.get(a, 1) > 1) for e in entries(spec, x.ndim))
    if not any(dims) and plan.remat is None:
        return x
    return Sharded(x, dims, plan.manual, plan.sizes, layer=layer)


def gather(x):
    return x.gather() if isinstance(x, Sharded) else x


# Primitives that keep a weight a weight. Each rule gets the `Sharded`, the other operands and
# the parameters, and returns the `Sharded` of the result, or None if the split does not carry
# through.


def _replace(w: Sharded, piece, dims) -> Sharded:
    return dataclasses.replace(w, piece=piece, dims=tuple(dims))


def _convert(w, _, new_dtype, **__):
    piece = w.piece if w.dtype is None else lax.convert_element_type(w.piece, w.dtype)
    return dataclasses.replace(w, piece=piece, dtype=new_dtype)


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


VIEWS = {
    "convert_element_type": _convert,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "reshape": _reshape,
}
