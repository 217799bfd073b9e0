"""Lower bounds of the time of a step, and what more devices would do to it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from meshdp.report._devices import Device
from meshdp.report._hlo import Collective, ring_bytes
from meshdp.report._work import Work

BOUNDS = ("compute", "memory", "communication")
# Collectives over these carry parameters and gradients, whose size does not change with the
# batch; those over any other axis carry activations, whose size does.
_OF_PARAMETERS = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class Bound:
    """No step of this program can be faster than the longest of the three, in seconds."""

    compute: float
    """Flops over the peak."""

    memory: float
    """Bytes moved over the memory bandwidth."""

    communication: float
    """Bytes sent over the links or the network, and one latency a hop of a tree."""

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.communication)

    @property
    def by(self) -> str:
        """Which of the three it is."""
        return max(BOUNDS, key=lambda name: getattr(self, name))


def bound(
    work: Work,
    found: Sequence[Collective],
    device: Device,
    slow: Sequence[str] = (),
) -> Bound:
    """The time that one call needs at least; loops of unknown length count once.

    The three are assumed to overlap perfectly. `slow`: axes whose traffic takes the network.
    """
    return Bound(
        compute=work.flops / device.flops,
        memory=work.memory_bytes / device.memory,
        communication=sum(seconds_of(c, device, slow) for c in found),
    )


def seconds_of(c: Collective, device: Device, slow: Sequence[str] = ()) -> float:
    """The time that a collective needs at least, all its executions together."""
    speed = device.network if set(c.axes) & set(slow) else device.link
    hops = math.ceil(math.log2(max(2, c.group_size)))
    latency = 0.0 if c.part else hops * device.latency
    count = 1 if c.count is None else c.count
    return count * (c.sent_bytes / speed + latency)


def utilisation(work: Work, device: Device, seconds: float) -> float:
    """Model flops utilisation: useful matrix flops of a step over the peak, as a fraction.

    `seconds` is a measured step time. Flops that `jax.checkpoint` repeats are not useful.
    """
    if seconds <= 0:
        raise ValueError(f"`seconds` must be a measured time above 0; got {seconds}.")
    return (work.matmul_flops - work.recomputed_flops) / (device.flops * seconds)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Predicted times with `devices` devices, in seconds."""

    devices: int

    weak: Bound
    """The batch of each device stays."""

    strong: Bound
    """The global batch stays."""

    weak_efficiency: float
    """Examples per second and device, over those of the mesh at hand."""

    strong_efficiency: float

    @property
    def communication_leads(self) -> bool:
        """Whether communication bounds the weakly scaled step."""
        return self.weak.by == "communication"


def scaling(
    work: Work,
    found: Sequence[Collective],
    device: Device,
    mesh_sizes: Mapping[str, int],
    *,
    axis: str | None = None,
    slow: Sequence[str] = (),
    devices: Sequence[int] = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
) -> tuple[Scaled, ...]:
    """Predicts the step on more devices, by making one mesh axis longer.

    `axis` is "data" if it is longer than 1, else "fsdp", else the longest axis. Predicted
    from this program alone: collectives over the axis keep the size of the whole (parameters
    and gradients), other axes stay as they are. With the global batch kept, work and the
    activations that the other axes carry shrink; parameters do not. Beyond an island of fast
    links the longer axis takes the network. A number of devices that the other axes do not
    divide is left out.
    """
    axis = axis or scaled_axis(mesh_sizes)
    now = mesh_sizes[axis]
    others = math.prod(mesh_sizes.values()) // now
    rows = []
    here = bound(work, found, device, slow)
    for total in devices:
        if total % others:
            continue
        n = total // others
        changed = [_resized(c, axis, now, n) for c in found]
        beyond = device.island is not None and total > device.island
        reach = (*slow, axis) if beyond else slow
        weak = bound(work, changed, device, reach)
        shrink = now / n
        fewer = [
            c if set(c.axes) & set(_OF_PARAMETERS) else _scaled(c, shrink) for c in changed
        ]
        less = Bound(here.compute * shrink, here.memory * shrink, 0.0)
        talk = sum(seconds_of(c, device, reach) for c in fewer)
        strong = Bound(less.compute, less.memory, talk)
        rows.append(
            Scaled(
                devices=total,
                weak=weak,
                strong=strong,
                weak_efficiency=_ratio(here.seconds, weak.seconds),
                strong_efficiency=_ratio(here.seconds * shrink, strong.seconds),
            )
        )
    return tuple(rows)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0


def scaled_axis(mesh_sizes: Mapping[str, int]) -> str:
    """The axis that `scaling` makes longer when none is named."""
    for name in ("data", "fsdp"):
        if mesh_sizes.get(name, 1) > 1:
            return name
    return max(mesh_sizes, key=lambda name: mesh_sizes[name])


def _resized(c: Collective, axis: str, now: int, n: int) -> Collective:
    """A collective over `axis` after that axis went from `now` to `n` devices."""
    if axis not in c.axes:
        return c
    if c.kind == "collective-permute":
        return c
    group = max(1, c.group_size * n // now)
    # What is gathered keeps its whole size, so each device brings a smaller share.
    operand = c.bytes * now // n if c.kind == "all-gather" else c.bytes
    sent = ring_bytes(c.kind, operand, group)
    return dataclasses.replace(c, bytes=operand, group_size=group, sent_bytes=sent)


def _scaled(c: Collective, by: float) -> Collective:
    return dataclasses.replace(c, bytes=int(c.bytes * by), sent_bytes=int(c.sent_bytes * by))


def takeover(rows: Sequence[Scaled]) -> int | None:
    """The smallest number of devices at which communication bounds the weakly scaled step."""
    return next((r.devices for r in rows if r.communication_leads), None)
