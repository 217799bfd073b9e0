"""Exact sums of a loss and its gradients over microbatches and devices.

One `shard_map` in which `"data"` and `"fsdp"` are manual. A device differentiates the *sum* of
its own examples' losses; sums add up over microbatches and devices whatever their sizes, and
nobody divides in here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .. import _jaxapi, _spec
from ._gather import Sharded, gather, inside, run, sharded
from ._mean import Mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How the gradients of one step are computed on a mesh."""

    sizes: tuple[tuple[str, int], ...]
    """Devices along each mesh axis."""
    weights: tuple[P, ...]
    """The spec of each array of the model."""
    trains: tuple[bool, ...]
    """Which arrays of the model get a gradient."""
    grads: tuple[P, ...]
    """The spec that each gradient comes out with: the weight's, or split further."""
    batch: P
    accumulate: int
    gather: str
    """`"microbatch"` or `"step"`: how often fsdp weights are gathered."""

    @property
    def manual(self) -> frozenset[str]:
        # Axes of one device are manual too: where nothing is left to the compiler's
        # partitioner, it does not run.
        return frozenset(a for a, n in self.sizes if a in ("data", "fsdp") or n == 1)

    @property
    def reduced(self) -> tuple[str, ...]:
        """The axes over which the batch is split, and so the sums are taken."""
        return tuple(a for a, n in self.sizes if a in ("data", "fsdp") and n > 1)


def sums(
    loss: Callable[[Sequence[Any], Any, Any], tuple[Mean, dict[str, Mean]]],
    plan: Plan,
    mesh: Any,
    weights: Sequence[Any],
    batch: Any,
    key: Any,
) -> tuple[list[Any], Mean, dict[str, Mean]]:
    """The gradients of the summed loss (global arrays), the loss and the other means.

    `loss(weights, batch, keys)` takes the list of whole arrays. The result is a gradient for
    each array that trains, in order, laid out as `plan.grads`.
    """
    manual = plan.manual
    rows = jax.tree.leaves(batch)[0].shape[0]
    outer = lambda spec: _spec.keep(spec, manual)
    trained = [s for s, t in zip(plan.grads, plan.trains, strict=True) if t]

    def per_device(weights, batch, index, key):
        return _per_device(loss, plan, weights, batch, index, key)

    return _jaxapi.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(
            [outer(s) for s in plan.weights],
            jax.tree.map(lambda x: outer(_rank(plan.batch, x.ndim)), batch),
            outer(_rank(plan.batch, 1)),
            P(),
        ),
        out_specs=([outer(s) for s in trained], P(), P()),
        axis_names=manual,
    )(list(weights), batch, jnp.arange(rows), key)


def _rank(spec: P, ndim: int) -> P:
    return P(*spec[:ndim])


def _per_device(loss, plan: Plan, weights, batch, index, key):
    sizes = dict(plan.sizes)
    pieces = [
        sharded(w, s, plan.manual, sizes) for w, s in zip(weights, plan.weights, strict=True)
    ]
    # One key per example, from its place in the global batch: who computes it, and in which
    # microbatch, changes nothing.
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(index)
    batch = jax.tree.map(lambda x: _pin(x, plan), batch)

    if plan.gather == "step" and plan.accumulate > 1:
        pieces = [_gathered(p) for p in pieces]

    def total(trained, batch, keys):
        values = _merge(plan.trains, pieces, trained)
        mean, aux = _evaluate(loss, values, batch, keys)
        return mean.total, (mean, aux)

    differentiate = jax.value_and_grad(total, has_aux=True)
    trained = [
        p.piece if isinstance(p, Sharded) else p
        for p, t in zip(pieces, plan.trains, strict=True)
        if t
    ]
    if plan.accumulate == 1:
        (_, means), grads = differentiate(trained, batch, keys)
    else:
        grads, means = _accumulate(differentiate, plan.accumulate, trained, batch, keys)
    kept = [p for p, t in zip(pieces, plan.trains, strict=True) if t]
    return _reduce(plan, kept, grads, means)


def _merge(trains, pieces, trained):
    it = iter(trained)
    return [
        (dataclasses.replace(p, piece=next(it)) if isinstance(p, Sharded) else next(it))
        if t
        else p
        for p, t in zip(pieces, trains, strict=True)
    ]


