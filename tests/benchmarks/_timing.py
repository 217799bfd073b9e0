"""What every timing here shares: settings for the process, and ratios taken in turns."""

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# glibc gives freed blocks back to the kernel, and the page faults of the next step cost a
# quarter of it. The same setting for all forms, so that they are compared and not it.
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


def prepare(devices: int = 8) -> None:
    """Settles allocator, import path and devices; call it before anything imports JAX.

    The allocator reads its settings when a process starts, so this one starts again.
    """
    if any(os.environ.get(k) != v for k, v in MALLOC.items()):
        os.environ.update(MALLOC)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "examples")]
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def header() -> str:
    """The versions and the machine, without which no figure means anything."""
    import jax

    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    kind, count = jax.devices()[0].device_kind, jax.device_count()
    return (
        f"jax {jax.__version__}, Python {platform.python_version()}; {count} {kind} devices on "
        f"{os.cpu_count()} cores ({cpu})"
    )


class Chain:
    """A donating step and its state, timed as a chain: a step eats what it is given."""

    def __init__(self, step: Callable, state: Any, batch: Any, length: int):
        self.step, self.state, self.batch, self.length = step, state, batch, length
        self.last: Any = None

    def __call__(self) -> float:
        """Runs the next `length` steps and returns the seconds per step."""
        import jax

        start = time.perf_counter()
        for _ in range(self.length):
            self.state, self.last = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, self.last))
        return (time.perf_counter() - start) / self.length


def in_turns(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case in each round, after a round to compile and one to settle.

    The order is reversed every second round, so that none always follows the same one.
    """
    for _ in range(2):
        for case in cases.values():
            case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds):
        for name in list(cases)[:: -1 if i % 2 else 1]:
            times[name].append(cases[name]())
    return times


def compare(times: Mapping[str, list[float]], ours: str) -> str:
    """A line per case: milliseconds, and the ratio of `ours` to it, taken round by round."""
    import numpy as np

    width = max(map(len, times))
    lines = []
    for name, seconds in times.items():
        line = f"  {name:{width}}  {np.median(seconds) * 1e3:8.2f} ms"
        if name != ours:
            pairs = np.array(times[ours]) / np.array(seconds)
            p10, p50, p90 = np.percentile(pairs, (10, 50, 90))
            line += f"   ours / this: {p50:.2f} (p10 {p10:.2f}, p90 {p90:.2f})"
        lines.append(line)
    return "\n".join(lines)
