"""Reading one replica of 100 leaves: `compat.unreplicate` against `tree_map(lambda x: x[0])`.

Run: python tests/benchmarks/compat_unreplicate.py     (about 10 seconds; prints a ratio)
"""

import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import compat  # noqa: E402

leaves, repeats = 100, 15


def timed(f, tree) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f(tree))
    return time.perf_counter() - start


def main() -> None:
    print(f"jax {jax.__version__}, {jax.device_count()} × {jax.devices()[0].device_kind}")
    state = {f"w{i}": np.zeros((8, 64, 64), np.float32) for i in range(leaves)}
    state = jax.pmap(lambda t: t)(state)
    ours = compat.unreplicate
    theirs = lambda tree: jax.tree.map(lambda x: x[0], tree)
    for f in (ours, theirs):
        timed(f, state)
    pairs = [(timed(ours, state), timed(theirs, state)) for _ in range(repeats)]
    p10, p50, p90 = np.percentile([b / a for a, b in pairs], (10, 50, 90))
    ms = [1e3 * np.median(t) for t in zip(*pairs, strict=True)]
    print(f"{leaves} leaves: unreplicate {ms[0]:.2f} ms, x[0] {ms[1]:.1f} ms")
    print(f"times faster: {p50:.0f} (p10 {p10:.0f}, p90 {p90:.0f})")


if __name__ == "__main__":
    main()
