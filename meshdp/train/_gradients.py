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
from ._gather import Sharded, gather, run, sharded
from ._mean import Mean
from ._plan import Plan
from ._reduce import reduce


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
    mean, aux = means
    if plan.reduced:
        mean, aux = lax.psum((mean, aux), plan.reduced)
    return reduce(plan, kept, grads), mean, aux


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
