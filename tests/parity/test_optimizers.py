"""Every kind of optax optimizer, on two meshes, against plain JAX on one device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp

ROWS, D, HIDDEN, STEPS = 16, 64, 128, 3
RNG = np.random.default_rng(0)
BATCHES = [
    {
        "x": RNG.standard_normal((ROWS, D)).astype(np.float32),
        "y": RNG.standard_normal((ROWS, D)).astype(np.float32),
    }
    for _ in range(STEPS)
]
PARAMS = {
    # Large enough to be shared out over data, and for adafactor to factor.
    "up": {"weight": RNG.standard_normal((HIDDEN, D)).astype(np.float32) / 8},
    "down": {"weight": RNG.standard_normal((D, HIDDEN)).astype(np.float32) / 11},
    "bias": np.zeros(D, np.float32),
}
WARM = optax.warmup_cosine_decay_schedule(0.0, 0.01, 2, 10)
MATRICES = lambda params: jax.tree.map(lambda p: p.ndim == 2, params)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(WARM),
    "adamw_masked_decay": optax.adamw(0.01, weight_decay=0.1, mask=MATRICES),
    "clipped_adamw": optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(0.01)),
    "clipped_by_block": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=32),
    "muon": optax.contrib.muon(0.01),
    "lion": optax.lion(0.001),
    "lamb": optax.lamb(0.01),
    "lars": optax.lars(0.1),
    "rmsprop": optax.rmsprop(0.01),
    "adagrad": optax.adagrad(0.1),
    "accumulating": optax.MultiSteps(optax.adam(0.01), 2),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=WARM, b1=0.8),
    "masked": optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), MATRICES), optax.sgd(0.1)
    ),
    "partitioned": optax.partition(
        {"matrix": optax.adam(0.01), "other": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "other", params),
    ),
    "frozen": optax.transforms.selective_transform(
        optax.adam(0.01), freeze_mask=lambda params: jax.tree.map(lambda p: p.ndim == 1, params)
    ),
    "by_its_loss": optax.chain(optax.adam(0.01), optax.contrib.reduce_on_plateau(patience=0)),
    "polyak": optax.polyak_sgd(max_learning_rate=0.1),
    "schedule_free": optax.contrib.schedule_free_adamw(0.01, warmup_steps=2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.01), 3),
    "in_bfloat16": optax.adam(0.01, mu_dtype=jnp.bfloat16),
}
TOLERANCES = {"bfloat16": (0.02, 1e-4)}
MESHES = {"data": dict(data=8), "data_fsdp_tensor": dict(data=2, fsdp=2, tensor=2)}
# A dimension that fsdp or tensor splits is not split over data as well.
WAYS = {"data": 8, "data_fsdp_tensor": 4}


def losses(params, batch):
    h = jnp.tanh(batch["x"] @ params["up"]["weight"].T)
    out = h @ params["down"]["weight"].T + params["bias"][None]
    return jnp.square(out - batch["y"]).sum(-1)


def loss_fn(params, batch, keys):
    return meshdp.Mean.of(losses(params, batch))


@functools.cache
def gradient():
    return jax.jit(jax.value_and_grad(lambda p, b: losses(p, b).mean()))


@functools.cache
def oracle(name):
    """Three steps of the optimizer on one device."""
    optimizer = OPTIMIZERS[name]
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = optimizer.init(params)
    extra = {"value"} if name in ("by_its_loss", "polyak") else set()

    @jax.jit
    def update(grads, state, params, loss):
        updates, state = optimizer.update(grads, state, params, **dict.fromkeys(extra, loss))
        return optax.apply_updates(params, updates), state

    for batch in BATCHES:
        loss, grads = gradient()(params, batch)
        params, state = update(grads, state, params, loss)
    return jax.device_get((params, state))


# Those that look at whole matrices or global norms, or nest their state, on both meshes.
BOTH = ["adafactor", "muon", "clipped_adamw", "accumulating", "injected", "schedule_free"]
CASES = [pytest.param(n, "data_fsdp_tensor", id=n) for n in BOTH]
CASES += [pytest.param(n, "data", id=f"{n}_data", marks=pytest.mark.slow) for n in BOTH]
CASES += [
    pytest.param(n, "data_fsdp_tensor", id=n, marks=pytest.mark.slow)
    for n in OPTIMIZERS
    if n not in BOTH
]


@pytest.mark.parametrize("name, mesh", CASES)
def test_the_optimizer_does_what_it_does_on_one_device(name, mesh):
    step = meshdp.make_train_step(
        loss_fn,
        OPTIMIZERS[name],
        mesh=meshdp.make_mesh(**MESHES[mesh]),
        layout=meshdp.by_path({"up": P("tensor"), "down": P(None, "tensor")})
        | meshdp.fsdp(min_size=1024),
    )
    state = step.init(lambda key: jax.tree.map(jnp.asarray, PARAMS), jax.random.key(0))
    for batch in BATCHES:
        state, _ = step(state, batch)
    params, opt_state = oracle(name)
    chex.assert_trees_all_close(jax.device_get(state.model), params, rtol=1e-3, atol=1e-5)
    have, want = jax.tree.leaves(state.opt_state), jax.tree.leaves(opt_state)
    for a, b in zip(have, want, strict=True):
        rtol, atol = TOLERANCES.get(str(b.dtype), (1e-3, 1e-5))
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol, atol)
    # Whatever is as large as a weight lies on each device as its share.
    large = [x for x in have if x.size == HIDDEN * D]
    assert {x.addressable_data(0).size for x in large} <= {HIDDEN * D // WAYS[mesh]}


def test_most_optimizers_have_state_as_large_as_a_weight():
    assert sum(_moments(o.init(PARAMS)) > 0 for o in OPTIMIZERS.values()) > 15


def _moments(opt_state):
    return sum(x.size == HIDDEN * D for x in jax.tree.leaves(opt_state))
