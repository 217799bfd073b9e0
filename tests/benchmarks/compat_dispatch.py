"""What a call costs when its arguments are in place: ours, `jax.pmap`, bare `jit(shard_map)`.

Run: python tests/benchmarks/compat_dispatch.py        (about a minute; prints ratios)
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

leaf_counts = (1, 10, 100, 500)
seconds = 12.0  # for all the rounds of one count of leaves
mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
P = jax.sharding.PartitionSpec


def step(state):
    return jax.tree.map(lambda x: x + 1, state)


def chain(f, state, n: int) -> float:
    """Seconds per call of `n` calls, each on the result of the one before."""
    start = time.perf_counter()
    for _ in range(n):
        state = f(state)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / n


def main() -> None:
    print(f"jax {jax.__version__}, {jax.device_count()} × {jax.devices()[0].device_kind}")
    forms = {
        "compat.pmap": compat.pmap(step, "batch"),
        "jax.pmap": jax.pmap(step, "batch"),
        "jit(shard_map)": jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), check_vma=False
            )
        ),
    }
    for count in leaf_counts:
        state = {f"w{i}": np.zeros((8, 4), np.float32) for i in range(count)}
        states = {name: f(f(state)) for name, f in forms.items()}
        n = max(2, 200 // count)
        for name, f in forms.items():
            chain(f, states[name], n)
        times: dict[str, list[float]] = {name: [] for name in forms}
        end = time.perf_counter() + seconds
        order = list(forms)
        while time.perf_counter() < end:
            for name in order:
                times[name].append(chain(forms[name], states[name], n))
            order = order[1:] + order[:1]  # no form always runs after the same other
        ours = np.array(times["compat.pmap"])
        print(f"{count:4d} leaves: {1e6 * np.median(ours):7.0f} us a call", end="")
        for name in ("jax.pmap", "jit(shard_map)"):
            ratios = ours / np.array(times[name])
            p10, p50, p90 = np.percentile(ratios, (10, 50, 90))
            medians = np.median(ours) / np.median(times[name])
            print(
                f"  | / {name}: {p50:.3f} (p10 {p10:.2f}, p90 {p90:.2f}; {medians:.3f})", end=""
            )
        print()


if __name__ == "__main__":
    main()
