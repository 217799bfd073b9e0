"""The largest microbatch that fits, found by compiling and never by running."""

import dataclasses
from typing import Any

import jax

from .. import _jaxapi, _spec, _tree
from .._distribute import describe
from ._options import is_count
from ._state import TrainState
from ._train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """What `find_batch_size` found."""

    microbatch: int
    """Examples per device in each microbatch."""
    accumulate: int
    """Microbatches per step, so that the global batch stays what it is."""
    bytes: int
    """Memory that the compiled step needs on one device."""
    limit: int
    """Memory that there is on one device, in bytes."""
    tried: tuple[tuple[int, int], ...]
    """`(accumulate, bytes)` of each program that was compiled."""
    step: TrainStep
    """The step, made with this `accumulate`."""


def find_batch_size(
    step: TrainStep, state: TrainState, batch: Any, *, limit: int | None = None
) -> BatchSize:
    """Finds the least accumulation, and so the largest microbatch, that fits in memory.

    Candidates are compiled, a handful by bisection, and what they need is read from the
    program (arguments, results and temporaries, less what is reused). Nothing runs, and
    nothing is allocated for the batch.

    **Arguments:**

    - `step`: of `make_train_step`. Its own `accumulate` is where the search starts to be free.
    - `state`: a state or its shapes, as of `jax.eval_shape`.
    - `batch`: the global batch or its shapes.
    - `limit`: bytes on one device. If `None`, what the device reports; on CPU, the host's
        memory shared out over its devices.

    **Raises:**

    - `ValueError`: if not even one example per device and microbatch fits, if the batch has
        no examples or does not divide over the devices, or if `limit` is not above 0.
    """
    if not isinstance(step, TrainStep):
        raise TypeError(
            f"find_batch_size takes a step of make_train_step, not {describe(step)}."
        )
    if limit is not None and not (is_count(limit) or isinstance(limit, float) and limit >= 1):
        raise ValueError(f"limit is {limit!r}, expected bytes of one device, or None.")
    step.shardings(state)  # and so a mesh is chosen
    limit = int(limit or _jaxapi.memory_limit(step.mesh.devices.flat[0]))
    arrays = [x for x in jax.tree.leaves(batch) if _tree.is_array(x)]
    rows = arrays[0].shape[0] if arrays and arrays[0].shape else 0
    if not rows:
        raise ValueError(
            f"find_batch_size got a batch without examples, {describe(batch)}. Give the global "
            "batch, or its shapes, whose arrays have the examples along their first dimension."
        )
    ways = 1
    for axis in _spec.entries(step.batch_spec, 1)[0]:
        ways *= step.mesh.shape[axis]
    if rows % ways:
        raise ValueError(
            f"The batch has {rows} examples (global), which do not divide over {ways} devices: "
            f"{rows} % {ways} = {rows % ways}. Give a multiple of {ways}."
        )
    local = rows // ways
    counts = [a for a in range(1, local + 1) if local % a == 0]
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if _tree.is_array(x) else x,
        (state, batch),
    )
    tried: dict[int, int] = {}

    def need(count: int) -> int:
        if count not in tried:
            tried[count] = _bytes(_with(step, count), *shapes)
        return tried[count]

    # Memory falls as the count grows: bisect for the first that fits.
    low, high = 0, len(counts) - 1
    while low < high:
        middle = (low + high) // 2
        if need(counts[middle]) <= limit:
            high = middle
        else:
            low = middle + 1
    count = counts[low]
    if need(count) > limit:
        raise ValueError(
            f"Even one example per device and microbatch (accumulate={count}) needs "
            f"{need(count):,} bytes on a device, and there are {limit:,}. Split the state over "
            '"fsdp", or keep less of each layer with remat="full".'
        )
    return BatchSize(
        local // count,
        count,
        need(count),
        limit,
        tuple(sorted(tried.items())),
        _with(step, count),
    )


def _with(step: TrainStep, count: int) -> TrainStep:
    options = dataclasses.replace(step.options, accumulate=count)
    return TrainStep(options, **step.placement)


def _bytes(step: TrainStep, state, batch) -> int:
    m: Any = step.lower(state, batch).compile().memory_analysis()
    return (
        m.argument_size_in_bytes
        + m.output_size_in_bytes
        + m.temp_size_in_bytes
        - m.alias_size_in_bytes
    )
