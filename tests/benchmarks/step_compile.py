"""Compile time of the demo's step on 8 and 64 forced devices, and `specs` for 10 000 leaves.

    python tests/benchmarks/step_compile.py        (about a minute)

Meshes of data alone and of data x fsdp x tensor. Nothing runs on the 64 devices.
"""

import subprocess
import sys
import time

from _timing import header, prepare

prepare(int(sys.argv[1]) if len(sys.argv) > 1 else 8)

import equinox as eqx  # noqa: E402
import gpt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import meshdp  # noqa: E402

rows_per_device = 4
repeats = 5
optimizer = optax.adam(1e-3)


def compile_step(**sizes: int) -> str:
    mesh = meshdp.make_mesh(**sizes)
    step = meshdp.make_train_step(
        gpt.loss_fn, optimizer, mesh=mesh, layout=gpt.LAYOUT, accumulate=2
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    model = eqx.filter_eval_shape(gpt.GPT, key)
    opt_state = eqx.filter_eval_shape(optimizer.init, model)
    state = meshdp.TrainState(model, opt_state, jax.ShapeDtypeStruct((), jnp.int32), key)
    rows = rows_per_device * mesh.devices.size
    batch = jax.ShapeDtypeStruct((rows, 129), jnp.int32)
    start = time.perf_counter()
    lowered = step.lower(state, batch)
    middle = time.perf_counter()
    lowered.compile()
    end = time.perf_counter()
    used = " x ".join(f"{a}={n}" for a, n in sizes.items())
    return f"  {used}: traced in {middle - start:.1f} s, compiled in {end - middle:.1f} s"


def specs_of(leaves: int) -> float:
    """Seconds to lay out a tree of that many leaves on a mesh of 4096 devices."""
    shapes = {
        f"layer{i}": {
            k: jax.ShapeDtypeStruct(s, np.float32)
            for k, s in {"up": (4096, 1024), "down": (1024, 4096), "b": (4096,)}.items()
        }
        for i in range(leaves // 3)
    }
    layout = meshdp.by_path({"up": jax.P("tensor"), "down": jax.P(None, "tensor")})
    start = time.perf_counter()
    meshdp.specs(shapes, layout | meshdp.fsdp(), {"data": 8, "fsdp": 64, "tensor": 8})
    return time.perf_counter() - start


def main() -> None:
    print(header())
    n = jax.device_count()
    print(f"the demo's step on {n} devices:")
    print(compile_step(data=n))
    print(compile_step(data=n // 4, fsdp=2, tensor=2), flush=True)
    if len(sys.argv) == 1:
        times = sorted(specs_of(10_000) for _ in range(repeats))
        print(f"specs of 10 000 leaves: {times[repeats // 2] * 1e3:.0f} ms", flush=True)
        subprocess.run([sys.executable, __file__, "64"], check=True)


if __name__ == "__main__":
    main()
