"""Handwritten digits on every device: a small CNN, on a mesh and with --pmap as it was before.

    python examples/digits_cnn.py [--pmap]      (pip install scikit-learn)

Takes about 20 seconds on two cores, most of it compiling; on eight CPU devices where there is
no accelerator. About 98 % of the held-out digits are read right.
"""

import argparse
import functools

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import compat
import meshdp
from meshdp.report import collectives, table

TEST = 360  # images held out, the first of 1797
BATCH, EPOCHS, RATE = 64, 12, 1e-2  # images per step, over all devices; highest learning rate
STEPS = EPOCHS * (1797 - TEST) // BATCH
optimizer = optax.adam(optax.cosine_onecycle_schedule(STEPS, RATE))


def load():
    """Images `[n, 1, 8, 8]` from 0 to 1 and labels `[n]`."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    images = (x[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return {"x": images, "y": y[order].astype(np.int32)}


class CNN(eqx.Module):
    convs: list[eqx.nn.Conv2d]
    head: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        conv = functools.partial(eqx.nn.Conv2d, kernel_size=3, padding=1)
        self.convs = [conv(1, 16, key=k1), conv(16, 32, stride=2, key=k2)]
        self.head = eqx.nn.Linear(32 * 4 * 4, 10, key=k3)

    def __call__(self, x):
        for conv in self.convs:
            x = jax.nn.relu(conv(x))
        return self.head(x.ravel())


def loss_fn(model, batch, keys):
    logits = jax.vmap(model)(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return meshdp.Mean.of(losses)


# With pmap: the same for one device's share, and the average said by hand.
@functools.partial(compat.pmap, axis_name="device", donate_argnums=0)
def pmap_step(state, batch):
    model, opt_state = state
    loss, grads = jax.value_and_grad(lambda m: loss_fn(m, batch, None).value())(model)
    loss, grads = compat.pmean((loss, grads), "device")
    updates, opt_state = optimizer.update(grads, opt_state)
    return (optax.apply_updates(model, updates), opt_state), {"loss": loss}


def start(key, pmap=False):
    if pmap:
        model = CNN(key)
        state = compat.replicate((model, optimizer.init(model)))
        return pmap_step, state, {"device": jax.device_count()}
    step = meshdp.make_train_step(loss_fn, optimizer)
    return step, step.init(CNN, key), step.mesh


def main(pmap=False):
    data, rng = load(), np.random.default_rng(1)
    step, state, mesh = start(jax.random.key(0), pmap)
    order = np.concatenate([rng.permutation(range(TEST, 1797)) for _ in range(EPOCHS)])
    for i in range(STEPS):
        batch = {k: v[order[i * BATCH :][:BATCH]] for k, v in data.items()}
        batch = compat.shard(batch) if pmap else batch
        if i == 0:
            print(table(collectives(step.lower(state, batch).compile(), mesh)))
        state, out = step(state, batch)
        if i % 50 == 0 or i == STEPS - 1:
            print(f"step {i:3d}  loss {np.mean(out['loss']):.4f}")
    model = compat.unreplicate(state[0]) if pmap else state.model
    read = jax.jit(lambda model, x: jax.vmap(model)(x).argmax(-1))
    right = read(model, data["x"][:TEST]) == data["y"][:TEST]
    print(f"{100 * np.mean(right):.1f} % of {TEST} held-out digits are read right")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # accelerators are used where there are any
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pmap", action="store_true", help="as it was before 2025")
    main(parser.parse_args().pmap)
