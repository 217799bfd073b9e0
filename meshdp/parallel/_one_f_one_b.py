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
from ._pipeline import AXIS, Layer, at, check, choose, empty, in_order, onward, run_layers
from ._schedule import BACK, Schedule


@dataclasses.dataclass(frozen=True)
class _Plan:
    first: Callable
    layer: Layer
    last: Callable
    stages: int
    microbatches: int
    repeats: int
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
    repeats: int = 1,
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
    many there are, where `pipeline` keeps all. With `repeats=v`, each device holds v shorter
    runs of layers (interleaved 1F1B, ibid. section 2.2): the bubble is v times shorter, and
    at most `2vp - 1` inputs are kept. Time and `bubble` are those of `pipeline` with `remat`.
    Values and gradients are computed together, and gradients are right for any function of
    the loss; there are no second derivatives. Gradients of the parameters are added up in
    float32 at least.

    Without a mesh, or with one device along `"stage"`: `first`, a scan over the layers,
    `last`, on the whole batch.

    **Arguments:**

    - `first`: `first(params[0], batch) -> x`, an embedding.
    - `f`: one layer, `f(params of the layer, x, batch) -> x`, as for `pipeline`.
    - `last`: `last(params[2], x, batch) -> Mean`, the sum of the losses and their weight.
    - `params`: of first, the layers (as for `pipeline`) and last. All three functions must
        take their arrays from here and not from around them.
    - `batch`: a pytree of arrays, `[batch, ...]` (global shapes). It gets no gradient.
    - `microbatches`: as for `pipeline`; with `repeats`, a multiple of the number of stages.

    **Returns:**

    A `Mean`, the same on all devices of `"stage"`. Its weight gets no gradient.

    **Raises:**

    - `ValueError`: naming every size that does not fit, and the nearest that do.
    """
    refuse_manual("pipeline_loss", AXIS)
    sizes = here()
    stages = sizes.get(AXIS, 1)
    rows = check("pipeline_loss", params[1], batch, microbatches, repeats, sizes, repeats > 1)
    batch = jax.tree.map(lax.stop_gradient, batch)
    if stages == 1:
        params = (params[0], in_order(params[1], repeats), params[2])
        x = run_layers(f, params[1], first(params[0], batch), batch, True)
        mean = last(params[2], x, batch)
    else:
        entry = some(EXAMPLES, sizes)
        plan = _Plan(first, f, last, stages, microbatches, repeats, rows, entry)
        learned, fixed = eqx.partition(params, eqx.is_inexact_array)
        sums: Any = _loss(plan, learned, fixed, batch)
        mean = Mean(*sums)
    return Mean(mean.total, lax.stop_gradient(mean.weight))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(plan, learned, fixed, batch):
    return _forward(plan, learned, fixed, batch)[0]


def _forward(plan: _Plan, learned, fixed, batch):
    rows, layers = P(plan.batch), P(AXIS) if plan.repeats == 1 else P(None, AXIS)
    specs = (P(), layers, P())
    run = manually(
        "pipeline_loss",
        partial(_per_device, plan),
        frozenset({AXIS, *EXAMPLES} & _jaxapi.automatic_axes()),
        (specs, specs, rows),
        ((P(), P()), specs),
    )
    schedule = Schedule("pipeline_loss", plan.stages, plan.microbatches, plan.repeats)
    with jax.named_scope(schedule.scope):
        return run(learned, fixed, batch)


def _backward(plan: _Plan, grads, d):
    return jax.tree.map(lambda g: g * d[0].astype(g.dtype), grads), None, None


_loss.defvjp(_forward, _backward)


def _per_device(plan: _Plan, learned, fixed, batch):
    p, m, v = plan.stages, plan.microbatches, plan.repeats
    schedule = Schedule("pipeline_loss", p, m, v)
    first_params, layers, last_params = learned
    # Integers among the parameters have no gradient to add up.
    first = lambda w, part: plan.first(eqx.combine(w, fixed[0]), part)
    finish = lambda w, y, part: plan.last(eqx.combine(w, fixed[2]), y, part)
    me = lax.axis_index(AXIS)
    batch = jax.tree.map(lambda x: x.reshape(m, plan.rows // m, *x.shape[1:]), batch)
    shape = jax.eval_shape(first, first_params, at(batch, 0))
    nothing = empty(shape)
    slots = schedule.kept
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    run = lambda turn, tree: tree if v == 1 else at(tree, turn)

    def stage(w, turn, x, part):
        return run_layers(plan.layer, eqx.combine(w, run(turn, fixed[1])), x, part, False)

    def last(last_params, y, part):
        mean = finish(last_params, y, part)
        return mean.total.astype(jnp.float32), mean.weight.astype(jnp.float32)

    def place(u):
        """The microbatch of a device's u-th tick, and its turn: p of them go round together."""
        busy = (u >= 0) & (u < v * m)
        u = jnp.clip(u, 0, v * m - 1)
        if v == 1:
            return u, 0, busy
        return u // (v * p) * p + u % p, u // p % v, busy

    def go(t, got, kept):
        """One microbatch forward: what it gives, and the inputs kept for going back."""
        i, turn, busy = place(t - me)
        part = at(batch, i)
        enters = (me == 0) & (turn == 0)
        x = lax.cond(enters, lambda: first(first_params, part), lambda: zeros(nothing))
        x = choose(enters, x, got)
        slot = jnp.clip(t - me, 0, v * m - 1) % slots
        kept = jax.tree.map(
            lambda k, x: lax.dynamic_update_index_in_dim(
                k,
                jnp.where(busy, x, lax.dynamic_index_in_dim(k, slot, keepdims=False)),
                slot,
                0,
            ),
            kept,
            x,
        )
        y = choose(busy, stage(run(turn, layers), turn, x, part), nothing)
        return y, kept, part, busy & (me == p - 1) & (turn == v - 1)

    def turn_back(y, part, ends, sums):
        """On the last device: the loss and the gradient that starts the way back."""

        def on_last():
            (total, weight), pull = jax.vjp(lambda w, y: last(w, y, part), last_params, y)
            d_params, d_y = pull((jnp.ones_like(total), jnp.zeros_like(weight)))
            return (total, weight), d_params, d_y

        elsewhere = lambda: jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(on_last)
        )
        loss, d_params, d_y = lax.cond(ends, on_last, elsewhere)
        return jax.tree.map(_add, sums, (loss, d_params)), d_y

    def back(t, d_y, d_got, kept, grads):
        """One microbatch backward; its stage is computed anew from the kept input.

        `d_y`: the gradient that starts here, on the last device.
        """
        # Backward, the turns come in the opposite order.
        j, late, busy = place(t - (v + 1) * p + 2 + me)
        turn = v - 1 - late
        part = at(batch, j)
        u = j if v == 1 else j // p * (v * p) + turn * p + j % p
        d_y = choose((me == p - 1) & (turn == v - 1), d_y, d_got)
        _, pull = jax.vjp(
            lambda w, x: stage(w, turn, x, part), run(turn, layers), at(kept, u % slots)
        )
        d_layers, d_x = pull(d_y)

        def on_first():
            _, pull = jax.vjp(lambda w: first(w, part), first_params)
            return pull(d_x)[0]

        # Chosen, not multiplied by 0: what the bubble computes may be NaN.
        d_first = lax.cond(
            busy & (me == 0) & (turn == 0), on_first, lambda: zeros(first_params)
        )
        d_layers = choose(busy, d_layers, zeros(d_layers))
        sums, layer_sums = grads
        sums = jax.tree.map(_add, sums, d_first)
        if v == 1:
            layer_sums = jax.tree.map(_add, layer_sums, d_layers)
        else:
            layer_sums = jax.tree.map(
                lambda s, d: s.at[turn].add(d.astype(s.dtype)), layer_sums, d_layers
            )
        return choose(busy, d_x, nothing), (sums, layer_sums)

    @jax.named_scope(BACK)
    def returned(tree):
        pairs = [(i, (i - 1) % p) for i in range(0 if v > 1 else 1, p)]
        return jax.tree.map(lambda x: lax.ppermute(x, AXIS, pairs), tree)

    forward = lambda y: onward(y, p, around=v > 1)

    def fill(carry, t):
        got, kept = carry
        y, kept, _, _ = go(t, got, kept)
        return (forward(y), kept), None

    def steady(carry, t):
        got, kept, d_got, sums, grads = carry
        y, kept, part, ends = go(t, got, kept)
        sums, d_y = turn_back(y, part, ends, sums)
        d_x, grads = back(t, d_y, d_got, kept, grads)
        return (forward(y), kept, returned(d_x), sums, grads), None

    def drain(carry, t):
        kept, d_got, grads = carry
        d_x, grads = back(t, d_got, d_got, kept, grads)
        return (kept, returned(d_x), grads), None

    store = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (slots, *x.shape)), nothing)
    # No microbatch turns back before tick v * p - 1, and then each device works in both
    # directions until none sets out.
    lead, ticks = v * p - 1, schedule.ticks
    (got, kept), _ = lax.scan(fill, (nothing, store), jnp.arange(lead))
    loss = (jnp.zeros(()), jnp.zeros(()))
    sums = jax.tree.map(_wide_zeros, (last_params, first_params, layers))
    carry = (got, kept, nothing, (loss, sums[0]), sums[1:])
    carry, _ = lax.scan(steady, carry, jnp.arange(lead, ticks))
    _, kept, d_got, (loss, d_last), grads = carry
    carry, _ = lax.scan(drain, (kept, d_got, grads), jnp.arange(ticks, ticks + lead))
    d_first, d_layers = carry[2]
    examples = plan.batch or ()
    loss, d_first, d_last = lax.psum((loss, d_first, d_last), (*examples, AXIS))
    if examples:
        d_layers = lax.psum(d_layers, examples)
    return loss, jax.tree.map(
        lambda d, w: d.astype(w.dtype), (d_first, d_layers, d_last), learned
    )


def _wide_zeros(w):
    return jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32))


def _add(total, x):
    return total + x.astype(total.dtype)
