"""Arrays as blocks in host memory, and the programs that move arrays between layouts."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

Block = tuple[slice, ...]

GROUP = 2**30
"""How many bytes of leaves, with their global shapes, are under way at once."""


def groups(sizes: Sequence[int], limit: int | None = None) -> Iterator[range]:
    """Consecutive ranges, each of sizes that add up to `limit` at most, or of one size."""
    limit = GROUP if limit is None else limit
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            yield range(start, i)
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """As `np.empty`, at an address from which the CPU backend need not copy (64 bytes)."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def own(x: np.ndarray) -> np.ndarray:
    """A copy that nobody else holds."""
    out = empty(x.shape, x.dtype)
    np.copyto(out, x)
    return out


def bounds(block: Block, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """A block as (start, stop) of each dimension: hashable, and without `None`."""
    return tuple(s.indices(n)[:2] for s, n in zip(block, shape, strict=True))


def slices(bounds: Sequence[tuple[int, int]]) -> Block:
    return tuple(slice(a, b) for a, b in bounds)


def shards(x: jax.Array) -> dict[tuple[tuple[int, int], ...], jax.Array]:
    """The different blocks of an array that lie on devices of this process."""
    out: dict[Any, jax.Array] = {}
    for s in x.addressable_shards:
        out.setdefault(bounds(s.index, x.shape), s.data)
    if not on_cpu(x.sharding):
        # An array keeps what was read from it in host memory for as long as it lives. These
        # are new array objects over the same memory, which live no longer than the reading.
        out = {block: same_memory(shard, shard.sharding) for block, shard in out.items()}
    return out


def same_memory(x: jax.Array, sharding: Any) -> jax.Array:
    """A new array object over the memory of `x`, with an equivalent sharding."""
    data = [s.data for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, data, dtype=x.dtype)


def is_apart(x: Any) -> bool:
    """Whether other processes hold a part of it."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def view(x: Any) -> np.ndarray:
    """One shard, or a host array, in host memory; may be the memory of `x` itself."""
    return jax.device_get(x) if isinstance(x, jax.Array) else np.asarray(x)


def start(found: Iterable[Mapping[Any, Any]]) -> None:
    """Lets all copies to the host run at once, where that takes time."""
    for blocks in found:
        for shard in blocks.values():
            if isinstance(shard, jax.Array) and not on_cpu(shard.sharding):
                shard.copy_to_host_async()


def fill(out: np.ndarray, found: Mapping[Any, jax.Array]) -> np.ndarray:
    """Puts blocks into their places in `out`."""
    for block, shard in found.items():
        out[slices(block)] = view(shard)
    return out


def whole(arrays: Sequence[Any]) -> list[tuple[np.ndarray, bool]]:
    """The whole values in host memory, and whether nobody else holds that memory.

    All of each must lie on devices of this process.
    """
    found = [shards(x) if isinstance(x, jax.Array) else {None: x} for x in arrays]
    start(found)
    return [
        (view(next(iter(f.values()))), False)
        if len(f) == 1
        else (fill(empty(x.shape, x.dtype), f), True)
        for x, f in zip(arrays, found, strict=True)
    ]


def on_cpu(sharding: Any) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


def assemble(
    parts: Sequence[tuple[Sequence[int], Any, NamedSharding, Callable[[Block], Any]]],
) -> list[jax.Array]:
    """Arrays of which each process gives its own part: `(shape, dtype, sharding, read)`.

    `read` maps a block of the whole to its value. It is `jax.make_array_from_callback` for many
    arrays at once, and an explicit transfer, which `jax.transfer_guard` allows.
    """
    pieces, where, counts = [], [], []
    for shape, _, to, read in parts:
        indices = to.addressable_devices_indices_map(tuple(shape))
        counts.append(len(indices))
        for device, index in indices.items():
            pieces.append(read(index or ()))
            where.append(SingleDeviceSharding(device, memory_kind=to.memory_kind))
    there = iter(jax.device_put(pieces, where))
    return [
        jax.make_array_from_single_device_arrays(
            tuple(shape),
            to,
            [next(there) for _ in range(n)],
            dtype=jax.dtypes.canonicalize_dtype(dtype),
        )
        for (shape, dtype, to, _), n in zip(parts, counts, strict=True)
    ]


def same_devices(a: Any, b: Any) -> bool:
    """Whether one program can have arrays of both shardings: the same devices in one order."""
    return (
        isinstance(a, NamedSharding)
        and isinstance(b, NamedSharding)
        and _same_order(a.mesh, b.mesh)
    )


@functools.lru_cache(maxsize=64)
def _same_order(a: Any, b: Any) -> bool:
    return list(np.ravel(a.devices)) == list(np.ravel(b.devices))


def on_devices(arrays: Sequence[jax.Array], to: Sequence[NamedSharding]) -> list | None:
    """New arrays laid out as asked, made by collectives between the same devices.

    Returns `None` where the compiler would need more scratch memory than the arrays
    themselves: it replicates an array whose two layouts it cannot connect.
    """
    given = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)
        for x in arrays
    )
    program = _mover(given, tuple(to))
    return None if program is None else list(program(*arrays))


@functools.lru_cache(maxsize=64)
def _mover(given, to):
    jitted = jax.jit(_copy, out_shardings=to)
    program = jitted.lower(*given).compile()
    used = program.memory_analysis()
    if used is not None:
        least = used.argument_size_in_bytes + used.output_size_in_bytes
        # Programs on several hosts must agree, and they do: this is the same everywhere.
        if used.temp_size_in_bytes > least:
            return None
    return program


def _copy(*arrays):
    return tuple(map(jnp.copy, arrays))


def keeps_whole(x: jax.Array, to: Any) -> bool:
    """Whether a device of one-device array `x` holds all of it afterwards too, in which case
    `jax.device_put` may hand it the same memory, whatever `may_alias` says."""
    return to.shard_shape(x.shape) == x.shape and not x.sharding.device_set.isdisjoint(
        to.device_set
    )
