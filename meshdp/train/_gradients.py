"""Exact sums of a loss and its gradients over microbatches and devices.

One `shard_map` in which `"data"` and `"fsdp"` are manual. A device differentiates the *sum* of
its own examples' losses; sums add up over microbatches and devices whatever their sizes, and
nobody divides in here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .. import _jaxapi, _spec
from ._gather import run
from ._mean import Mean
from ._plan import Plan
from ._reduce import reduce
from ._sharded import Sharded, gather, sharded
from ._watch import Traced


def sums(
    loss: Callable[..., tuple[Mean, dict[str, Mean], list[Any]]],
    plan: Plan,
    mesh: Any,
    weights: Sequence[Any],
    carried: Sequence[Any],
    batch: Any,
    key: Any,
    scale: Any,
    watch: Traced,
) -> tuple[list[Any], Mean, dict[str, Mean], Any, list[Any]]:
    """The gradients of the summed loss times `scale` (global arrays), and the sums.

    `loss(weights, carried, batch, keys)` takes the list of whole arrays and gives a mean,
    further means, and the arrays that a stateful model carries on. The gradients are one for
    each array that trains, in order, laid out as `plan.grads`. Before what is carried on comes
    what `watch` has found to count.
    """
    manual = plan.manual
    rows = jax.tree.leaves(batch)[0].shape[0]
    outer = lambda spec: _spec.keep(spec, manual)
    return _jaxapi.shard_map(
        partial(_per_device, loss, plan, watch),
        mesh=mesh,
        in_specs=(
            [outer(s) for s in plan.weights],
            P(),
            jax.tree.map(lambda x: outer(_rank(plan.batch, x.ndim)), batch),
            outer(_rank(plan.batch, 1)),
            P(),
            P(),
        ),
        out_specs=([outer(s) for s in plan.trained], P(), P(), P(), P()),
        axis_names=manual,
    )(list(weights), list(carried), batch, jnp.arange(rows), key, scale)


def _rank(spec: P, ndim: int) -> P:
    return P(*spec[:ndim])


def _per_device(loss, plan: Plan, watch, weights, carried, batch, index, key, scale):
    pieces = [
        sharded(w, s, plan, layer)
        for w, s, layer in zip(weights, plan.weights, plan.layers, strict=True)
    ]
    # One key per example, from its place in the global batch: who computes it, and in which
    # microbatch, changes nothing.
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(index)
    batch = jax.tree.map(lambda x: _pin(x, plan), batch)

    if plan.gather == "step" and plan.accumulate > 1:
        pieces = [_gathered(p, t) for p, t in zip(pieces, plan.types, strict=True)]

    def total(trained, carried, batch, keys):
        values = _merge(plan.trains, pieces, trained)
        values = [_typed(v, t) for v, t in zip(values, plan.types, strict=True)]
        rest = carried, batch, keys
        (mean, aux, carried), outside = _evaluate(loss, values, rest, plan.remat, watch)
        return mean.total * scale, ((mean, aux, outside), carried)

    differentiate = jax.value_and_grad(total, has_aux=True)
    kept = [p for p, t in zip(pieces, plan.trains, strict=True) if t]
    trained = [p.piece if isinstance(p, Sharded) else p for p in kept]
    if plan.accumulate == 1:
        (_, (means, carried)), grads = differentiate(trained, carried, batch, keys)
    else:
        grads, means, carried = _accumulate(
            differentiate, plan.accumulate, trained, carried, (batch, keys)
        )
    if plan.reduced:
        means = lax.psum(means, plan.reduced)
        carried = [_agreed(x, plan.reduced) for x in carried]
    return reduce(plan, kept, grads), *means, carried


def _agreed(x, axes):
    """What a stateful model carries on, the same on every device.

    A layer that takes its statistics over the whole batch has it so already, and the mean
    changes nothing; the statistics of one that does not are averaged.
    """
    return lax.pmean(x, axes) if jnp.issubdtype(x.dtype, jnp.inexact) else lax.pmax(x, axes)


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


def _gathered(p, dtype):
    """A weight gathered ahead of its uses, in the type that it is used in."""
    if not isinstance(p, Sharded):
        return p
    dims = tuple(tuple(a for a in d if a not in p.manual) for d in p.dims)
    whole = dataclasses.replace(p, dtype=dtype).gather().astype(p.piece.dtype)
    return dataclasses.replace(p, piece=whole, dims=dims)


def _typed(v, dtype):
    if dtype is None:
        return v
    return dataclasses.replace(v, dtype=dtype) if isinstance(v, Sharded) else v.astype(dtype)


def _evaluate(loss, values, rest, remat, watch):
    whole = [
        jax.ShapeDtypeStruct(v.shape, v.dtype or v.piece.dtype) if isinstance(v, Sharded) else v
        for v in values
    ]
    flat, tree = jax.tree.flatten(rest)
    closed, shape = jax.make_jaxpr(
        lambda w, flat: loss(w, *jax.tree.unflatten(tree, flat)), return_shape=True
    )(whole, flat)
    carried, batch, _ = rest
    outside = watch(closed, len(values) + len(carried), batch)
    # A result may be a constant of the program: a Python number.
    outs = [jnp.asarray(gather(o)) for o in run(closed, [*values, *flat], remat)]
    return jax.tree.unflatten(jax.tree.structure(shape), outs), outside


def _accumulate(differentiate, count, trained, carried, examples):
    micro = jax.tree.map(
        lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), examples
    )
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), micro)
    (_, (shapes, _)), _ = jax.eval_shape(differentiate, trained, carried, *first)
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    def step(carry, part):
        sums, carried = carry
        (_, (means, carried)), grads = differentiate(trained, carried, *part)
        return (jax.tree.map(jnp.add, sums, (grads, means)), carried), None

    start = ((zeros(trained), zeros(shapes)), carried)
    ((grads, means), carried), _ = lax.scan(step, start, micro)
    return grads, means, carried
