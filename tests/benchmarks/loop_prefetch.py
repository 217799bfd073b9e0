"""How much of a slow loader's time `prefetch` hides behind the steps, and what `fit` adds.

    python tests/benchmarks/loop_prefetch.py

Pairs of runs, one that loads when the step asks and one that loads ahead, on 8 CPU devices; the
loader sleeps as long as a step takes. The least possible ratio is 0.5. Then the same steps by
`fit` and by a bare loop that never reads a result.
"""

import time

import jax
import numpy as np
import optax

import meshdp
from meshdp._place import place, shard_batch, to_host
from meshdp.loop import fit, prefetch
from meshdp.testing import force_devices

STEPS, REPEATS, WIDTH, ROWS = 30, 7, 256, 512


def loss_fn(model, batch, keys):
    h = batch["x"]
    for w in model:
        h = jax.numpy.tanh(h @ w)
    return meshdp.Mean.of((h**2).mean(-1))


def make_model(key):
    return [w / WIDTH**0.5 for w in jax.random.normal(key, (8, WIDTH, WIDTH))]


def loader(seconds):
    x = np.ones((ROWS, WIDTH), np.float32)
    for _ in range(STEPS):
        time.sleep(seconds)
        yield {"x": x}


def train(step, state, batches):
    begun = time.perf_counter()
    for batch in batches:
        state, _ = step(state, batch)
    jax.block_until_ready(state.model)
    return time.perf_counter() - begun


def by_fit(step, state, batches):
    begun = time.perf_counter()
    fit(step, state, batches, steps=STEPS, log=lambda record: None)
    return time.perf_counter() - begun


def ratios(ours, theirs):
    found = sorted(ours() / theirs() for _ in range(REPEATS))
    middle, low, high = found[len(found) // 2], found[0], found[-1]
    return f"ratio {middle:.2f} (from {low:.2f} to {high:.2f})"


def main():
    force_devices(8)
    step = meshdp.make_train_step(loss_fn, optax.sgd(1e-3), mesh=meshdp.make_mesh(data=8))
    host = to_host(step.init(make_model, jax.random.key(0)))
    new = lambda: place(host, step.shardings(host))
    train(step, new(), loader(0))
    seconds = train(step, new(), loader(0)) / STEPS
    print(f"jax {jax.__version__}, {jax.device_count()} {jax.devices()[0].device_kind} devices")
    print(f"a step takes {seconds * 1e3:.1f} ms, and so does the loader")
    ahead = lambda: train(step, new(), prefetch(loader(seconds), step))
    asked = lambda: train(step, new(), (shard_batch(b, step.mesh) for b in loader(seconds)))
    # A loop that reads each loss, as most do: without, JAX runs ahead by itself.
    print(
        "prefetch against loading when asked:",
        ratios(ahead, lambda: read(step, new(), seconds)),
    )
    print("the same, if no result is read:", ratios(ahead, asked))
    print(
        "fit against a bare loop, no loading:",
        ratios(lambda: by_fit(step, new(), loader(0)), lambda: train(step, new(), loader(0))),
    )


def read(step, state, seconds):
    begun = time.perf_counter()
    for batch in loader(seconds):
        state, metrics = step(state, batch)
        float(metrics["loss"])
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
