"""One training step in three forms: `compat.pmap` with `pmean`, `compat.global_view` of the
very same step, and `meshdp.make_train_step`; and `jax.pmap` itself. The oracle is plain JAX on
one device."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import compat
import meshdp

from .models import MODELS

STEPS, ROWS, CLASSES = 3, 32, 4
OPTIMIZER = optax.adam(1e-2)


def cnn_init(key):
    k1, k2 = jax.random.split(key)
    return {
        "conv": 0.3 * jax.random.normal(k1, (3, 3, 1, 8)),
        "scale": jnp.ones(8),
        "shift": jnp.zeros(8),
        "head": 0.3 * jax.random.normal(k2, (8, CLASSES)),
    }


def cnn(params, x, keys, axis):
    """A convolution, BatchNorm over the batches of all replicas, and a linear layer."""
    dims = ("NHWC", "HWIO", "NHWC")
    h = lax.conv_general_dilated(x, params["conv"], (1, 1), "SAME", dimension_numbers=dims)
    across = (lambda m: lax.pmean(m, axis)) if axis else (lambda m: m)
    mean = across(h.mean((0, 1, 2), keepdims=True))
    var = across((h * h).mean((0, 1, 2), keepdims=True)) - mean * mean
    h = (h - mean) / jnp.sqrt(var + 1e-3)
    h = jax.nn.relu(h * params["scale"][None, None, None] + params["shift"][None, None, None])
    return h.mean((1, 2)) @ params["head"]


def images(rng):
    y = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    x = rng.standard_normal((ROWS, 6, 6, 1)) + y[:, None, None, None]
    return {"x": x.astype(np.float32), "y": y}


def entropies(out, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(out), batch["y"][:, None], 1)[:, 0]


def each(apply):
    return lambda params, x, keys, axis: jax.vmap(apply, (None, 0, 0))(params, x, keys)


# name: (init, forward of a batch, losses of a batch, batch)
CASES = {name: (i, each(a), l, b) for name, (i, a, l, b) in MODELS.items()}
CASES["cnn"] = (cnn_init, cnn, entropies, images)


def losses_of(name, params, batch, keys, axis):
    _, forward, losses, _ = CASES[name]
    return losses(forward(params, batch["x"], keys, axis), batch)


def batches(name):
    """Batches with a key for each example: those that `make_train_step` derives."""
    rng = np.random.default_rng(0)
    run_key = jax.random.fold_in(jax.random.key(0), 2**31 - 1)
    made = []
    for i in range(STEPS):
        key = jax.random.fold_in(run_key, i)
        keys = jax.vmap(lambda j, key=key: jax.random.fold_in(key, j))(jnp.arange(ROWS))
        batch = CASES[name][3](rng)
        made.append({"x": batch["x"], "y": batch["y"], "key": jax.random.key_data(keys)})
    return made


def step(name, axis, state, batch):
    """A step as it was written for pmap; with `axis=None` for one device."""
    params, opt_state = state
    keys = jax.random.wrap_key_data(batch["key"])
    mean = lambda p: losses_of(name, p, batch, keys, axis).mean()
    loss, grads = jax.value_and_grad(mean)(params)
    if axis:
        loss, grads = lax.pmean((loss, grads), axis)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), loss


def start(name):
    params = CASES[name][0](jax.random.key(0))
    return params, OPTIMIZER.init(params)


@functools.cache
def oracle(name):
    run = jax.jit(functools.partial(step, name, None))
    state, seen = start(name), []
    for batch in batches(name):
        state, loss = run(state, batch)
        seen.append(jax.device_get((state[0], loss)))
    return seen


def mapped(pmap, name, **options):
    run = pmap(functools.partial(step, name, "batch"), "batch", donate_argnums=0, **options)
    state = compat.replicate(start(name))
    for batch in batches(name):
        state, loss = run(state, compat.shard(batch))
        yield compat.unreplicate((state[0], loss))


def viewed(name, **sizes):
    run = compat.global_view(
        functools.partial(step, name, "batch"),
        mesh=meshdp.make_mesh(**sizes),
        layout=meshdp.fsdp(min_size=64),
        donate_argnums=0,
    )
    state = start(name)
    for batch in batches(name):
        state, loss = run(state, batch)
        yield state[0], loss


def structured(name, **sizes):
    def loss_fn(params, batch, keys):
        return meshdp.Mean.of(losses_of(name, params, batch, keys, ("data", "fsdp")))

    mesh = meshdp.make_mesh(**sizes)
    run = meshdp.make_train_step(loss_fn, OPTIMIZER, mesh=mesh, layout=meshdp.fsdp(min_size=64))
    state = run.init(CASES[name][0], jax.random.key(0))
    for batch in batches(name):
        state, metrics = run(state, {"x": batch["x"], "y": batch["y"]})
        yield state.model, metrics["loss"]


FORMS = {
    "jax_pmap": lambda name: mapped(jax.pmap, name),
    "compat_pmap": lambda name: mapped(compat.pmap, name),
    "compat_pmap_on_one_device": lambda name: mapped(
        compat.pmap, name, devices=jax.devices()[:1]
    ),
    "global_view": lambda name: viewed(name, data=8),
    "global_view_fsdp": lambda name: viewed(name, data=2, fsdp=4),
    "make_train_step": lambda name: structured(name, data=8),
    "make_train_step_fsdp": lambda name: structured(name, data=2, fsdp=4),
}


# A plain run has every form and every model, but not every pair: they take long to compile.
PLAIN = [("linear", form) for form in FORMS]
PLAIN += [("mlp", "compat_pmap"), ("mlp", "make_train_step"), ("mlp", "global_view_fsdp")]
PLAIN += [("cnn", "compat_pmap"), ("cnn", "make_train_step_fsdp"), ("cnn", "global_view")]
PLAIN += [("transformer", "compat_pmap"), ("transformer", "global_view")]
PAIRS = [
    pytest.param(*pair, marks=() if pair in PLAIN else pytest.mark.slow, id="-".join(pair))
    for pair in itertools.product(CASES, FORMS)
]


@pytest.mark.parametrize("name, form", PAIRS)
def test_every_form_gives_the_numbers_of_one_device_step_by_step(name, form):
    for got, want in zip(FORMS[form](name), oracle(name), strict=True):
        chex.assert_trees_all_close(jax.device_get(got), want, rtol=2e-4, atol=2e-5)
