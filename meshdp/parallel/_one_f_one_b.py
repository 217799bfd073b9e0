"""1F1B: each microbatch goes back as soon as it has come through, and its memory is free.

All devices work in lockstep: in each tick all go forward, then all go backward, and in the
bubble they compute what is thrown away. To skip that by `lax.cond` would save no time, as the
others are waited for. What zero-bubble schedules can save here is that the weights' gradients
are computed for m microbatches and not in m + p - 1 ticks. On forced CPU devices
(`tests/benchmarks/pipeline_schedules.py`, 4 stages, 8 microbatches, width 768) that took 0.93
of 1F1B's flops, 0.96 to 0.99 of its time and 1.5 times its temporaries; with layers of width
256 it was no faster. `repeats=2` took 0.6 of the time, with less memory; keeping all 0.85.
"""

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
from .._step_options import describe
from ..train import Mean
from ._axes import EXAMPLES, here, manually, refuse_manual, some
from ._halves import Stage
from ._pipeline import (
    AXIS,
    Layer,
    at,
    check,
    choose,
    empty,
    in_order,
    onward,
    run_layers,
    steady,
)
from ._schedule import BACK, Schedule


@dataclasses.dataclass(frozen=True)
class _Plan:
    first: Callable
    layer: Layer
    last: Callable
    stages: int
    microbatches: int
    repeats: int
    remat: bool
    later: bool
    rows: int
    batch: tuple[str, ...] | None

    @property
    def schedule(self) -> Schedule:
        sizes = self.stages, self.microbatches, self.repeats
        return Schedule("pipeline_loss", *sizes, self.remat, self.later)


def _meaning(last: Callable) -> Callable:
    def mean(params: Any, x: Any, batch: Any) -> Mean:
        out = last(params, x, batch)
        if not isinstance(out, Mean):
            raise ValueError(
                f"last of pipeline_loss returned {describe(out)}. Return "
                "meshdp.Mean.of(losses, mask), with one loss for each example or token."
            )
        return out

    return mean


