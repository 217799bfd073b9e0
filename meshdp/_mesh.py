"""Meshes: six named axes, and which device goes where."""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from . import _jaxapi

AXES = ("data", "fsdp", "stage", "expert", "seq", "tensor")
"""The axes of every mesh. An axis that is made manual outside comes before those made manual
inside it: jax 0.12 aborts when it does not."""

# Slowest links first. Another order than the names': a pipeline sends little and seldom, and
# gradients are reduced once a step, but tensor neighbours talk in every layer.
_PHYSICAL = ("stage", "data", "fsdp", "expert", "seq", "tensor")

# An int like any other, that is known again by identity: a size nobody gave.
_UNSET = type("_Unset", (int,), {})(1)

Slices = str | Sequence[str] | Mapping[str, int]


def make_mesh(
    *,
    data: int = _UNSET,
    fsdp: int = _UNSET,
    stage: int = _UNSET,
    expert: int = _UNSET,
    seq: int = _UNSET,
    tensor: int = _UNSET,
    devices: Sequence[Any] | None = None,
    slices: Slices | None = None,
) -> Mesh:
    """Makes a mesh with the axes `data, fsdp, stage, expert, seq, tensor`, in this order.

    The axes are all there on every mesh, so a spec such as `P("fsdp", "tensor")` is valid on
    every mesh; size 1 means that the axis is not used. All are of type `Auto`.

    Where the devices go is apart from the order of the names: neighbours along `tensor` are
    closest, then `seq`, `expert`, `fsdp`, `data`, and `stage` takes the slowest links. On TPU
    and GPU the order comes from JAX's topology-aware helper; on CPU it is the order of
    process and id. The order of `devices` does not matter.

    **Arguments:**

    - `data`, `fsdp`, `stage`, `expert`, `seq`, `tensor`: how many devices lie along the axis.
        Each is 1 by default. At most one may be `-1`: all the devices that are left. With no
        size given at all, `data=-1`.
    - `devices`: any sequence of devices, all of which are used. By default `jax.devices()`.
    - `slices`: which axes span slices (groups of devices with fast links inside and a slow
        network between: TPU slices, or else the processes). One name: all the slices lie
        along that axis. Several names: along these, the first takes as many as it can.
        A mapping: how many slices lie along each axis, such as `{"stage": 2, "data": 4}`.
        By default, devices that say they belong to several slices are spread along the
        slowest axes that fit.

    **Returns:**

    A `jax.sharding.Mesh`.

    **Raises:**

    - `ValueError`: a size that is not an integer, or is 0 or below -1; two sizes of -1; sizes
        whose product is not the number of devices (the nearest that fit are offered);
        `slices` that name an unknown axis or do not fit the sizes; no devices, or one twice.
    """
    asked = dict(zip(AXES, (data, fsdp, stage, expert, seq, tensor), strict=True))
    given = {name: size for name, size in asked.items() if size is not _UNSET} or {"data": -1}
    given = _valid_sizes(given)
    if devices is None:
        devices = jax.devices()
        own = False
    else:
        devices = _valid_devices(devices)
        own = True
    sizes = _resolve(given, len(devices), own)
    return _jaxapi.auto_mesh(_arrange(sizes, devices, slices), AXES)


def _valid_sizes(given: Mapping[str, Any]) -> dict[str, int]:
    problems, sizes = [], {}
    for name, size in given.items():
        try:
            sizes[name] = operator.index(size) if not isinstance(size, (bool, np.bool_)) else 0
        except TypeError:
            sizes[name] = 0
        if sizes[name] < 1 and sizes[name] != -1:
            problems.append(f"{name}={size!r}")
    if problems:
        raise ValueError(
            f"{', '.join(problems)}: the size of a mesh axis is a positive integer, "
            "or -1 for all the devices that are left. Leave an axis out to switch it off."
        )
    open_ends = [name for name, size in sizes.items() if size == -1]
    if len(open_ends) > 1:
        raise ValueError(
            f"{', '.join(f'{name}=-1' for name in open_ends)}: only one axis can take all the "
            "devices that are left. Give the other a size."
        )
    return sizes


def _valid_devices(devices: Any) -> list[Any]:
    devices = list(np.asarray(devices, dtype=object).flat)
    if not devices:
        raise ValueError(
            "devices is empty; a mesh needs at least one device. "
            "Leave it out to use jax.devices()."
        )
    strange = [d for d in devices if not (hasattr(d, "id") and hasattr(d, "process_index"))]
    if strange:
        raise TypeError(
            f"devices holds {', '.join(map(repr, strange))}, which is not a device. "
            "Give a sequence of devices, such as jax.devices()[:4]."
        )
    twice = [str(d) for d, times in Counter(devices).items() if times > 1]
    if twice:
        raise ValueError(
            f"devices holds {', '.join(twice)} more than once. Give each device once."
        )
    return devices


def _resolve(given: Mapping[str, int], count: int, own_devices: bool) -> dict[str, int]:
    """All six sizes, -1 filled in; their product is `count`."""
    fixed = math.prod(size for size in given.values() if size != -1)
    open_end = next((name for name, size in given.items() if size == -1), None)
    sizes = dict.fromkeys(AXES, 1) | dict(given)
    if open_end is not None and count % fixed == 0:
        sizes[open_end] = count // fixed
    elif open_end is not None or fixed != count:
        raise ValueError(_misfit(given, fixed, count, own_devices))
    return sizes


