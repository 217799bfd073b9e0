"""What pipeline, ring attention and experts cost beside plain forms of the same work.

    python tests/benchmarks/parallel_speed.py        (about a minute; prints ratios)
    python tests/benchmarks/parallel_speed.py rings  (or pipelines, or mixtures)

On 8 forced CPU devices, which share the machine's cores: a ratio of time is one of work plus
overhead, not of what 8 devices would take. All are of gradients, in pairs, one of each in turn.

- Pipelines beside the sequential step on the same devices (the batch over all of them). In the
  bubble the devices compute too, so the predicted ratio is 1 / (1 - bubble).
- Rings beside attention with the heads over the devices and no ring: JAX's, which keeps the
  scores, and our own, which does the same work as the ring.
- Experts beside one dense layer as wide as the top_k experts of a token. A capacity of 1.25
  computes a quarter more by choice, and dropless experts compute the forward pass once more in
  the backward pass, a third.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[2]))
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import meshdp  # noqa: E402
from meshdp import _jaxapi, parallel  # noqa: E402

seconds = 2.0  # for each comparison


def on(mesh, f, specs, args):
    """`f` compiled on a mesh, and its arguments in place."""

    def traced(*args):
        with _jaxapi.tracing_mesh(mesh):
            return f(*args)

    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return jax.jit(traced), [put(x, s) for x, s in zip(args, specs, strict=True)]


def timed(f, args) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    return time.perf_counter() - start


def compare(name, ours, theirs, note="") -> None:
    for f, args in (ours, theirs):
        for _ in range(2):
            timed(f, args)
    ratios, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(ratios) < 5:
        ratios.append(timed(*ours) / timed(*theirs))
    p10, p50, p90 = np.percentile(ratios, (10, 50, 90))
    print(f"{name}: {p50:.2f} (p10 {p10:.2f}, p90 {p90:.2f}) {note}", flush=True)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def pipelines() -> None:
    layers, x = normal(8, 256, 256) / 16, normal(64, 64, 256)
    layer = lambda w, x, _: x + jnp.tanh(x @ w)

    def grads(microbatches, repeats):
        def loss(w, x):
            y = parallel.pipeline(layer, w, x, microbatches=microbatches, repeats=repeats)
            return (y * y).sum()

        return jax.grad(loss)

    plain = on(meshdp.make_mesh(data=8), grads(8, 1), (P(), P(("data", "fsdp"))), (layers, x))
    mesh = meshdp.make_mesh(stage=4, data=2)
    for m, v in ((4, 1), (16, 1), (4, 2)):
        w = layers if v == 1 else layers.reshape(v, -1, 256, 256)
        spec = P("stage") if v == 1 else P(None, "stage")
        ours = on(mesh, grads(m, v), (spec, P(("data", "fsdp"))), (w, x))
        idle = parallel.bubble(4, m, v)
        note = f"predicted {1 / (1 - idle):.2f} from a bubble of {idle:.2f}"
        compare(f"pipeline stage=4, m={m}, v={v} / data parallel", ours, plain, note)


def rings() -> None:
    q = normal(1, 1024, 8, 32)
    spec = P(("data", "fsdp"), "seq")
    for causal, order in ((False, "natural"), (True, "natural"), (True, "zigzag")):

        def ours(q, causal=causal, order=order):
            f = lambda q: (parallel.attention(q, q, q, causal=causal, order=order) ** 2).sum()
            return jax.grad(f)(q)

        def still(q, causal=causal):
            f = lambda q: (parallel.attention(q, q, q, causal=causal) ** 2).sum()
            return jax.grad(f)(q)

        def plain(q, causal=causal):
            f = lambda q: (jax.nn.dot_product_attention(q, q, q, is_causal=causal) ** 2).sum()
            return jax.grad(f)(q)

        ring = on(meshdp.make_mesh(seq=8), ours, (spec,), (q,))
        others = {"jax.nn.dot_product_attention": plain, "ours without a ring": still}
        for name, f in others.items():
            heads = on(meshdp.make_mesh(tensor=8), f, (P(None, None, "tensor"),), (q,))
            compare(f"ring of 8, causal={causal}, {order} / {name}", ring, heads)


def mixtures() -> None:
    width, hidden, count, k = 256, 1024, 8, 2
    x, router = normal(8, 256, width), normal(width, count)
    up, down = normal(count, width, hidden) / 12, normal(count, hidden, width) / 16
    f = lambda w, x, rows: rows.dot(jnp.tanh(rows.dot(x, w["up"])), w["down"])

    def ours(up, down, x, capacity):
        def loss(up, down, x):
            routing = parallel.route(x @ router, k)
            y, _ = parallel.experts(f, {"up": up, "down": down}, x, routing, capacity=capacity)
            return (y * y).sum()

        return jax.grad(loss, (0, 1, 2))(up, down, x)

    def dense(up, down, x):  # the same active flops: k experts' width for every token
        loss = lambda up, down, x: ((jnp.tanh(x @ up) @ down) ** 2).sum()
        return jax.grad(loss, (0, 1, 2))(up, down, x)

    batch = P(("data", "fsdp"))
    wide = (np.hstack(up[:k]), np.vstack(down[:k]))
    plain = on(meshdp.make_mesh(data=8), dense, (P(), P(), batch), (*wide, x))
    mesh = meshdp.make_mesh(data=2, expert=4)
    for capacity in (1.0, 1.25, None):
        run = lambda up, down, x, c=capacity: ours(up, down, x, c)
        moe = on(mesh, run, (P("expert"), P("expert"), batch), (up, down, x))
        compare(f"experts, capacity {capacity} / dense of equal active flops", moe, plain)


def main() -> None:
    print(f"jax {jax.__version__}, {jax.device_count()} × {jax.devices()[0].device_kind}")
    parts = {"pipelines": pipelines, "rings": rings, "mixtures": mixtures}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
