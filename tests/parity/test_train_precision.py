"""Mixed precision against plain JAX that casts by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdp
from meshdp.loop import Checkpoints, shapes
from meshdp.report import collectives

from .test_train_features import MIXED, make, one_device_gradient, start
from .test_train_step import batches


@pytest.mark.parametrize("sizes", [dict(data=8), MIXED], ids=["data", "mixed"])
def test_bfloat16_computes_low_and_keeps_and_sums_in_float32(sizes):
    batch = batches("mlp")[0]
    step = make("mlp", sizes, precision="bf16")
    state = start(step, "mlp")
    grads, metrics = step.gradients(state, batch)
    low = lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x
    loss, want = one_device_gradient("mlp", batch, low)
    full_loss, _ = one_device_gradient("mlp", batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-3)
    assert abs(metrics["loss"] - full_loss) > 1e-6 * full_loss  # it did compute low
    # bfloat16 has 8 bits: two of them may go in a row of products and sums.
    for have, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(have, leaf, rtol=0, atol=2**-6 * np.abs(leaf).max())
    kept = {str(x.dtype) for x in jax.tree.leaves((state.model, state.opt_state[0].mu, grads))}
    assert kept == {"float32"}


def gathered_types(precision):
    step = make("mlp", dict(fsdp=8), precision=precision)
    compiled = step.lower(start(step, "mlp"), batches("mlp")[0]).compile()
    found = [c for c in collectives(compiled, step.mesh) if max(c.shape, default=0) > 1]
    return {
        k: {c.dtype for c in found if c.kind == k} for k in ("all-gather", "reduce-scatter")
    }


def test_weights_are_gathered_in_the_type_of_compute_and_gradients_summed_in_float32():
    # In float16: XLA for CPU moves bfloat16 as float32.
    assert gathered_types("f16") == {"all-gather": {"f16"}, "reduce-scatter": {"f32"}}


def test_gradients_are_summed_in_the_type_of_compute_if_asked():
    precision = meshdp.Precision(compute=jnp.float16, reduce=jnp.float16)
    step = make("mlp", dict(data=8), precision=precision, shard_update=False)
    compiled = step.lower(start(step, "mlp"), batches("mlp")[0]).compile()
    found = collectives(compiled, step.mesh)
    assert {c.dtype for c in found if len(c.shape) > 1} == {"f16"}


def test_float16_finds_its_loss_scale_and_then_trains():
    # The search for a scale is no reason to stop.
    step = make("mlp", dict(data=8), optax.sgd(1e-2), precision="f16", stop_after=1)
    state, seen = start(step, "mlp"), []
    state = state.replace(guard=state.guard._replace(scale=np.float32(2.0**20)))
    batch = batches("mlp")[0]
    for _ in range(12):
        state, metrics = step(state, batch)
        seen.append(
            (float(metrics["loss"]), float(metrics["loss_scale"]), int(metrics["skipped"]))
        )
    losses, scales, skipped = zip(*seen, strict=True)
    assert losses[-1] < losses[0]
    assert 1 < skipped[-1] == skipped[-2] < 12  # no step is skipped any more
    assert scales[-1] == 2.0**20 / 2 ** skipped[-1]
    assert state.guard.scale == scales[-1]


def test_an_overflow_halves_the_scale_and_two_thousand_good_steps_double_it():
    from meshdp.train import _guard

    guard = _guard.first(True)
    squares, no, yes = jnp.array([1.0, jnp.inf, 1.0]), jnp.array(False), jnp.array(True)
    bad = _guard.follow(guard, no, 3.0, squares, True)
    assert (bad.scale, bad.skipped, bad.in_a_row, bad.leaf) == (2.0**14, 1, 0, 1)
    ready = bad._replace(good=jnp.int32(1999))
    good = _guard.follow(ready, yes, 3.0, jnp.ones(3), True)
    assert (good.scale, good.skipped, good.in_a_row, good.good) == (2.0**15, 1, 0, 0)
    # What no scale can cause counts: a loss that is not finite, or a gradient at scale 1.
    assert _guard.follow(guard, no, jnp.nan, squares, True).in_a_row == 1
    assert _guard.follow(guard._replace(scale=1.0), no, 3.0, squares, True).in_a_row == 1
    assert _guard.follow(guard, no, 3.0, squares, False).in_a_row == 1


def test_the_loss_scale_is_saved_and_a_run_goes_on_with_it(tmp_path):
    def started(sizes):
        step = make("linear", sizes, optax.sgd(1e-2), precision="f16")
        return step, start(step, "linear")

    batch = batches("linear")[0]
    step, state = started(dict(data=8))
    guard = state.guard._replace(
        scale=np.float32(2.0**9), skipped=np.int32(6), good=np.int32(1998)
    )
    state, _ = step(state.replace(guard=guard), batch)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.close()
    _, want = step(state, batch)

    step, other = started(dict(fsdp=4, tensor=2))
    found = Checkpoints(tmp_path).restore(shapes(step, other)).state
    assert (found.guard.scale, found.guard.skipped, found.guard.good) == (2.0**9, 6, 1999)
    found, metrics = step(found, batch)
    assert (metrics["loss_scale"], metrics["skipped"]) == (2.0**9, 6)
    np.testing.assert_allclose(metrics["loss"], want["loss"], rtol=1e-3)
    # It was the 2000th good step.
    assert (found.guard.scale, found.guard.good) == (2.0**10, 0)


def test_norm_layers_and_the_loss_stay_in_float32():
    seen = {}

    class Model(eqx.Module):
        norm: eqx.nn.LayerNorm
        out: eqx.nn.Linear

        def __init__(self, key):
            self.norm = eqx.nn.LayerNorm(8)
            self.out = eqx.nn.Linear(8, 8, key=key)

        def __call__(self, x):
            seen["norm"], seen["out"], seen["x"] = self.norm.weight, self.out.weight, x
            return self.out(self.norm(x))

    def loss(model, batch, keys):
        out = jax.vmap(model)(batch["x"])
        seen["logits"] = out
        return meshdp.Mean.of(jnp.square(out).sum(-1))

    step = meshdp.make_train_step(
        loss, optax.sgd(0.1), precision="bf16", mesh=meshdp.make_mesh()
    )
    step(step.init(Model, jax.random.key(0)), {"x": np.ones((8, 8), np.float32)})
    types = {name: str(x.dtype) for name, x in seen.items()}
    assert types == {"norm": "float32", "out": "bfloat16", "x": "bfloat16", "logits": "float32"}


class Scale(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        assert x.dtype == self.w.dtype == jnp.bfloat16
        return x * self.w


def test_targets_and_masks_are_not_rounded_with_what_the_model_is_given():
    # bfloat16 knows no 1001, and no 257.
    batch = {"x": np.ones((8, 4), np.float32), "y": np.full((8, 4), 1001, np.float32)}
    batch["mask"] = np.full(8, 257, np.float32)

    def loss(model, batch, keys):
        out = jax.vmap(model)(batch["x"])
        return meshdp.Mean.of(jnp.square(out - batch["y"]).sum(-1), batch["mask"])

    step = meshdp.make_train_step(
        loss, optax.sgd(0.0), mesh=meshdp.make_mesh(data=8), precision="bf16"
    )
    state = step.init(lambda key: Scale(jnp.full(4, 1000.0)), jax.random.key(0))
    _, metrics = step(state, batch)
    assert (float(metrics["loss"]), float(metrics["weight"])) == (4.0, 8 * 257)


def test_the_average_of_small_types_moves_by_less_than_they_can_tell():
    step = meshdp.make_train_step(
        lambda w, batch, keys: meshdp.Mean.of(batch @ w),
        optax.chain(optax.sgd(1.0), meshdp.ema(0.999)),
        mesh=meshdp.make_mesh(data=8),
        precision=meshdp.Precision(params=jnp.bfloat16, compute=jnp.bfloat16),
    )
    state = step.init(lambda key: jnp.full(4, 3.0), jax.random.key(0))
    state, _ = step(state, np.ones((8, 4), np.float32))
    np.testing.assert_allclose(state.opt_state[1].average, 0.999 * 3 + 0.001 * 2, rtol=1e-6)
    assert (state.model.dtype, meshdp.ema_model(state).dtype) == (jnp.bfloat16, jnp.bfloat16)
