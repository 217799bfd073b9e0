"""Prints how long it takes to read a compiled program, per 50,000 lines of HLO.

    python tests/benchmarks/report_parse.py

The program is compiled here: a network unrolled until its text is long, on 8 CPU devices.
"""

import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

LAYERS = 700


def unrolled(x):
    for _ in range(LAYERS):
        x = lax.psum(jnp.sin(jnp.tanh(x) @ x.T @ x), "data") + lax.rsqrt(jnp.abs(x) + 1)
    return x


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from meshdp.report._hlo import collectives

    mesh = jax.make_mesh((8,), ("data",))
    step = jax.shard_map(unrolled, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    text = jax.jit(step).lower(jnp.ones((16, 16))).compile().as_text()
    lines = text.count("\n")
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        found = collectives(text, mesh)
        seconds.append((time.perf_counter() - start) * 50_000 / lines)
    seconds.sort()
    print(f"jax {jax.__version__}, {lines} lines, {len(found)} collectives")
    low, middle, high = seconds[0], seconds[2], seconds[-1]
    print(f"seconds per 50,000 lines: {middle:.2f} (min {low:.2f}, max {high:.2f})")


if __name__ == "__main__":
    main()
