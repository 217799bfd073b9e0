"""What kinds of device can do at most, and what this CPU does when asked."""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshdp._jaxapi import shard_map, with_no_mesh_set


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """The speeds of one device. All are peaks, so times from them are lower bounds.

    Give your own with `Device(kind="mine", flops=..., memory=..., link=..., network=...)`.
    """

    kind: str

    flops: float
    """Floating-point operations per second, in the fastest type for training (bfloat16)."""

    memory: float
    """Bytes per second between the device and its own memory."""

    link: float
    """Bytes per second that a device sends to its neighbours over fast links, all together."""

    network: float
    """Bytes per second that a device sends between hosts or slices."""

    island: int | None = None
    """How many devices share fast links (a host of GPUs, a slice of TPUs); a mesh axis that
    reaches further takes the network. `None`: all of them."""

    latency: float = 2e-6
    """Seconds for one hop of a collective."""

    memory_bytes: int | None = None
    """How much one device holds."""

    measured: bool = False
    """Whether the speeds were measured here, not read from a data sheet."""


# From the makers' public data sheets: dense bfloat16 peak, memory bandwidth, bandwidth of all
# links in one direction. `network`: one 400 Gbit/s port for each GPU (200 for A100, 100 for
# V100); for TPU the data-centre network of a host, shared by its chips. V100 has no bfloat16:
# its float16 peak stands in.
_TABLE = (
    # kind, flop/s, memory GB/s, links GB/s, network GB/s, bytes held, island
    ("TPU v2", 22.5e12, 350, 62, 3, 8 * 2**30, 512),
    ("TPU v3", 61.5e12, 450, 82, 3, 16 * 2**30, 1024),
    ("TPU v4", 275e12, 1228, 300, 6.25, 32 * 2**30, 4096),
    ("TPU v5 lite", 197e12, 819, 200, 6.25, 16 * 2**30, 256),
    ("TPU v5p", 459e12, 2765, 600, 6.25, 95 * 2**30, 8960),
    ("TPU v6 lite", 918e12, 1640, 448, 12.5, 32 * 2**30, 256),
    ("V100", 125e12, 900, 150, 12.5, 32 * 2**30, 8),
    ("A100", 312e12, 2039, 300, 25, 80 * 2**30, 8),
    ("H100", 989e12, 3350, 450, 50, 80 * 2**30, 8),
    ("H200", 989e12, 4800, 450, 50, 141 * 10**9, 8),
    ("B200", 2250e12, 8000, 900, 50, 180 * 10**9, 8),
)
DEVICES: dict[str, Device] = {
    kind: Device(
        kind=kind,
        flops=f,
        memory=m * 1e9,
        link=l * 1e9,
        network=n * 1e9,
        island=island,
        memory_bytes=held,
    )
    for kind, f, m, l, n, held, island in _TABLE
}


def find_device(kind: str) -> Device | None:
    """The table's entry for a `device_kind` such as "NVIDIA H100 80GB HBM3", if any."""
    aliases = {"TPU v5e": "TPU v5 lite", "TPU v6e": "TPU v6 lite", "TPU v5": "TPU v5p"}
    kind = aliases.get(kind, kind)
    names = sorted(DEVICES, key=len, reverse=True)
    return next((DEVICES[name] for name in names if name.lower() in kind.lower()), None)


def slow_axes(mesh: Any) -> tuple[str, ...]:
    """Axes along which neighbours are on different hosts (of a TPU: different slices).

    Talking along these goes over the network. Empty for a mesh without real devices.
    """
    if not isinstance(mesh, Mesh):
        return ()
    where = np.vectorize(_island, otypes=[int])(mesh.devices)
    found = []
    for k, name in enumerate(mesh.axis_names):
        first = np.take(where, [0], axis=k)
        if (where != first).any():
            found.append(str(name))
    return tuple(found)


def _island(device: Any) -> int:
    of_slice = getattr(device, "slice_index", None)
    return device.process_index if of_slice is None else of_slice


def measure(mesh: Mesh) -> Device:
    """Measures all devices of a mesh working together: about a second on a CPU. Where the
    mesh spans several processes, all of them must call this together.

    Forced CPU devices share the same cores and memory, so each gets its share of them.
    Times are to be lower bounds, so speeds must not be too low: each operation is repeated
    inside one program, its data fits into a cache, and the best of several runs stands.
    """
    names, n = tuple(mesh.axis_names), mesh.size
    side, long, large, times = 384, 2**15, 2**18, 16
    split = NamedSharding(mesh, P(names))
    put = lambda *shape: jax.jit(
        lambda: jnp.ones((n, *shape), jnp.float32), out_shardings=split
    )()
    again = lambda f, a, k=times: jax.lax.fori_loop(0, k, lambda _, c: f(c), a)

    def seconds(f, *shape):
        over = shard_map(f, mesh=mesh, in_specs=P(names), out_specs=P(names))
        return best_time(jax.jit(over), put(*shape))

    mean = lambda c: jax.lax.psum(c, names) / n
    square = seconds(lambda a: again(lambda c: c @ a[0] * 0.5, a[0], 4)[None], side, side)
    memory = 8 * long * times / seconds(lambda a: again(lambda c: c + 1, a), long)
    link, latency = memory, 0.0
    if n > 1:
        sent = 2 * (n - 1) * 4 * large // n
        link = sent * times / seconds(lambda a: again(mean, a), large)
        hops = math.ceil(math.log2(n))
        latency = seconds(lambda a: again(mean, a), 1) / times / hops
    return Device(
        kind=mesh.devices.flat[0].device_kind,
        flops=4 * 2 * side**3 / square,
        memory=memory,
        link=link,
        network=link,
        latency=latency,
        measured=True,
    )


def best_time(f: Any, *args: Any, repeats: int = 7) -> float:
    """Seconds of the fastest of several calls, after one that compiles."""
    jax.block_until_ready(f(*args))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        best = min(best, time.perf_counter() - start)
    return best


@with_no_mesh_set
def device_of(mesh: Any) -> Device | None:
    """The table's entry for a mesh; measured on CPU; `None` where nothing is known."""
    if not isinstance(mesh, Mesh):
        return None
    first = mesh.devices.flat[0]
    if first.platform == "cpu":
        return measure(mesh)
    return find_device(first.device_kind)
