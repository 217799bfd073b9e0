"""1F1B: each microbatch goes back as soon as it has come through, and its memory is free."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .. import _jaxapi
from ..train import Mean
from ._axes import EXAMPLES, here, manually, refuse_manual, some
from ._pipeline import AXIS, Layer, at, check, choose, empty, onward, run_layers
from ._schedule import BACK, Schedule


@dataclasses.dataclass(frozen=True)
class _Plan:
    first: Callable
    layer: Layer
    last: Callable
    stages: int
    microbatches: int
    rows: int
    batch: tuple[str, ...] | None


def pipeline_loss(
    first: Callable[[Any, Any], Any],
    f: Layer,
    last: Callable[[Any, Any, Any], Mean],
    params: tuple[Any, Any, Any],
    batch: Any,
    *,
    microbatches: int,
) -> Mean:
    """The loss of a stack of layers over `"stage"`, with the least memory (1F1B).

    ```python
    total = pipeline_loss(
        lambda embed, batch: embed[batch["tokens"]],
        layer,
        lambda head, x, batch: meshdp.Mean.of(losses(x @ head, batch["labels"])),
        (embed, layers, head),
        batch,
        microbatches=8,
    )
    ```

    The first and the last device of `"stage"` have something more to do, and the loss is
    computed inside, so that a microbatch can turn back at once (PipeDream-flush, Narayanan et
    al. 2021): a device keeps the inputs of at most `2p - 1` microbatches for p stages, however
    many there are, where `pipeline` keeps all. Time and `bubble` are those of `pipeline` with
    `remat`. Values and gradients are computed together, and gradients are right for any
    function of the loss; there are no second derivatives.

    Without a mesh, or with one device along `"stage"`: `first`, a scan over the layers,
    `last`, on the whole batch.

    **Arguments:**

    - `first`: `first(params[0], batch) -> x`, an embedding.
    - `f`: one layer, `f(params of the layer, x, batch) -> x`, as for `pipeline`.
    - `last`: `last(params[2], x, batch) -> Mean`, the sum of the losses and their weight.
    - `params`: of first, the layers (`[layers, ...]`, split as `P("stage")`) and last. All
        three functions must take their arrays from here and not from around them.
    - `batch`: a pytree of arrays, `[batch, ...]` (global shapes). It gets no gradient.
    - `microbatches`: as for `pipeline`.

    **Returns:**

    A `Mean`, the same on all devices of `"stage"`. Its weight gets no gradient.

    **Raises:**

    - `ValueError`: naming every size that does not fit, and the nearest that do.
    """
    refuse_manual("pipeline_loss", AXIS)
    sizes = here()
    stages = sizes.get(AXIS, 1)
    rows = check("pipeline_loss", params[1], batch, microbatches, 1, sizes)
    batch = jax.tree.map(lax.stop_gradient, batch)
    if stages == 1:
        x = run_layers(f, params[1], first(params[0], batch), batch, True)
        mean = last(params[2], x, batch)
    else:
        plan = _Plan(first, f, last, stages, microbatches, rows, some(EXAMPLES, sizes))
        learned, fixed = eqx.partition(params, eqx.is_inexact_array)
        sums: Any = _loss(plan, learned, fixed, batch)
        mean = Mean(*sums)
    return Mean(mean.total, lax.stop_gradient(mean.weight))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(plan, learned, fixed, batch):
    return _forward(plan, learned, fixed, batch)[0]


def _forward(plan: _Plan, learned, fixed, batch):
    rows, layers = P(plan.batch), P(AXIS)
    specs = (P(), layers, P())
    run = manually(
        "pipeline_loss",
        partial(_per_device, plan),
        frozenset({AXIS, *EXAMPLES} & _jaxapi.automatic_axes()),
        (specs, specs, rows),
        ((P(), P()), specs),
    )
    with jax.named_scope(Schedule("pipeline_loss", plan.stages, plan.microbatches).scope):
        return run(learned, fixed, batch)


def _backward(plan: _Plan, grads, d):
    return jax.tree.map(lambda g: g * d[0].astype(g.dtype), grads), None, None


_loss.defvjp(_forward, _backward)


def _per_device(plan: _Plan, learned, fixed, batch):
    p, m = plan.stages, plan.microbatches
    first_params, layers, last_params = learned
    # Integers among the parameters have no gradient to add up.
    first = lambda w, part: plan.first(eqx.combine(w, fixed[0]), part)
    finish = lambda w, y, part: plan.last(eqx.combine(w, fixed[2]), y, part)
    me = lax.axis_index(AXIS)
    batch = jax.tree.map(lambda x: x.reshape(m, plan.rows // m, *x.shape[1:]), batch)
    shape = jax.eval_shape(first, first_params, at(batch, 0))
    nothing = empty(shape)
    stage = lambda w, x, part: run_layers(plan.layer, eqx.combine(w, fixed[1]), x, part, False)
    slots = min(m, 2 * p - 1)
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)

    def last(last_params, y, part):
        mean = finish(last_params, y, part)
        return mean.total.astype(jnp.float32), mean.weight.astype(jnp.float32)

    def go(t, got, kept):
        """One microbatch forward: what it gives, and the inputs kept for going back."""
        i = jnp.clip(t - me, 0, m - 1)
        busy = (t >= me) & (t - me < m)
        part = at(batch, i)
        x = lax.cond(me == 0, lambda: first(first_params, part), lambda: zeros(nothing))
        x = choose(me == 0, x, got)
        kept = jax.tree.map(
            lambda k, x: lax.dynamic_update_index_in_dim(
                k,
                jnp.where(busy, x, lax.dynamic_index_in_dim(k, i % slots, keepdims=False)),
                i % slots,
                0,
            ),
            kept,
            x,
        )
        y = choose(busy, stage(layers, x, part), nothing)
        return y, kept, part, busy

    def turn(y, part, busy, sums):
        """On the last device: the loss and the gradient that starts the way back."""

        def on_last():
            (total, weight), pull = jax.vjp(lambda w, y: last(w, y, part), last_params, y)
            d_params, d_y = pull((jnp.ones_like(total), jnp.zeros_like(weight)))
            return (total, weight), d_params, d_y

        elsewhere = lambda: jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(on_last)
        )
        loss, d_params, d_y = lax.cond(me == p - 1, on_last, elsewhere)
        loss, d_params = choose(busy, (loss, d_params), zeros((loss, d_params)))
        return jax.tree.map(jnp.add, sums, (loss, d_params)), d_y

    def back(t, d_y, kept, grads):
        """One microbatch backward; its stage is computed anew from the kept input."""
        j = t - 2 * (p - 1) + me
        busy = (j >= 0) & (j < m)
        j = jnp.clip(j, 0, m - 1)
        part = at(batch, j)
        _, pull = jax.vjp(lambda w, x: stage(w, x, part), layers, at(kept, j % slots))
        d_layers, d_x = pull(d_y)

        def on_first():
            _, pull = jax.vjp(lambda w: first(w, part), first_params)
            return pull(d_x)[0]

        d_first = lax.cond(me == 0, on_first, lambda: zeros(first_params))
        # Chosen, not multiplied by 0: what the bubble computes may be NaN.
        mine = choose(busy, (d_first, d_layers), zeros((d_first, d_layers)))
        return choose(busy, d_x, nothing), jax.tree.map(jnp.add, grads, mine)

    @jax.named_scope(BACK)
    def returned(tree):
        pairs = [(i, i - 1) for i in range(1, p)]
        return jax.tree.map(lambda x: lax.ppermute(x, AXIS, pairs), tree)

    def fill(carry, t):
        got, kept = carry
        y, kept, _, _ = go(t, got, kept)
        return (onward(y, p), kept), None

    def steady(carry, t):
        got, kept, d_got, sums, grads = carry
        y, kept, part, busy = go(t, got, kept)
        sums, d_y = turn(y, part, busy, sums)
        d_x, grads = back(t, choose(me == p - 1, d_y, d_got), kept, grads)
        return (onward(y, p), kept, returned(d_x), sums, grads), None

    def drain(carry, t):
        kept, d_got, grads = carry
        d_x, grads = back(t, d_got, kept, grads)
        return (kept, returned(d_x), grads), None

    store = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (slots, *x.shape)), nothing)
    # No microbatch comes back before tick p - 1, and none sets out after p + m - 2.
    (got, kept), _ = lax.scan(fill, (nothing, store), jnp.arange(p - 1))
    loss = (jnp.zeros(()), jnp.zeros(()))
    carry = (got, kept, nothing, (loss, zeros(last_params)), zeros((first_params, layers)))
    carry, _ = lax.scan(steady, carry, jnp.arange(p - 1, p - 1 + m))
    _, kept, d_got, (loss, d_last), grads = carry
    ticks = jnp.arange(p - 1 + m, 2 * (p - 1) + m)
    (_, _, (d_first, d_layers)), _ = lax.scan(drain, (kept, d_got, grads), ticks)
    examples = plan.batch or ()
    loss, d_first, d_last = lax.psum((loss, d_first, d_last), (*examples, AXIS))
    if examples:
        d_layers = lax.psum(d_layers, examples)
    return loss, (d_first, d_layers, d_last)