def pipeline_loss(
    first: Callable[[Any, Any], Any],
    f: Layer,
    last: Callable[[Any, Any, Any], Mean],
    params: tuple[Any, Any, Any],
    batch: Any,
    *,
    microbatches: int,
    repeats: int = 1,
    remat: bool = True,
    zero_bubble: bool = False,
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
    at most `2vp - 1` inputs are kept. Time and `bubble` are those of `pipeline`. Values and
    gradients are computed together (where nobody asks for gradients the compiler leaves them
    out), and gradients are right for any function of the loss; there are no second
    derivatives. Gradients of the parameters are added up in float32 at least.

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
    - `repeats`: as for `pipeline`.
    - `remat`: whether the backward pass computes a stage's inside anew from its input. Else
        the inside is kept, for at most `2vp - 1` microbatches: a quarter less work.
    - `zero_bubble`: whether a layer's backward pass is cut in two, for its input at once and
        for its weights up to p - 1 ticks later, when no device would idle (ZB-H1 of Qi et al.
        2023, in lockstep; the warm-up is that of 1F1B). Shortens the `bubble` by a third or a
        quarter, and keeps both ends of each product with a weight for p more microbatches:
        for few microbatches and wide layers.

    **Returns:**

    A `Mean`, the same on all devices of `"stage"`. Its weight gets no gradient.

    **Raises:**

    - `ValueError`: naming every size that does not fit, and the nearest that do; or what a
        layer or `last` returned, if it is of another kind.
    """
    refuse_manual("pipeline_loss", AXIS)
    f, last = steady("pipeline_loss", f), _meaning(last)
    sizes = here()
    stages = sizes.get(AXIS, 1)
    rows = check("pipeline_loss", params[1], batch, microbatches, repeats, sizes, repeats > 1)
    batch = jax.tree.map(lax.stop_gradient, batch)
    if stages == 1:
        params = (params[0], in_order(params[1], repeats), params[2])
        x = run_layers(f, params[1], first(params[0], batch), batch, remat)
        mean = last(params[2], x, batch)
    else:
        functions, entry = (first, f, last), some(EXAMPLES, sizes)
        numbers = (stages, microbatches, repeats)
        plan = _Plan(*functions, *numbers, remat, zero_bubble, rows, entry)
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
    with jax.named_scope(plan.schedule.scope):
        return run(learned, fixed, batch)


def _backward(plan: _Plan, grads, d):
    return jax.tree.map(lambda g: g * d[0].astype(g.dtype), grads), None, None


_loss.defvjp(_forward, _backward)


def _per_device(plan: _Plan, learned, fixed, batch):
    p, m, v = plan.stages, plan.microbatches, plan.repeats
    schedule = plan.schedule
    first_params, layers, last_params = learned
    # Integers among the parameters have no gradient to add up.
    first = lambda w, part: plan.first(eqx.combine(w, fixed[0]), part)
    finish = lambda w, y, part: plan.last(eqx.combine(w, fixed[2]), y, part)
    me = lax.axis_index(AXIS)
    batch = jax.tree.map(lambda x: x.reshape(m, plan.rows // m, *x.shape[1:]), batch)
    shape = jax.eval_shape(first, first_params, at(batch, 0))
    nothing = empty(shape)
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    run = lambda turn, tree: tree if v == 1 else at(tree, turn)
    stage = Stage(plan.layer, run(0, layers), run(0, fixed[1]), nothing, at(batch, 0))

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

    def backward_place(u):
        # Backward, the turns come in the opposite order.
        j, late, busy = place(u)
        return j, v - 1 - late, busy

    def forward(t, got, kept):
        """One microbatch forward: what it gives, and what is kept for going back."""
        i, turn, busy = place(t - me)
        part = at(batch, i)
        enters = (me == 0) & (turn == 0)
        x = lax.cond(enters, lambda: first(first_params, part), lambda: zeros(nothing))
        x = choose(enters, x, got)
        w = run(turn, (layers, fixed[1]))
        if plan.remat:
            y, keep = stage.forward(w, x, part), x
        else:
            y, keep = stage.forward_and_keep(w, x, part)
        kept = _put(kept, keep, jnp.clip(t - me, 0, v * m - 1) % schedule.kept, busy)
        return choose(busy, y, nothing), kept, part, busy & (me == p - 1) & (turn == v - 1)

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

    def backward(t, d_y, d_got, kept, waiting, grads):
        """One microbatch backward. `d_y`: the gradient that starts here, on the last device."""
        k = t - lead - (p - 1 - me)
        j, turn, busy = backward_place(k)
        part = at(batch, j)
        u = j if v == 1 else j // p * (v * p) + turn * p + j % p
        d_y = choose((me == p - 1) & (turn == v - 1), d_y, d_got)
        keep, w = at(kept, u % schedule.kept), run(turn, (layers, fixed[1]))
        if plan.remat:
            _, keep = stage.forward_and_keep(w, keep, part)
        sums, layer_sums = grads
        if plan.later:
            d_x, wait = stage.inputs(w, keep, d_y)
            waiting = _put(waiting, wait, jnp.clip(k, 0, v * m - 1) % p, busy)
        else:
            d_x, d_layers = stage.both(w, keep, d_y)
            # Chosen, not multiplied by 0: what the bubble computes may be NaN.
            layer_sums = add_layers(layer_sums, choose(busy, d_layers, zeros(d_layers)), turn)

        def on_first():
            _, pull = jax.vjp(lambda w: first(w, part), first_params)
            return pull(d_x)[0]

        d_first = lax.cond(
            busy & (me == 0) & (turn == 0), on_first, lambda: zeros(first_params)
        )
        sums = jax.tree.map(_add, sums, d_first)
        return choose(busy, d_x, nothing), waiting, (sums, layer_sums)

    def add_layers(sums, d_layers, turn):
        if v == 1:
            return jax.tree.map(_add, sums, d_layers)
        return jax.tree.map(lambda s, d: s.at[turn].add(d.astype(s.dtype)), sums, d_layers)

    def weights(t, waiting, grads):
        """What the weights get of the microbatch that came back `me` ticks ago: all devices
        have p of them or less to do when the first device gets its first, and none idles."""
        k = t - lead - (p - 1)
        _, turn, _ = backward_place(k)
        d_layers = stage.weights(run(turn, (layers, fixed[1])), at(waiting, k % p))
        return grads[0], add_layers(grads[1], d_layers, turn)

    @jax.named_scope(BACK)
    def returned(tree):
        pairs = [(i, (i - 1) % p) for i in range(0 if v > 1 else 1, p)]
        return jax.tree.map(lambda x: lax.ppermute(x, AXIS, pairs), tree)

    def tick(carry, t, goes, comes, works):
        got, kept, d_got, waiting, sums, grads = carry
        d_y = d_got
        if goes:
            y, kept, part, ends = forward(t, got, kept)
            if comes:
                sums, d_y = turn_back(y, part, ends, sums)
            got = onward(y, p, around=v > 1)
        if comes:
            d_x, waiting, grads = backward(t, d_y, d_got, kept, waiting, grads)
            d_got = returned(d_x)
        if works:
            grads = weights(t, waiting, grads)
        return (got, kept, d_got, waiting, sums, grads), None

    stack = lambda tree, n: jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), tree)
    # No microbatch turns back before tick v * p - 1.
    lead, ticks = v * p - 1, schedule.ticks
    wide = jax.tree.map(_wide_zeros, (last_params, first_params, layers))
    carry = (
        nothing,
        stack(nothing if plan.remat else empty(stage.keeps), schedule.kept),
        nothing,
        stack(empty(stage.waits), p) if plan.later else (),
        ((jnp.zeros(()), jnp.zeros(())), wide[0]),
        wide[1:],
    )
    late = lead + p - 1 if plan.later else lead + ticks
    edges = sorted({0, lead, min(late, ticks), ticks, lead + ticks})
    for start, end in zip(edges, edges[1:], strict=False):
        how = dict(goes=start < ticks, comes=start >= lead, works=start >= late)
        carry, _ = lax.scan(partial(tick, **how), carry, jnp.arange(start, end))
    *_, (loss, d_last), (d_first, d_layers) = carry
    examples = plan.batch or ()
    loss, d_first, d_last = lax.psum((loss, d_first, d_last), (*examples, AXIS))
    if examples:
        d_layers = lax.psum(d_layers, examples)
    return loss, jax.tree.map(
        lambda d, w: d.astype(w.dtype), (d_first, d_layers, d_last), learned
    )


def _put(store, x, slot, busy):
    def one(s, x):
        old = lax.dynamic_index_in_dim(s, slot, keepdims=False)
        return lax.dynamic_update_index_in_dim(s, jnp.where(busy, x, old), slot, 0)

    return jax.tree.map(one, store, x)


def _wide_zeros(w):
    return jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32))


def _add(total, x):
    return total + x.astype(total.dtype)
