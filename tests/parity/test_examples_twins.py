"""Each training example and its pmap twin against plain JAX on one device."""

import functools
import importlib
from pathlib import Path

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat

KEY = jax.random.key(3)


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module


def cross_entropy(logits, labels):
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()


def plain(loss, optimizer, model, norms, batches):
    """Trains on one device, by `loss(model, norms, batch) -> (loss, norms)`."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def step(params, norms, opt_state, batch):
        whole = lambda params: loss(eqx.combine(params, static), norms, batch)
        (value, new), grads = jax.value_and_grad(whole, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), new, opt_state, value

    opt_state, values = optimizer.init(params), []
    for batch in batches:
        params, norms, opt_state, value = step(params, norms, opt_state, batch)
        values.append(value)
    return params, norms, values


def arrays(tree):
    return jax.tree.leaves(jax.device_get(eqx.filter(tree, eqx.is_inexact_array)))


def run(step, state, batches):
    values = []
    for batch in batches:
        state, out = step(state, batch)
        values.append(np.mean(out["loss"]))
    return state, values


def close(have, want, rtol=1e-4, atol=1e-5):
    chex.assert_trees_all_close(have, want, rtol=rtol, atol=atol)


def squares(model, norms, batch):
    return jnp.square(jax.vmap(model)(batch["x"]) - batch["y"]).mean(), norms


def entropy(model, norms, batch):
    return cross_entropy(jax.vmap(model)(batch["x"]), batch["y"]), norms


@pytest.mark.parametrize(
    ("name", "make", "loss"),
    [("linear_regression", "make_model", squares), ("digits_cnn", "CNN", entropy)],
)
def test_an_example_its_twin_and_one_device_agree(load, name, make, loss):
    example = load(name)
    data = getattr(example, "load", getattr(example, "make_data", None))()
    batches = [{k: v[i::20][:48] for k, v in data.items()} for i in range(4)]
    model = getattr(example, make)(KEY)
    params, _, values = plain(loss, example.optimizer, model, None, batches)
    step, state, _ = example.start(KEY)
    state, mesh_values = run(step, state, batches)
    step, old, _ = example.start(KEY, pmap=True)
    old, pmap_values = run(step, old, map(compat.shard, batches))
    close([mesh_values, pmap_values], [values, values])
    close(arrays(state.model), arrays(params))
    close(arrays(compat.unreplicate(old[0])), arrays(params))


@pytest.fixture
def small(load, monkeypatch):
    """The training of `resnet50.py`, of a network with one block in each of two stages."""
    example = load("resnet50")
    model = functools.partial(load("resnet").ResNet, stages=((1, 4), (1, 8)), classes=10)
    # Adam makes a whole update of the rounding of a vanishing gradient.
    monkeypatch.setattr(example, "optimizer", optax.sgd(0.1, momentum=0.9))
    data = example.load()
    batches = [{k: v[i::90][:16] for k, v in data.items()} for i in range(3)]
    return example, model, batches


def normed(model, norms, batch):
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, norms = run(batch["x"], norms)
    return cross_entropy(logits, batch["y"]), norms


@pytest.mark.slow
def test_resnet_its_twin_and_one_device_agree_also_in_the_norms(small):
    example, model, batches = small
    start = eqx.nn.make_with_state(model)("batch", KEY)
    params, norms, values = plain(normed, example.optimizer, *start, batches)
    step, state, _ = example.start(KEY, model=model)
    state, mesh_values = run(step, state, batches)
    step, old, _ = example.start(KEY, pmap=True, model=model)
    old, pmap_values = run(step, old, map(compat.shard, batches))
    close([mesh_values, pmap_values], [values, values])
    close([arrays(state.model), arrays(state.model_state)], [arrays(params), arrays(norms)])
    params_, norms_, _ = compat.unreplicate(old)
    close([arrays(params_), arrays(norms_)], [arrays(params), arrays(norms)])


@pytest.mark.slow
def test_resnet_trains_alike_in_bfloat16_and_with_layers_computed_twice(small):
    example, model, batches = small
    start = eqx.nn.make_with_state(model)("batch", KEY)
    params, norms, values = plain(normed, example.optimizer, *start, batches)
    step, state, _ = example.start(KEY, model=model, remat="full")
    state, remat_values = run(step, state, batches)
    close([remat_values, arrays(state.model)], [values, arrays(params)])
    step, state, _ = example.start(KEY, model=model, remat="full", precision="bf16")
    state, bf16_values = run(step, state, batches)
    close(bf16_values, values, rtol=0.05)
    assert {x.dtype for x in arrays([state.model, state.model_state])} == {np.dtype("float32")}
