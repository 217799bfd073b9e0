"""The sum of gradients over devices: each once, and no more of it than a device needs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .. import _jaxapi, _spec
from ._plan import Plan
from ._sharded import Sharded, inside

# Gradients of fewer elements are reduce-scattered together: on 8 CPU devices a GPT's 38, one
# by one, took 1.06 to 1.3 of the time of all in one; copying larger ones together costs more
# than it saves (an MLP of 2**19 elements: 1.07).
BUCKET = 2**18


def reduce(plan: Plan, weights: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Sums each device's gradients over the axes that split the batch.

    A weight that was gathered over an axis has its gradient summed over it already, by the
    reduce-scatter that is the gather's transpose. Where the gradient is to come out split
    further than the weight, it is reduce-scattered; over what then remains, all-reduced.
    """
    kept = [g.dtype for g in grads]
    out = [g if plan.reduce is None else g.astype(plan.reduce) for g in grads]
    buckets: dict[Any, list[tuple[int, int]]] = {}
    whole: dict[tuple[str, ...], list[int]] = {}
    for i, (w, g, spec) in enumerate(zip(weights, out, plan.trained, strict=True)):
        dims = _spec.entries(spec, g.ndim)
        held = w.dims if isinstance(w, Sharded) else ((),) * g.ndim
        done = {a for d, axes in enumerate(held) if axes for a in w.split(d)}
        auto = tuple(tuple(a for a in d if a not in plan.manual) for d in held)
        scatters = [
            (d, axes)
            for d in range(g.ndim)
            if (axes := tuple(a for a in dims[d] if a in plan.reduced and a not in done))
        ]
        if len(scatters) == 1 and g.size < BUCKET and not any(auto):
            ((dim, axes),) = scatters
            buckets.setdefault((axes, g.dtype), []).append((i, dim))
        else:
            for dim, axes in scatters:
                out[i] = inside(_scatter(dim, axes), auto, auto, mixed=bool(auto[dim]))(out[i])
        done |= {a for _, axes in scatters for a in axes}
        rest = tuple(a for a in plan.reduced if a not in done)
        if rest:
            whole.setdefault(rest, []).append(i)
    for (axes, _), members in buckets.items():
        ways = math.prod(dict(plan.sizes)[a] for a in axes)
        for i, g in zip(members, _scatter_together(out, members, axes, ways), strict=True):
            out[i[0]] = g
    for axes, indices in whole.items():
        for i, g in zip(indices, lax.psum([out[i] for i in indices], axes), strict=True):
            out[i] = g
    return [g.astype(t) for g, t in zip(out, kept, strict=True)]


def _scatter(dim: int, axes: tuple[str, ...]) -> Callable:
    return lambda g: lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)


def _scatter_together(grads, members, axes, ways: int):
    """One reduce-scatter of `[ways, ...]`, whose row is all that one device keeps."""
    rows = [jnp.moveaxis(grads[i], dim, 0).reshape(ways, -1) for i, dim in members]
    mine = lax.psum_scatter(jnp.concatenate(rows, axis=1), axes, scatter_dimension=0)
    at = 0
    for (i, dim), row in zip(members, rows, strict=True):
        shape = list(grads[i].shape)
        first = shape.pop(dim) // ways
        part = mine[at : at + row.shape[1]].reshape(first, *shape)
        at += row.shape[1]
        yield jnp.moveaxis(part, 0, dim)


def squares(grads: Sequence[Any], specs: Sequence[P], mesh: Any) -> jax.Array:
    """The sum of squares of each of the gradients, which lie as `specs`; shape `[n]`.

    Each device reads its own part.
    """
    over = [
        tuple(a for a in mesh.axis_names if a in _spec.axes_of(s) and mesh.shape[a] > 1)
        for s in specs
    ]

    def per_device(grads):
        parts = [_square(g) for g in grads]
        for axes in dict.fromkeys(over):
            at = [i for i, o in enumerate(over) if o == axes]
            if axes:
                summed = lax.psum(jnp.stack([parts[i] for i in at]), axes)
                for i, part in zip(at, summed, strict=True):
                    parts[i] = part
        return jnp.stack(parts)

    return _jaxapi.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=P(),
        axis_names=set(mesh.axis_names),
    )(list(grads))


def _square(g):
    g = g.astype(jnp.promote_types(g.dtype, jnp.float32))
    # A dot, since a sum of squares writes the squares down first on CPU.
    return jnp.vdot(g, g).real