def _misfit(given: Mapping[str, int], fixed: int, count: int, own_devices: bool) -> str:
    product = " * ".join(f"{name}={size}" for name, size in given.items())
    there = "there is 1 device" if count == 1 else f"there are {count} devices"
    if -1 in given.values():
        text = f"{product}: {there}, and {count} does not divide by {fixed}"
    elif len(given) == 1:
        text = f"{product}, but {there}"
    else:
        text = f"{product} = {fixed}, but {there}"
    offers = _nearest(given, count)
    text += f"; nearest that work{'s' if len(offers) == 1 else ''}: {' or '.join(offers)}"
    if fixed < count and not own_devices and -1 not in given.values():
        text += f"; or use fewer devices: devices=jax.devices()[:{fixed}]"
    return text


def _nearest(given: Mapping[str, int], count: int) -> list[str]:
    """The two choices of sizes with the right product that change the least, by ratio."""
    names = [name for name in AXES if name in given or name == "data"]

    def distance(sizes: tuple[int, ...]) -> tuple[float, float]:
        change = {
            name: abs(math.log(size / given.get(name, 1)))
            for name, size in zip(names, sizes, strict=True)
            if given.get(name) != -1
        }
        of_given = sum(change[name] for name in given if name in change)
        # Rounded, so that equal changes are equal and the order of the names decides.
        return round(of_given, 9), round(sum(change.values()), 9)

    best = sorted(_factorizations(count, len(names)), key=distance)[:2]
    return [
        ", ".join(
            f"{name}={size}"
            for name, size in zip(names, sizes, strict=True)
            if size > 1 or name in given
        )
        for sizes in best
    ]


def _factorizations(number: int, parts: int) -> list[tuple[int, ...]]:
    """Every way to write `number` as an ordered product of `parts` factors."""
    if parts < 2:
        return [(number,)] if parts else [()] * (number == 1)
    return [
        (first, *rest)
        for first in range(number, 0, -1)
        if number % first == 0
        for rest in _factorizations(number // first, parts - 1)
    ]


def _arrange(
    sizes: Mapping[str, int], devices: Sequence[Any], slices: Slices | None
) -> np.ndarray:
    """The devices in an array with one dimension for each of `AXES`."""
    # Process and id, not the order given: the same devices always make the same mesh.
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    by_process = any(getattr(d, "slice_index", None) is None for d in devices)
    groups = Counter(d.process_index if by_process else d.slice_index for d in devices)
    if slices is None and not by_process and len(groups) > 1:
        slices = tuple(name for name in _PHYSICAL if sizes[name] > 1)
    try:
        if slices is None:
            array = _jaxapi.topology_mesh([sizes[name] for name in _PHYSICAL], devices)
        else:
            what = "process" if by_process else "slice"
            outer = _slices_per_axis(sizes, groups, slices, what)
            array = _jaxapi.hybrid_mesh(
                [sizes[name] // outer[name] for name in _PHYSICAL],
                [outer[name] for name in _PHYSICAL],
                devices,
                by_process=by_process,
            )
    except AssertionError as e:  # so JAX says it
        raise ValueError(
            f"The {len(devices)} TPU devices are not a box of the slice without holes, so they "
            "have no order in which neighbours are close. Choose a box with `devices=`, or "
            f"leave it out to use them all. JAX says: {e}"
        ) from None
    return array.transpose([_PHYSICAL.index(name) for name in AXES])


def _slices_per_axis(
    sizes: Mapping[str, int], groups: Mapping[int, int], slices: Slices, what: str
) -> dict[str, int]:
    """How many slices lie along each axis; their product is the number of slices."""
    if not isinstance(slices, Iterable):
        raise TypeError(
            f"slices={slices!r}: expected the name of an axis, several names, or a mapping "
            'from names to numbers of slices. Write slices={"data": 2}.'
        )
    names = [slices] if isinstance(slices, str) else list(slices)
    unknown = [name for name in names if name not in AXES]
    if unknown:
        raise ValueError(
            f"slices={slices!r} names {', '.join(map(repr, unknown))}, "
            f"but the axes are {', '.join(AXES)}."
        )
    plural = {"process": "processes", "slice": "slices"}[what]
    if len(set(groups.values())) > 1:
        uneven = ", ".join(f"{what} {g}: {n}" for g, n in sorted(groups.items()))
        raise ValueError(
            f"slices={slices!r} needs as many devices in each {what}, but there are "
            f"{uneven}. Choose the devices with `devices=`."
        )
    count = len(groups)

    def fitting(names: Sequence[str]) -> list[dict[str, int]]:
        return [
            dict(zip(names, outer, strict=True))
            for outer in _factorizations(count, len(names))
            if all(sizes[name] % n == 0 for name, n in zip(names, outer, strict=True))
        ]

    choices = fitting(names)
    if isinstance(slices, Mapping):
        choices = [choice for choice in choices if choice == dict(slices)]
    if not choices:
        there = ", ".join(f"{name}={sizes[name]}" for name in names) or "none named"
        offers = [{k: n for k, n in choice.items() if n > 1} for choice in fitting(_PHYSICAL)]
        if count == 1:
            offer = "leave `slices` out"
        elif offers:
            offer = f"slices={offers[0]!r} would fit"
        else:
            offer = f"none fit these sizes: give an axis a size that divides by {count}"
        raise ValueError(
            f"slices={slices!r} does not fit: there {'is 1' if count == 1 else f'are {count}'} "
            f"{what if count == 1 else plural}, so the numbers of slices along the axes must "
            f"have the product {count}, and each must divide the size of its axis ({there}); "
            f"{offer}."
        )
    return dict.fromkeys(AXES, 1) | choices[0]
