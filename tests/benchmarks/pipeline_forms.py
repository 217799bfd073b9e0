"""Two ways to write a pipeline: `shard_map` + `ppermute`, and a shifted buffer.

    python tests/benchmarks/pipeline_forms.py        (about a minute; prints ratios)

The shifted buffer (GSPMD, Xu et al. 2021, section 3.3; also in praxis and MaxText) is an array
[stages, rows of a microbatch, ...] split over "stage". Each tick applies all stages at once by
`vmap` and rolls the buffer by one; the compiler's partitioner makes a collective-permute of the
roll. Both forms are GPipe with the stage under `jax.checkpoint`; both give gradients of the
same loss, compared here. The 8 devices share the machine's cores: a ratio of time is one of
work plus overhead.
"""

from functools import partial

from _timing import compare, header, in_turns, prepare

prepare()

import time  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import meshdp  # noqa: E402
from meshdp import _jaxapi, parallel  # noqa: E402
from meshdp.report._hlo import collectives, human_bytes  # noqa: E402

layers, width, hidden = 8, 128, 256
rows, tokens = 64, 32  # global batch
microbatches, rounds = 8, 20
BATCH = ("data", "fsdp")


def layer(w, x, _):
    # [layers, H.tensor, D]: both weights stored [out, in], as in Equinox.
    (h,) = parallel.columns(x, w["up"])
    return x + parallel.row(jnp.tanh(h), w["down"])


def ours(w, x, m):
    return parallel.pipeline(layer, w, x, microbatches=m)


def shifted(w, x, m):
    stages = jax.sharding.get_abstract_mesh().shape["stage"]
    hold = lax.with_sharding_constraint
    cut = P(None, BATCH)
    xs = hold(x.reshape(rows // m, m, tokens, width).swapaxes(0, 1), cut)
    w = jax.tree.map(lambda w: w.reshape(stages, -1, *w.shape[1:]), w)
    at = lambda buffer: hold(buffer, P("stage", BATCH))

    @jax.checkpoint
    def stage(w, x):
        return lax.scan(lambda x, w: (plain_layer(w, x), None), x, w)[0]

    def tick(buffer, t):
        buffer = at(buffer.at[0].set(xs[jnp.minimum(t, m - 1)]))
        y = at(jax.vmap(stage)(w, buffer))
        return at(jnp.roll(y, 1, axis=0)), y[-1]

    start = at(jnp.zeros((stages, *xs.shape[1:])))
    _, ys = lax.scan(tick, start, jnp.arange(m + stages - 1))
    return hold(ys[stages - 1 :].swapaxes(0, 1).reshape(x.shape), P(BATCH))


def plain_layer(w, x):
    # Megatron's two points are left to the partitioner, which sees the weights' layout.
    return x + jnp.tanh(x @ w["up"].T) @ w["down"].T


def program(form, mesh, m, w, x):
    specs = {"up": P("stage", "tensor"), "down": P("stage", None, "tensor")}
    places = jax.tree.map(partial(NamedSharding, mesh), (specs, P(BATCH)))

    def loss(w, x):
        with _jaxapi.tracing_mesh(mesh):
            return (form(w, x, m) ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, places[0]))
    args = jax.device_put((w, x), places)
    return step.lower(*args).compile(), args


def timer(compiled, args, length=2):
    def run():
        start = time.perf_counter()
        for _ in range(length):
            out = compiled(*args)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / length

    return run


def traffic(compiled, mesh):
    found = {}
    for c in collectives(compiled, mesh):
        key = f"{c.kind} over {'+'.join(c.axes)}"
        n, size = found.get(key, (0, 0))
        found[key] = n + (c.count or 0), size + (c.count or 0) * c.bytes
    return "; ".join(f"{n} {k} ({human_bytes(b)})" for k, (n, b) in sorted(found.items()))


def agree(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def main():
    print(header())
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32) / 16
    w = {"up": normal(layers, hidden, width), "down": normal(layers, width, hidden)}
    x = normal(rows, tokens, width)
    forms = {
        "shard_map + ppermute (ours)": ours,
        "shifted buffer": shifted,
    }
    meshes: list[dict[str, Any]] = [
        dict(stage=4, data=2),
        dict(stage=8),
        dict(data=2, stage=2, tensor=2),
    ]
    for sizes in meshes:
        mesh = meshdp.make_mesh(**sizes)
        print(f"\n{sizes}, {microbatches} microbatches")
        programs: Any = {
            name: program(form, mesh, microbatches, w, x) for name, form in forms.items()
        }
        want = None
        for name, (compiled, args) in programs.items():
            _, grads = compiled(*args)
            want = grads if want is None else want
            jax.tree.map(agree, grads, want)
            held = compiled.memory_analysis().temp_size_in_bytes
            print(f"  {name}: temporaries {human_bytes(held)} per device")
            print(f"    {traffic(compiled, mesh)}")
        times = in_turns({k: timer(*p) for k, p in programs.items()}, rounds)
        print(compare(times, "shard_map + ppermute (ours)"))


if __name__ == "__main__":
    main()
