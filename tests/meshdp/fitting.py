"""A model, data and step small enough to train in milliseconds, for the tests of the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshdp
from meshdp._place import place, to_host

EXAMPLES = 100


def make_model(key):
    return {"w": jax.random.normal(key, (8, 16)), "v": jax.random.normal(key, (16, 4))}


def loss_fn(model, batch, keys=None):
    y = jnp.tanh(batch["x"] @ model["w"]) @ model["v"]
    return meshdp.Mean.of(((y - batch["y"]) ** 2).mean(-1), batch["mask"])


def make_data(examples=EXAMPLES):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(examples, 8)).astype(np.float32),
        "y": rng.normal(size=(examples, 4)).astype(np.float32),
    }


def make_step(mesh):
    layout = meshdp.fsdp(min_size=1)
    return meshdp.make_train_step(loss_fn, optax.adam(1e-2), mesh=mesh, layout=layout)


def start(step):
    """The first state, made once: `init` compiles each time."""
    if not _started:
        _started.append(to_host(step.init(make_model, jax.random.key(0))))
    return place(_started[0], step.shardings(_started[0]))


_started = []


def batch(rows=16, seed=0):
    """One batch with its mask, of examples that depend on the seed."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, 8)).astype(np.float32),
        "y": rng.normal(size=(rows, 4)).astype(np.float32),
        "mask": np.ones(rows, np.float32),
    }


def oracle(batches, model=None):
    """The losses of Adam on these batches on one device, in plain JAX and optax."""
    model = make_model(jax.random.key(0)) if model is None else model
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.init(model)

    def mean(model, b):
        losses = ((jnp.tanh(b["x"] @ model["w"]) @ model["v"] - b["y"]) ** 2).mean(-1)
        return (losses * b["mask"]).sum() / b["mask"].sum()

    @jax.jit
    def one(model, opt_state, b):
        loss, grads = jax.value_and_grad(mean)(model, b)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, loss

    losses = []
    for b in batches:
        model, opt_state, loss = one(model, opt_state, b)
        losses.append(float(loss))
    return model, losses
