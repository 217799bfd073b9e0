"""Arrays from wherever they are to where they are asked to be."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from . import _blocks, _processes


def put(
    arrays: Sequence[Any],
    to: Sequence[Any],
    names: Callable[[], list[str]],
    *,
    share: bool = False,
    donate: bool = False,
    wait: bool = True,
) -> list[jax.Array]:
    """Arrays laid out as asked. `share` and `donate` as in `place` and `reshard`.

    Without `wait`, an array on one device is sliced there, which compiles a program for each
    shape, and NumPy arrays are always copied, so that nothing is waited for.
    """
    out: list[Any] = [None] * len(arrays)
    ways: dict[Any, list[int]] = {}
    for i, (x, s) in enumerate(zip(arrays, to, strict=True)):
        way = _way(x, s, share, wait)
        # One program cannot have arrays of different devices.
        together = getattr(s, "mesh", s) if way is _between_devices else None
        ways.setdefault((way, together), []).append(i)
    for (way, _), members in ways.items():
        parts = list(_blocks.groups([getattr(arrays[i], "nbytes", 8) for i in members]))
        for part in parts:
            chosen = [members[i] for i in part]
            xs, ss = [arrays[i] for i in chosen], [to[i] for i in chosen]
            done = way(xs, ss, lambda c=chosen: list(map(names().__getitem__, c)))
            for i, y in zip(chosen, done, strict=True):
                out[i] = y
            if donate or len(parts) > 1:
                jax.block_until_ready(done)
            for x in xs if donate else ():
                if isinstance(x, jax.Array):
                    x.delete()
    return out


def read(arrays: Sequence[Any]) -> list[np.ndarray]:
    """The whole values, in memory that the caller may change."""
    return [
        y if ours else np.array(y)
        for part in _blocks.groups([x.nbytes for x in arrays])
        for y, ours in _values([arrays[i] for i in part])
    ]


def _values(arrays: Sequence[Any]) -> list[tuple[np.ndarray, bool]]:
    """The whole values in host memory, and whether nobody else holds that memory."""
    apart = list(map(_blocks.is_apart, arrays))
    here = iter(_blocks.whole([x for x, a in zip(arrays, apart, strict=True) if not a]))
    there = iter(_processes.gather([x for x, a in zip(arrays, apart, strict=True) if a]))
    return [(next(there), True) if a else next(here) for a in apart]


def _way(x: Any, to: Any, share: bool, wait: bool) -> Callable:
    """Which of the functions below moves an array."""
    placed = isinstance(x, jax.Array)
    near = to.is_fully_addressable and (not placed or x.is_fully_addressable)
    if placed and x.sharding.is_equivalent_to(to, x.ndim):
        if share:
            return _as_it_is
        return _copied if near else _between_devices
    if (near and share) or not hasattr(x, "dtype"):
        return _as_it_is
    if near and not wait and placed and len(x.sharding.device_set) == 1:
        return _sliced
    if near and placed and x.weak_type:
        return _weak
    # On the CPU the host's memory is the device's, and no program need be compiled.
    if placed and _blocks.same_devices(x.sharding, to) and not (near and _blocks.on_cpu(to)):
        return _between_devices
    if not to.is_fully_addressable:
        return _by_hosts
    return _by_host if wait else _by_host_at_once


def _as_it_is(xs, to, names):
    # `device_put` would copy what other processes hold a part of.
    apart = [_blocks.is_apart(x) and x.sharding != s for x, s in zip(xs, to, strict=True)]
    rest = iter(
        jax.device_put(
            [x for x, a in zip(xs, apart, strict=True) if not a],
            [s for s, a in zip(to, apart, strict=True) if not a],
        )
    )
    return [
        _blocks.same_memory(x, s) if a else next(rest)
        for x, s, a in zip(xs, to, apart, strict=True)
    ]


def _copied(xs, to, names):
    return jax.device_put(xs, to, may_alias=False)


def _weak(xs, to, names):
    # Only `device_put` keeps the weak type, and only in place does it heed `may_alias`.
    return jax.device_put(jax.device_put(xs, to), to, may_alias=False)


def _sliced(xs, to, names):
    # A device that keeps the array whole would keep the argument's own memory.
    held = [i for i, (x, s) in enumerate(zip(xs, to, strict=True)) if _blocks.keeps_whole(x, s)]
    if held:
        copies = _copied([xs[i] for i in held], [xs[i].sharding for i in held], names)
        xs = list(xs)
        for i, x in zip(held, copies, strict=True):
            xs[i] = x
    return jax.device_put(xs, to)


def _between_devices(xs, to, names):
    moved = _blocks.on_devices(xs, to)
    if moved is not None:
        return moved
    return (_by_host if to[0].is_fully_addressable else _by_hosts)(xs, to, names)


def _by_host(xs, to, names):
    # Devices other than the CPU's have memory of their own, to which this is copied.
    done = jax.device_put(
        [
            x if ours or not _blocks.on_cpu(s) else _blocks.own(x)
            for (x, ours), s in zip(_values(xs), to, strict=True)
        ],
        to,
    )
    if not all(map(_blocks.on_cpu, to)):
        jax.block_until_ready(done)
    return done


def _by_host_at_once(xs, to, names):
    return jax.device_put([x if ours else _blocks.own(x) for x, ours in _values(xs)], to)


def _by_hosts(xs, to, names):
    _same_everywhere(xs, to, names)
    values = [x if ours else _blocks.own(x) for x, ours in _values(xs)]
    parts = [(x.shape, x.dtype, s, x.__getitem__) for x, s in zip(values, to, strict=True)]
    return _blocks.assemble(parts)


def _same_everywhere(xs, to, names) -> None:
    """Raises if processes are about to make one array from different values."""
    about: dict[tuple[int, ...], list[int]] = {}
    for i, (x, s) in enumerate(zip(xs, to, strict=True)):
        if not _blocks.is_apart(x):
            about.setdefault(tuple(_processes.processes_of(s)), []).append(i)
    for processes, members in about.items():
        sums = [_checksum(x) for x, _ in _blocks.whole([xs[i] for i in members])]
        called = lambda members=members: list(map(names().__getitem__, members))
        faults = _processes.disagreements("place", processes, [(c, c) for c in sums], called)
        if faults:
            raise ValueError(
                "All processes must place the same values together:\n"
                + "\n".join(faults)
                + "\nMake them from the same seed or file on every process, or give each "
                "process its own rows with meshdp.shard_batch."
            )


def _checksum(x: np.ndarray) -> str:
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return f"{x.dtype}{list(x.shape)} with checksum {zlib.crc32(data.data):08x}"
