"""What each schedule of a pipeline holds, computes and takes, beside 1F1B.

    python tests/benchmarks/pipeline_schedules.py        (about a minute; prints ratios)

Temporaries and flops are per device, read from the compiled programs; the predicted ratio of
time counts equal ticks of work: forward, forward anew, backward for inputs, for weights. The 4
devices share the machine's cores, so that a ratio of time is one of work plus overhead, bubble
included: there the devices compute too.
"""

from _timing import header, in_turns, prepare

prepare(4)

import time  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import meshdp  # noqa: E402
from meshdp import _jaxapi  # noqa: E402
from meshdp.parallel import bubble, pipeline, pipeline_loss  # noqa: E402

layers, stages, microbatches, rounds = 8, 4, 8, 12
HAND = meshdp.Device(kind="hand", flops=1e12, memory=1e11, link=1e10, network=1e9)
ONE = "1F1B"
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "GPipe": (False, {}),
    "GPipe, keeping all": (False, dict(remat=False)),
    "circular, v=2": (False, dict(repeats=2)),
    ONE: (True, {}),
    "1F1B, keeping all": (True, dict(remat=False)),
    "1F1B, v=2": (True, dict(repeats=2)),
    "zero bubble": (True, dict(zero_bubble=True)),
    "zero bubble, keeping all": (True, dict(zero_bubble=True, remat=False)),
    "zero bubble, v=2": (True, dict(zero_bubble=True, repeats=2)),
}


def layer(w, x, _):
    return x + jnp.tanh(x @ w["up"].T) @ w["down"].T


def program(mesh, turns_back, options, w, x):
    v = options.get("repeats", 1)
    lead = P("stage") if v == 1 else P(None, "stage")
    w = jax.tree.map(lambda w: w if v == 1 else w.reshape(v, -1, *w.shape[1:]), w)

    def loss(w, x):
        with _jaxapi.tracing_mesh(mesh):
            if not turns_back:
                y = pipeline(layer, w, x, microbatches=microbatches, **options)
                return (y * y).sum()
            first = lambda _, b: b
            last = lambda _, x, b: meshdp.Mean.of((x * x).sum(-1))
            params = ((), w, ())
            sizes: Any = dict(microbatches=microbatches, **options)
            return pipeline_loss(first, layer, last, params, x, **sizes).total

    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    args = put(w, lead), put(x, P())
    return jax.jit(jax.grad(loss)).lower(*args).compile(), args


def timer(compiled, args):
    def run():
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        return time.perf_counter() - start

    return run


def predicted(turns_back, options):
    """Ticks of work over those without a bubble and with remat."""
    work = (4 if options.get("remat", True) else 3) / 4
    return work / (1 - bubble(stages, microbatches, **options))


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32) / 16


def main():
    print(header())
    mesh = meshdp.make_mesh(stage=stages)
    for width, rows, tokens in ((256, 32, 16), (768, 32, 16)):
        print(f"\nwidth {width}, {rows} rows of {tokens} tokens, {microbatches} microbatches")
        w = {k: normal(layers, width, width) for k in ("up", "down")}
        x = normal(rows, tokens, width)
        programs: Any = {n: program(mesh, *case, w, x) for n, case in CASES.items()}
        reports = {
            n: meshdp.report_compiled(p[0], mesh, device=HAND) for n, p in programs.items()
        }
        want = jax.tree.map(np.asarray, programs[ONE][0](*programs[ONE][1]))
        for name, (compiled, args) in programs.items():
            got = compiled(*args)
            jax.tree.map(
                lambda g, w: np.testing.assert_allclose(
                    np.reshape(g, w.shape), w, rtol=1e-4, atol=1e-5 * np.abs(w).max()
                ),
                got,
                want,
            )
            ours, one = reports[name], reports[ONE]
            print(
                f"  {name:24}  temporaries {(ours.memory.temp_bytes or 0) / 1e6:5.1f} MB"
                f"   flops {ours.work.flops / one.work.flops:.2f} of {ONE}'s"
                f"   predicted {predicted(*CASES[name]) / predicted(*CASES[ONE]):.2f}"
            )
        times = in_turns({n: timer(*p) for n, p in programs.items()}, rounds)
        for name, seconds in times.items():
            p10, p50, p90 = np.percentile(np.divide(seconds, times[ONE]), (10, 50, 90))
            print(f"  {name:24}  time {p50:.2f} of {ONE}'s (p10 {p10:.2f}, p90 {p90:.2f})")


if __name__ == "__main__":
    main()
