"""`make_train_step`: the structured step, exact on any mesh."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .. import _spec
from .._distribute import BATCH, check_options
from .._layout import Layout
from ._options import Options
from ._precision import Precision
from ._train_step import TrainStep


def make_train_step(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    batch: P = BATCH,
    accumulate: int = 1,
    gather: str = "microbatch",
    shard_update: bool = True,
    precision: str | Precision = "full",
    remat: Any = "none",
    clip: float | None = None,
    skip: bool = True,
    stop_after: int | None = None,
    stateful: bool = False,
    trains: Any = eqx.is_inexact_array,
    donate: bool = True,
) -> TrainStep:
    """Makes a training step that gives the numbers of one device on any mesh.

    ```python
    def loss_fn(model, batch, keys):
        logits = jax.vmap(model)(batch["x"], key=keys)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return meshdp.Mean.of(losses, batch["mask"])

    step = meshdp.make_train_step(loss_fn, optax.adamw(3e-4), mesh=mesh, accumulate=4)
    state = step.init(make_model, key)
    state, metrics = step(state, batch)
    ```

    The loss of a step is the sum of all totals divided by the sum of all weights, over every
    example of the global batch. Totals, weights and gradients are summed over microbatches
    and devices and divided once, so that masks, padding and the number of devices change
    nothing. Gradients are reduced over `"data"` once per step. A weight that the layout
    splits over `"fsdp"` is gathered where it is used, freed, gathered again in the backward
    pass, and its gradient is reduce-scattered (ZeRO, Rajbhandari et al. 2020, section 5); in
    a `jax.lax.scan` over stacked layers, one layer at a time.

    **Arguments:**

    - `loss_fn`: `loss_fn(model, batch, keys) -> Mean`, or `(Mean, {name: Mean})` with further
        means to report. It sees some of the examples: a part `[n, ...]` of each array of the
        batch, and `keys` of shape `[n]`, one PRNG key per example that depends on the step
        and on the example's place in the global batch, not on the device. It must treat
        examples alike, wherever they lie. Inside, `"data"` and `"fsdp"` are manual axes;
        `meshdp.constrain` speaks of the others.
    - `optimizer`: any optax transformation. Its state lies as the parameters do. It runs on
        whole (global) arrays, so whole matrices and global norms mean what they say. Its
        `update` also gets `value=`, the loss, for those that ask for it.
    - `mesh`, `layout`, `donate`: as for `distributed`.
    - `batch`: the spec of the batch; the first dimension must be split over `"data"` and
        `"fsdp"`, further ones over other axes as you like.
    - `accumulate`: into how many microbatches each device splits its share of the batch.
    - `gather`: `"microbatch"` gathers fsdp weights and reduce-scatters their gradients with
        each microbatch: the least memory. `"step"` does both once per step: the least
        traffic, but each device holds the whole weights and gradients for the step.
    - `shard_update`: whether the optimizer's state and its work are split over `"data"` as
        well (ZeRO-1): gradients are reduce-scattered, each device updates a share, and the
        weights are gathered. The numbers are the same.
    - `precision`: `"full"` leaves every type alone; `"bf16"` and `"f16"` compute in that type
        with weights, optimizer state and sums in float32; or a `Precision`. float16 scales
        the loss, and finds the scale by itself.
    - `remat`: what is kept of each layer for the backward pass. `"none"` keeps everything,
        `"full"` only what enters the layer, `"dots"` also its matrix products; or a policy of
        `jax.checkpoint_policies`, or the names to keep. A layer is the body of a scan over
        stacked weights, or what uses the weights of one of a row of like parts of the model
        (`.blocks[3]`, `['Block_3']`).
    - `clip`: the global norm that the gradient is scaled down to when it is larger. The norm
        is that of the whole gradient, however it is split.
    - `skip`: whether a step whose loss or gradient is not finite leaves model, optimizer state
        and model state as they were. `state.guard` and `metrics["skipped"]` count them. So
        does one whose learning rate is not finite, which the smallest parameters tell.
    - `stop_after`: how many such steps in a row end the run, with a `FloatingPointError` that
        names the first parameter whose gradient was not finite. Raised by the second call
        after, which waits for that step; so set it where that is no loss. Steps skipped to
        find the loss scale of float16 do not count.
    - `stateful`: for models that carry something on from batch to batch, such as the running
        averages of `eqx.nn.BatchNorm`: `loss_fn(model, batch, keys, model_state)` returns
        `(Mean, model_state)` or `((Mean, aux), model_state)`. For statistics over the whole
        batch take means over `meshdp.BATCH_AXES` too:
        `eqx.nn.BatchNorm(n, axis_name=("batch", *meshdp.BATCH_AXES))`, or of Flax, whose
        `batch_stats` are the model state, `nn.BatchNorm(axis_name=meshdp.BATCH_AXES)`. With
        `accumulate`, they are of one microbatch (on all devices), and carried from one to the
        next, without gradient. A state that differs from device to device is averaged.
    - `trains`: which leaves train, as a filter of Equinox: a function of a leaf, or a pytree
        of booleans and functions, which may be a prefix of the model. The others get no
        gradient, no optimizer state and no traffic but their gathering.

    **Returns:**

    A `TrainStep`: `step(state, batch) -> (state, metrics)`, with `.init(make_model, key)`,
    `.lower(...)`, `.mesh` and `.shardings(...)`. `metrics` has float32 scalars, still on the
    devices: `"loss"`, `"weight"` (the sum of all weights), `"grad_norm"` (of the averaged
    gradient, before clipping), `"skipped"` and the auxiliary means.

    Arrays that are not floating-point get no gradient and are never changed. A parameter that
    the loss does not use gets a gradient of zero. If all weights are zero, `"loss"` is NaN,
    the gradient is zero, and the step is skipped (with `skip=False`, taken).

    **Raises:**

    - `ValueError`: when called, if the loss returns anything but `Mean`s of scalars, the
        batch does not divide, or the learning rate is not one number.
    - `FloatingPointError`: when called, after `stop_after` steps that were not finite.

    **Warns:**

    - `RuntimeWarning`: if the loss or gradient of the first step is not finite or no example
        counts (that step is waited for); and at any step, once per leaf of the batch, if its
        values index what they are out of range of, such as labels that no class belongs to.
        Later steps are looked at as they get done, and none is waited for.
    - `UserWarning`: if the loss draws random numbers from other keys than its own, which are
        the same at every step, or uses no keys although the model has `eqx.nn.Dropout`.
    """
    problems = []
    names = mesh.axis_names if isinstance(mesh, Mesh) else ("data", "fsdp")
    if not {"data", "fsdp"} <= set(names):
        problems.append(
            f"  mesh: has the axes {', '.join(map(repr, names))}; it takes one with "
            "'data' and 'fsdp', of size 1 or more: meshdp.make_mesh(data=4, fsdp=2)"
        )
    else:
        check_options(mesh, layout, batch)
    if not isinstance(donate, bool):
        problems.append(f"  donate: {donate!r}; it takes True or False")
    if isinstance(batch, P) and set(_spec.entries(batch, 1)[0]) != {"data", "fsdp"}:
        problems.append(
            f'  batch: {batch}; its first dimension is split over ("data", "fsdp"): '
            'P(("data", "fsdp"))'
        )
    options = Options(
        loss_fn=loss_fn,
        optimizer=optimizer,
        accumulate=accumulate,
        gather=gather,
        shard_update=shard_update,
        precision=precision,
        remat=remat,
        clip=clip,
        skip=skip,
        stop_after=stop_after,
        stateful=stateful,
        trains=trains,
        problems=tuple(problems),
    )
    return TrainStep(options, mesh=mesh, layout=layout, batch=batch, donate=donate)
