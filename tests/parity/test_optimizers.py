"""Any optimizer, those that look at whole matrices or global norms included."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp

from .models import MODELS
from .test_train_step import TENSOR, batches, loss_fn

MIXED = dict(data=2, fsdp=2, tensor=2)
OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: optax.contrib.muon(1e-2),
    "clipped_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "masked": lambda: optax.masked(
        optax.adam(1e-2), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    ),
}


@functools.cache
def oracle(name):
    """Three steps of plain JAX on one device, with dropout as the step's keys say."""
    init, apply, losses, _ = MODELS["mlp"]
    params = init(jax.random.key(0))
    run_key = jax.random.fold_in(jax.random.key(0), 2**31 - 1)
    optimizer = OPTIMIZERS[name]()
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch, i):
        key = jax.random.fold_in(run_key, i)
        keys = jax.vmap(lambda j: jax.random.fold_in(key, j))(jnp.arange(32))

        def mean(params):
            out = jax.vmap(apply, in_axes=(None, 0, 0))(params, batch["x"], keys)
            return jnp.where(batch["mask"], losses(out, batch), 0).sum() / batch["mask"].sum()

        updates, opt_state = optimizer.update(jax.grad(mean)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for i, batch in enumerate(batches("mlp")[:3]):
        params, opt_state = step(params, opt_state, batch, jnp.int32(i))
    return jax.device_get((params, opt_state))


CASES = [(name, MIXED) for name in OPTIMIZERS]
CASES += [(name, dict(data=8)) for name in ("adafactor", "muon", "clipped_adamw")]


@pytest.mark.parametrize("name, sizes", CASES, ids=[f"{n}-{'_'.join(s)}" for n, s in CASES])
def test_an_optimizer_gives_the_numbers_of_one_device(name, sizes, monkeypatch):
    # So small a model's optimizer state is split over `data` too.
    monkeypatch.setattr("meshdp.train._train_step.MIN_SHARD", 64)
    step = meshdp.make_train_step(
        functools.partial(loss_fn, "mlp"),
        OPTIMIZERS[name](),
        mesh=meshdp.make_mesh(**sizes),
        layout=meshdp.by_path(TENSOR["mlp"]) | meshdp.fsdp(min_size=64),
    )
    state = step.init(MODELS["mlp"][0], jax.random.key(0))
    for batch in batches("mlp")[:3]:
        state, _ = step(state, batch)
    params, opt_state = oracle(name)
    chex.assert_trees_all_close(jax.device_get(state.model), params, rtol=5e-4, atol=2e-5)
    have = jax.tree.leaves(jax.device_get(state.opt_state))
    chex.assert_trees_all_close(have, jax.tree.leaves(opt_state), rtol=5e-4, atol=2e-5)


def test_the_state_of_an_optimizer_is_split_over_data_as_well(monkeypatch):
    monkeypatch.setattr("meshdp.train._train_step.MIN_SHARD", 64)
    step = meshdp.make_train_step(
        functools.partial(loss_fn, "mlp"), optax.adam(1e-2), mesh=meshdp.make_mesh(data=8)
    )
    state = step.init(MODELS["mlp"][0], jax.random.key(0))
    state, _ = step(state, batches("mlp")[0])
    moment, weight = state.opt_state[0].mu["down"]["weight"], state.model["down"]["weight"]
    assert moment.sharding.spec == P("data")
    assert moment.addressable_data(0).shape == (4, 32)
    assert weight.addressable_data(0).shape == (32, 32)
    np.testing.assert_array_equal(state.opt_state[0].count, 1)
