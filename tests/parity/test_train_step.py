"""make_train_step on every mesh against plain JAX on one device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp

from .models import MODELS

STEPS = 5
MESHES = {
    "data": dict(data=8),
    "fsdp": dict(fsdp=8),
    "data_fsdp": dict(data=4, fsdp=2),
    "data_fsdp_tensor": dict(data=2, fsdp=2, tensor=2),
    "tensor": dict(tensor=8),
}
TENSOR = {
    "linear": {r"\['w'\]": P(None, "tensor")},
    "mlp": {r"up.*weight": P("tensor"), r"down": P(None, "tensor")},
    "transformer": {
        r"qkv|out": P(None, None, "tensor"),
        r"up": P(None, "tensor"),
        r"down": P(None, None, "tensor"),
    },
}
# The leaf whose layout is checked, and its spec where the mesh has an axis of size 1 too.
WATCHED = {
    "linear": (lambda p: p["w"], P("fsdp", "tensor")),
    "mlp": (lambda p: p["down"]["weight"], P("fsdp", "tensor")),
    "transformer": (lambda p: p["blocks"]["up"], P(None, "tensor", "fsdp")),
}
OPTIMIZER = optax.adamw(1e-2)


def batches(name):
    rng = np.random.default_rng(0)
    return [MODELS[name][3](rng) for _ in range(STEPS)]


@functools.cache
def oracle(name):
    """Five steps of plain `jax.grad` of the mean over the unmasked, on one device."""
    init, apply, losses, _ = MODELS[name]
    params = init(jax.random.key(0))
    run_key = jax.random.fold_in(jax.random.key(0), 2**31 - 1)
    opt_state = OPTIMIZER.init(params)

    @jax.jit
    def step(params, opt_state, batch, i):
        rows = batch["mask"].shape[0]
        key = jax.random.fold_in(run_key, i)
        keys = jax.vmap(lambda j: jax.random.fold_in(key, j))(jnp.arange(rows))

        def mean(params):
            out = jax.vmap(apply, in_axes=(None, 0, 0))(params, batch["x"], keys)
            mask = batch["mask"]
            return jnp.where(mask, losses(out, batch), 0).sum() / mask.sum()

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    seen = []
    for i, batch in enumerate(batches(name)):
        params, opt_state, loss, norm = step(params, opt_state, batch, jnp.int32(i))
        seen.append((float(loss), float(norm)))
    return jax.device_get(params), jax.device_get(opt_state), seen


def loss_fn(name, params, batch, keys):
    _, apply, losses, _ = MODELS[name]
    out = jax.vmap(apply, in_axes=(None, 0, 0))(params, batch["x"], keys)
    return meshdp.Mean.of(losses(out, batch), batch["mask"])


def train(name, sizes, **options):
    mesh = meshdp.make_mesh(**sizes)
    step = meshdp.make_train_step(
        functools.partial(loss_fn, name),
        OPTIMIZER,
        mesh=mesh,
        layout=meshdp.by_path(TENSOR[name]) | meshdp.fsdp(min_size=64),
        **options,
    )
    state = step.init(MODELS[name][0], jax.random.key(0))
    seen = []
    for batch in batches(name):
        state, metrics = step(state, batch)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return mesh, state, seen


def check(name, mesh, state, seen):
    params, opt_state, want = oracle(name)
    # The same numbers...
    np.testing.assert_allclose(seen, want, rtol=2e-5)
    chex.assert_trees_all_close(jax.device_get(state.model), params, rtol=2e-4, atol=2e-5)
    chex.assert_trees_all_close(
        jax.device_get(state.opt_state), opt_state, rtol=2e-4, atol=2e-6
    )
    # ...laid out as asked, optimizer state included...
    pick, spec = WATCHED[name]
    sizes = dict(mesh.shape)
    leaf, moment = pick(state.model), pick(state.opt_state[0].mu)
    assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)
    # ...so that each device really holds only its share.
    local = tuple(n // sizes.get(a, 1) for n, a in zip(leaf.shape, spec, strict=True))
    assert leaf.addressable_data(0).shape == local
    held = {tuple(s.data.shape) for s in moment.addressable_shards}
    assert held in ({local}, {_shared_over_data(local, spec, sizes)})


def _shared_over_data(local, spec, sizes):
    return local


PLAIN = [("linear", "data", 1), ("linear", "tensor", 4), ("mlp", "fsdp", 4)]
PLAIN += [("mlp", "data_fsdp", 1), ("transformer", "data", 4)]
PLAIN += [("transformer", "fsdp", 1), ("transformer", "data_fsdp_tensor", 4)]
CASES = [
    pytest.param(
        name,
        mesh,
        accumulate,
        marks=() if (name, mesh, accumulate) in PLAIN else pytest.mark.slow,
        id=f"{name}-{mesh}-accumulate_{accumulate}",
    )
    for name in MODELS
    for mesh in MESHES
    for accumulate in (1, 4)
]


@pytest.mark.parametrize("name, mesh, accumulate", CASES)
def test_training_matches_one_device(name, mesh, accumulate):
    # 32 rows on 8 devices: 4 microbatches of one row each.
    check(name, *train(name, MESHES[mesh], accumulate=accumulate))


@pytest.mark.parametrize(
    "mesh", ["fsdp", pytest.param("data_fsdp_tensor", marks=pytest.mark.slow)]
)
def test_gathering_once_per_step_gives_the_same_numbers(mesh):
    check("transformer", *train("transformer", MESHES[mesh], accumulate=2, gather="step"))


@pytest.mark.parametrize("mesh", ["data", "data_fsdp"])
def test_an_update_that_is_not_shared_out_gives_the_same_numbers(mesh):
    check("mlp", *train("mlp", MESHES[mesh], shard_update=False))
