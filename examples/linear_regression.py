"""Linear regression on every device: on a mesh, and with --pmap as it was before 2025.

    python examples/linear_regression.py [--pmap]

Takes about five seconds, on eight CPU devices where there is no accelerator. The loss falls
from 23 to that of least squares, the variance of the noise, 0.01. The gradient and the loss
of a step travel together, in one all-reduce.
"""

import argparse
import functools

import equinox as eqx
import jax
import numpy as np
import optax

import compat
import meshdp
from meshdp.report import collectives, table

EXAMPLES, FEATURES = 1024, 16  # examples per step, over all devices
NOISE = 0.1  # standard deviation
STEPS, RATE = 30, 0.1
optimizer = optax.sgd(RATE, momentum=0.5)


def make_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    y = x @ rng.normal(size=FEATURES) + 3 + NOISE * rng.normal(size=EXAMPLES)
    return {"x": x, "y": y.astype(np.float32)}


def make_model(key):
    return eqx.nn.Linear(FEATURES, "scalar", key=key)


def loss_fn(model, batch, keys):
    return meshdp.Mean.of((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


# With pmap: the same, for one device's share, and the average said by hand.
@functools.partial(compat.pmap, axis_name="device", donate_argnums=0)
def pmap_step(state, batch):
    model, opt_state = state
    loss, grads = jax.value_and_grad(lambda m: loss_fn(m, batch, None).value())(model)
    loss, grads = compat.pmean((loss, grads), "device")
    updates, opt_state = optimizer.update(grads, opt_state)
    return (optax.apply_updates(model, updates), opt_state), {"loss": loss}


def start(key, pmap=False):
    if pmap:
        model = make_model(key)
        state = compat.replicate((model, optimizer.init(model)))
        return pmap_step, state, {"device": jax.device_count()}
    step = meshdp.make_train_step(loss_fn, optimizer)
    return step, step.init(make_model, key), step.mesh


def main(pmap=False):
    data = make_data()
    step, state, mesh = start(jax.random.key(0), pmap)
    batch = compat.shard(data) if pmap else data
    print(table(collectives(step.lower(state, batch).compile(), mesh)))
    for i in range(STEPS):
        state, out = step(state, batch)
        if i % 5 == 0 or i == STEPS - 1:
            print(f"step {i:2d}  loss {np.mean(out['loss']):.4f}")
    model = jax.device_get(compat.unreplicate(state[0]) if pmap else state.model)
    one = np.ones((EXAMPLES, 1))
    best, squares, *_ = np.linalg.lstsq(np.hstack([data["x"], one]), data["y"])
    print(f"least squares  loss {squares[0] / EXAMPLES:.4f}")
    apart = np.abs(np.append(model.weight, model.bias) - best).max()
    print(f"the weights differ from its own by at most {apart:.1e}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # accelerators are used where there are any
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pmap", action="store_true", help="as it was before 2025")
    main(parser.parse_args().pmap)
