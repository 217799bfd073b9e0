"""A stack of layers over the mesh axis `"stage"`: GPipe and circular schedules.

One `shard_map` in which each device works on its own layers and hands the result to the next;
differentiating it gives the backward pipeline. All devices compute in every tick, on real data
even when the result is thrown away: layers may hold collectives over other axes, which all
devices must reach together.

Not the shifted buffer of GSPMD (a roll of an array split over `"stage"`): on eight CPU devices
`tests/benchmarks/pipeline_forms.py` gave our form 0.84 to 0.97 of its time, the same memory
within 12 %, 0.4 of its permuted bytes, and one reduction of the weight gradients over `"data"`
at the end where the partitioner puts one into every tick (0.5 against 5.8 MB).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import PartitionSpec as P

from .. import _jaxapi
from ._axes import EXAMPLES, here, manually, near, refuse_manual, some, total, ways
from ._schedule import Schedule

AXIS = "stage"
Layer = Callable[[Any, Any, Any], Any]

BUBBLE = 0.0
"""What fills the places where there is no microbatch. A test makes it NaN."""


def pipeline(
    f: Layer,
    params: Any,
    x: Any,
    context: Any = None,
    *,
    microbatches: int,
    repeats: int = 1,
    remat: bool = True,
) -> Any:
    """Applies a stack of layers one after the other, over the devices of `"stage"`.

    ```python
    def layer(params, x, context):  # x: [examples, tokens, width]
        return x + jnp.tanh(x @ params["w"])

    y = pipeline(layer, layers, x, microbatches=8)  # layers["w"]: [layers, width, width]
    ```

    Without a mesh, or with one device along `"stage"`, a `jax.lax.scan` over the layers, and
    `microbatches` is of no matter. Else each of p devices holds a p-th of the layers, and the
    examples pass through in microbatches (GPipe, Huang et al. 2018). With `repeats=v`, each
    holds v shorter runs of layers and the microbatches go round v times, so that the bubble
    is shorter (Narayanan et al. 2021); see `bubble`, and `meshdp.report` of the step.

    Inside, `"data"`, `"fsdp"` and `"stage"` are manual axes, and the others are as they were,
    so a layer may be split over `"tensor"`, `"seq"` or `"expert"`. Parameters that are split
    over `"fsdp"` are gathered once, when the pipeline starts, and a device holds its layers
    and their gradients whole until the end. (Gathered in every tick, with fsdp=4, stage=2
    and 4 microbatches, 0.4 to 0.6 of the temporaries would do, for 4 to 7 times the traffic.)

    **Arguments:**

    - `f`: one layer, `f(params of the layer, x, context) -> x`. It sees some of the examples,
        and treats them alike. It must take its arrays from here and not from around it.
    - `params`: a pytree of arrays whose first dimension is the layer, split over `"stage"`:
        `P("stage")`. With `repeats=v`, the first two dimensions are `[v, layers / v]`, in the
        order in which the layers are applied, split as `P(None, "stage")`.
    - `x`: a pytree of arrays, `[batch, ...]` (global shapes).
    - `context`: a pytree of arrays `[batch, ...]` that layers read and do not change: keys,
        masks, segment ids. It gets no gradient.
    - `microbatches`: into how many parts the examples of each group of devices are cut; at
        least the number of stages.
    - `remat`: whether the backward pass computes a layer's inside anew, so that only the input
        of each stage is kept for each microbatch.

    **Returns:**

    What the last layer returns, for the whole batch, on every device of `"stage"`.

    **Raises:**

    - `ValueError`: naming every size that does not fit, and the nearest that do.
    """
    refuse_manual("pipeline", AXIS)
    f = steady("pipeline", f)
    sizes = here()
    stages = sizes.get(AXIS, 1)
    rows = check("pipeline", params, (x, context), microbatches, repeats, sizes)
    context = jax.tree.map(lax.stop_gradient, context)
    if stages == 1:
        return run_layers(f, in_order(params, repeats), x, context, remat)

    wide, narrow = _summable((params, x))

    def per_device(params, x, context):
        params, x = narrow((params, x))
        cut = lambda x: x.reshape(microbatches, rows // microbatches, *x.shape[1:])
        x, context = jax.tree.map(cut, (x, context))

        # What a tick slices is sliced in here, so that no slice is kept for each tick.
        def stage(w, turn, x, context, i):
            w = w if turn is None else at(w, turn)
            return run_layers(f, w, x, at(context, i), False)

        if remat:
            stage = jax.checkpoint(stage)
        if repeats == 1:
            y, have = _gpipe(stage, params, x, context, stages, microbatches), stages - 1
        else:
            y, have = _circular(stage, params, x, context, stages, microbatches, repeats), 0
        here = lax.axis_index(AXIS) == have
        flat = lambda x: x.reshape(rows, *x.shape[2:])
        # Zeros elsewhere, so the sum is the copy.
        copy, back = _summable(jax.tree.map(lambda y: jnp.where(here, flat(y), 0), y))
        return back(jax.tree.map(lambda y: total(y, AXIS, stages), copy))

    batch = P(some(EXAMPLES, sizes))
    layers = P(AXIS) if repeats == 1 else P(None, AXIS)
    free = _jaxapi.automatic_axes()
    run = manually(
        "pipeline",
        per_device,
        frozenset({AXIS, *EXAMPLES} & free),
        (layers, batch, batch),
        batch,
    )
    with jax.named_scope(Schedule("pipeline", stages, microbatches, repeats, remat).scope):
        return run(*wide, context)


def _summable(tree: Any) -> tuple[Any, Callable]:
    """The tree with arrays, and so gradients, that devices may add up; and the way back."""
    types = jax.tree.map(lambda x: x.dtype, tree)
    aborts = _jaxapi.low_sums_abort(jax.sharding.get_abstract_mesh())
    low = lambda x: aborts and x.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if low(x) else x, tree)
    return wide, lambda tree: jax.tree.map(lambda x, t: x.astype(t), tree, types)


def steady(who: str, f: Layer) -> Layer:
    """The layer, refused if it does not return an `x` like the one it was given."""

    def layer(params: Any, x: Any, context: Any) -> Any:
        y = f(params, x, context)
        before, after = jtu.tree_structure(x), jtu.tree_structure(y)
        if before != after:
            problems = [f"  it was given {before}", f"  it returns   {after}"]
        else:
            words = lambda a: f"{jnp.result_type(a)}{list(jnp.shape(a))}"
            problems = [
                f"  x{jtu.keystr(path)}: {words(a)} became {words(b)}"
                for (path, a), b in zip(
                    jtu.tree_leaves_with_path(x), jtu.tree_leaves(y), strict=True
                )
                if words(a) != words(b)
            ]
        if problems:
            raise ValueError(
                f"A layer of {who} must return x as it was given it, for the next layer "
                "(shapes of a microbatch on one device):\n"
                + "\n".join(problems)
                + "\nMake the change outside of the layers, or cast back what changed."
            )
        return y

    return layer


def run_layers(f: Layer, params: Any, x: Any, context: Any, remat: bool) -> Any:
    layer = jax.checkpoint(f) if remat else f
    return lax.scan(lambda x, w: (layer(w, x, context), None), x, params)[0]


def in_order(params: Any, repeats: int) -> Any:
    """`[repeats, layers / repeats, ...]` as `[layers, ...]`."""
    return (
        params if repeats == 1 else jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), params)
    )


def at(tree: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def choose(condition: Any, a: Any, b: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def empty(tree: Any) -> Any:
    """What a device holds where there is no microbatch."""
    fill = lambda x: jnp.full(
        x.shape, BUBBLE if jnp.issubdtype(x.dtype, jnp.inexact) else 0, x.dtype
    )
    return jax.tree.map(fill, tree)


def onward(tree: Any, stages: int, *, around: bool = False) -> Any:
    pairs = [(i, (i + 1) % stages) for i in range(stages if around else stages - 1)]
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, pairs), tree)


def _gpipe(stage, params, xs, context, stages, microbatches):
    me = lax.axis_index(AXIS)
    nothing = empty(at(xs, 0))

    def tick(got, t):
        i = jnp.clip(t - me, 0, microbatches - 1)
        busy = (t >= me) & (t - me < microbatches)
        # In the bubble a device works on real input, which has finite derivatives to be
        # multiplied by the zeros that come back.
        x = choose(busy & (me > 0), got, at(xs, i))
        y = choose(busy, stage(params, None, x, context, i), nothing)
        return onward(y, stages), y

    ticks = jnp.arange(microbatches + stages - 1)
    _, ys = lax.scan(tick, nothing, ticks)
    return jax.tree.map(lambda y: y[stages - 1 :], ys)


def _circular(stage, params, xs, context, stages, microbatches, repeats):
    """The result lies on device 0, which gets what the last one makes."""
    me = lax.axis_index(AXIS)
    nothing = empty(at(xs, 0))

    def tick(carry, t):
        got, waiting = carry
        u = jnp.clip(t - me, 0, repeats * microbatches - 1)
        busy = (t >= me) & (t - me < repeats * microbatches)
        turn, i = u // microbatches, u % microbatches
        entering = choose(turn == 0, at(xs, i), at(waiting, i))
        x = choose(me == 0, entering, got)
        x = choose(busy, x, at(xs, i))  # as above
        y = choose(busy, stage(params, turn, x, context, i), nothing)
        got = onward(y, stages, around=True)
        # What comes to device 0 waits there for its next turn.
        last = t - (stages - 1)
        slot = jnp.maximum(last, 0) % microbatches
        put = lambda w, g: lax.dynamic_update_index_in_dim(
            w,
            jnp.where(last >= 0, g, lax.dynamic_index_in_dim(w, slot, keepdims=False)),
            slot,
            0,
        )
        return (got, jax.tree.map(put, waiting, got)), None

    ticks = jnp.arange(repeats * microbatches + stages - 1)
    (_, waiting), _ = lax.scan(tick, (nothing, empty(xs)), ticks)
    return waiting


def check(who, params, batch, microbatches, repeats, sizes, together=False) -> int:
    """The examples of one group of devices, if all sizes fit.

    `together`: as many microbatches as stages go round together.
    """
    stages, ways_ = sizes.get(AXIS, 1), ways(some(EXAMPLES, sizes), sizes)
    problems = []
    for name, n in (("microbatches", microbatches), ("repeats", repeats)):
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            problems.append(f"  {name}: {n!r}; it takes a whole number from 1")
    if problems:
        raise ValueError(f"{who} cannot use these arguments:\n" + "\n".join(problems))
    lead = sorted({w.shape[: 1 if repeats == 1 else 2] for w in jax.tree.leaves(params)})
    if len(lead) != 1 or len(lead[0]) < (1 if repeats == 1 else 2):
        want = "[layers, ...]" if repeats == 1 else "[repeats, layers / repeats, ...]"
        problems.append(
            f"  params: the arrays begin with {', '.join(map(str, lead)) or 'nothing'}; all "
            f"take the same {want}"
        )
    else:
        if repeats > 1 and lead[0][0] != repeats:
            problems.append(
                f"  params: the first dimension is {lead[0][0]}; repeats={repeats} takes "
                f"[{repeats}, layers / {repeats}, ...]"
            )
        count = lead[0][-1]
        if count % stages:
            what = "layers" if repeats == 1 else f"layers of each of {repeats} repeats"
            problems.append(
                f"  {what}: {count} do not divide by stage={stages}; give {near(count, stages)}"
            )
    firsts = sorted({x.shape[0] for x in jax.tree.leaves(batch)})
    rows = 0
    if len(firsts) != 1:
        problems.append(
            f"  x and context: first dimensions {', '.join(map(str, firsts)) or 'none'}; all "
            "take the same number of examples"
        )
    elif firsts[0] % ways_:
        problems.append(
            f"  batch: {firsts[0]} examples do not divide by data*fsdp={ways_}; give "
            f"{near(firsts[0], ways_)}"
        )
    elif stages > 1:
        rows = firsts[0] // ways_
        odd = together and microbatches % stages
        if microbatches < stages or rows % microbatches or odd:
            step = stages if together else 1
            fits = [m for m in range(stages, rows + 1, step) if rows % m == 0]
            fits = sorted(fits, key=lambda m: abs(m - microbatches))[:2]
            give = (
                f"give {' or '.join(map(str, sorted(fits)))}"
                if fits
                else f"give {'a multiple of' if together else 'at least'} {stages} examples to "
                "each group of devices"
            )
            why = (
                f"fewer than stage={stages}"
                if microbatches < stages
                else f"which do not divide the {rows} examples of a group of devices"
                if rows % microbatches
                else f"which do not divide by stage={stages}, as repeats={repeats} takes"
            )
            problems.append(f"  microbatches: {microbatches}, {why}; {give}")
    if problems:
        raise ValueError(f"{who} cannot use these sizes:\n" + "\n".join(problems))
    return rows