def _pin(x, plan: Plan):
    """Holds the batch to its spec over the axes that the compiler partitions."""
    spec = _spec.keep(_rank(plan.batch, x.ndim), _jaxapi.automatic_axes())
    return lax.with_sharding_constraint(x, spec) if len(spec) else x


def _gathered(p):
    if not isinstance(p, Sharded):
        return p
    dims = tuple(tuple(a for a in d if a not in p.manual) for d in p.dims)
    whole = p.gather()
    return dataclasses.replace(p, piece=whole, dims=dims) if any(dims) else whole


def _evaluate(loss, values, batch, keys):
    if not any(isinstance(v, Sharded) for v in values):
        return loss(values, batch, keys)
    whole = [
        jax.ShapeDtypeStruct(v.shape, v.piece.dtype) if isinstance(v, Sharded) else v
        for v in values
    ]
    flat, tree = jax.tree.flatten((batch, keys))
    closed, shape = jax.make_jaxpr(
        lambda w, flat: loss(w, *jax.tree.unflatten(tree, flat)), return_shape=True
    )(whole, flat)
    outs = [gather(o) for o in run(closed, [*values, *flat])]
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _accumulate(differentiate, count, trained, batch, keys):
    micro = jax.tree.map(
        lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), (batch, keys)
    )
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), micro)
    (_, shapes), _ = jax.eval_shape(differentiate, trained, *first)
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    def step(carry, part):
        (_, means), grads = differentiate(trained, *part)
        return jax.tree.map(jnp.add, carry, (grads, means)), None

    (grads, means), _ = lax.scan(step, (zeros(trained), zeros(shapes)), micro)
    return grads, means


def _reduce(plan: Plan, weights, grads, means):
    """Sums over the devices: each gradient once, all that go whole in one operation."""
    mean, aux = means
    out: list[Any] = [None] * len(grads)
    whole: dict[tuple[str, ...], list[int]] = {}
    specs = [s for s, t in zip(plan.grads, plan.trains, strict=True) if t]
    for i, (w, g, spec) in enumerate(zip(weights, grads, specs, strict=True)):
        dims = _spec.entries(spec, g.ndim)
        held = w.dims if isinstance(w, Sharded) else ((),) * g.ndim
        # The axes that the backward pass has summed over already, by reduce-scatter.
        done = {
            a for d in range(g.ndim) for a in (w.split(d) if isinstance(w, Sharded) else ())
        }
        for dim in range(g.ndim):
            new = tuple(a for a in dims[dim] if a in plan.reduced and a not in done)
            if new:
                auto = tuple(tuple(a for a in d if a not in plan.manual) for d in held)
                g = inside(_scatter(dim, new), auto, auto, mixed=bool(auto[dim]))(g)
                done |= set(new)
        rest = tuple(a for a in plan.reduced if a not in done)
        out[i] = g
        if rest:
            whole.setdefault(rest, []).append(i)
    scalars = (mean, aux)
    for axes, indices in whole.items():
        summed = lax.psum([out[i] for i in indices], axes)
        for i, g in zip(indices, summed, strict=True):
            out[i] = g
    if plan.reduced:
        scalars = lax.psum(scalars, plan.reduced)
    return out, *scalars


def _scatter(dim: int, axes: tuple[str, ...]) -> Callable:
    return lambda g: lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)


def norm(grads: Sequence[Any], specs: Sequence[P], mesh: Any) -> jax.Array:
    """The global norm of gradients that lie as `specs`, each device reading its own part."""
    sizes = dict(mesh.shape)
    over = [
        tuple(a for a in mesh.axis_names if a in _spec.axes_of(s) and sizes[a] > 1)
        for s in specs
    ]

    def per_device(grads):
        parts: dict[tuple[str, ...], Any] = {}
        for axes, g in zip(over, grads, strict=True):
            square = jnp.sum(
                jnp.square(jnp.abs(g).astype(jnp.promote_types(g.real.dtype, jnp.float32)))
            )
            parts[axes] = parts.get(axes, 0.0) + square
        total = jnp.zeros(())
        for axes, part in parts.items():
            total += lax.psum(part, axes) if axes else part
        return jnp.sqrt(total)

    return _jaxapi.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=P(),
        axis_names=set(mesh.axis_names),
    )(list(grads))
