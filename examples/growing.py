"""One step on 1, 2, 4 and 8 devices: the same numbers, less memory on each, more traffic.

    python examples/growing.py [--axis data] [--plot growing.png]

Takes about half a minute, on eight CPU devices where there is no accelerator; those share the
cores, so there the time of a step rises, where accelerators make it fall. Each size
is verified against the one before. Without matplotlib there is no plot.
"""

import argparse
import importlib.util
import statistics
import time

import chex
import equinox as eqx
import jax
import numpy as np
import optax

import meshdp
from meshdp.report import report

SIZES = (1, 2, 4, 8)  # devices
EXAMPLES, FEATURES, WIDTH, CLASSES = 256, 64, 1024, 10  # examples per step, over all devices
STEPS = 8
COLUMNS = "seconds/step", "MB/device", "MB sent/device"


def make_model(key):
    return eqx.nn.MLP(FEATURES, CLASSES, WIDTH, depth=3, key=key)


def loss_fn(model, batch, keys):
    logits = jax.vmap(model)(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return meshdp.Mean.of(losses)


def train(devices, axis):
    """The weights after `STEPS` steps, and the row of a table."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)}
    batch["y"] = (batch["x"] @ rng.normal(size=(FEATURES, CLASSES))).argmax(-1)
    mesh = meshdp.make_mesh(**{axis: len(devices)}, devices=devices)  # all that changes
    step = meshdp.make_train_step(loss_fn, optax.sgd(0.1, momentum=0.9), mesh=mesh)
    state, seconds = step.init(make_model, jax.random.key(0)), []
    found = report(step, state, batch)
    for _ in range(STEPS):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - start)
    weights = eqx.filter(meshdp.to_host(state.model), eqx.is_array)
    memory, sent = found.memory.total_bytes / 1e6, found.traffic.sent_bytes / 1e6
    # The first step compiles.
    return weights, metrics["loss"], (statistics.median(seconds[1:]), memory, sent)


def plot(path, rows):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    for i, (ax, title) in enumerate(zip(figure.subplots(1, 3), COLUMNS, strict=True)):
        ax.plot(list(rows), [row[i] for row in rows.values()], "o-")
        ax.set(title=title, xlabel="devices", xticks=list(rows), ylim=(0, None))
    figure.savefig(path)


def main(*given):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axis", default="fsdp", choices=("data", "fsdp"))
    parser.add_argument("--plot", default="growing.png", help="where the plot goes")
    args = parser.parse_args(given or None)
    rows, last = {}, None
    print("devices    loss", *(f"{c:>14}" for c in COLUMNS), sep="  ")
    for n in [n for n in SIZES if n <= jax.device_count()]:
        weights, loss, rows[n] = train(jax.devices()[:n], args.axis)
        chex.assert_trees_all_close(weights, last or weights, rtol=1e-4, atol=1e-6)
        print(f"{n:7}  {loss:.4f}", *(f"{x:14.4g}" for x in rows[n]), sep="  ", flush=True)
        last = weights
    print("each size gave the weights of the one before")
    if importlib.util.find_spec("matplotlib"):
        plot(args.plot, rows)
        print(f"plotted in {args.plot}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # accelerators are used where there are any
    main()
