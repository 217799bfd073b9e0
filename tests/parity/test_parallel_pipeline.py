"""Layers over `stage` against the same layers one after the other on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp import _jaxapi
from meshdp.parallel import _pipeline, columns, pipeline, pipeline_loss, row

LAYERS, ROWS, TOKENS, DIM, VOCAB = 8, 16, 4, 8, 12


def init(key, repeats=1):
    k = jax.random.split(key, 4)
    layers = {
        "up": jax.random.normal(k[1], (LAYERS, 2 * DIM, DIM)) / 3,
        "down": jax.random.normal(k[2], (LAYERS, DIM, 2 * DIM)) / 4,
        "index": jnp.arange(LAYERS),
    }
    if repeats > 1:
        layers = jax.tree.map(lambda w: w.reshape(repeats, -1, *w.shape[1:]), layers)
    return {
        "embed": jax.random.normal(k[0], (VOCAB, DIM)),
        "layers": layers,
        "head": jax.random.normal(k[3], (DIM, VOCAB)) / 3,
    }


def batch():
    rng = np.random.default_rng(0)
    return {
        "x": rng.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32),
        "y": rng.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32),
        "mask": rng.random((ROWS, TOKENS)) < 0.7,
    }


def dropped(h, index, keys):
    keep = lambda key: jax.random.bernoulli(jax.random.fold_in(key, index), 0.8, h.shape[1:])
    return jnp.where(jax.vmap(keep)(keys), h / 0.8, 0)


def plain_layer(w, x, keys, mask):
    # Without an epsilon: on an empty microbatch of zeros this is NaN.
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True))
    h = dropped(jnp.tanh(x @ w["up"].T) @ w["down"].T, w["index"], keys)
    return x + jnp.where(mask[..., None], h, 0)


def layer(w, x, context):
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True))
    (h,) = columns(x, w["up"])
    h = dropped(row(jnp.tanh(h), w["down"]), w["index"], context["keys"])
    return x + jnp.where(context["mask"][..., None], h, 0)


def losses(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def row_keys(key):
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(ROWS))


@functools.cache
def oracle(key_data):
    """The mean loss over the unmasked tokens, and its gradient, in plain JAX."""
    keys = row_keys(jax.random.wrap_key_data(jnp.array(key_data, jnp.uint32)))
    data, params = batch(), init(jax.random.key(0))

    def loss(floats):
        p = {**floats, "layers": {**floats["layers"], "index": params["layers"]["index"]}}
        x, mask = p["embed"][data["x"]], data["mask"]
        for i in range(LAYERS):
            x = plain_layer(jax.tree.map(lambda w: w[i], p["layers"]), x, keys, mask)  # noqa: B023
        each = losses(x @ p["head"], data["y"])
        return (each * mask).sum() / mask.sum()

    floats = {**params, "layers": {k: params["layers"][k] for k in ("up", "down")}}
    return jax.jit(jax.value_and_grad(loss))(floats)


def total(p, data, keys, how):
    """`how`: (schedule, microbatches, repeats), where the schedule is words."""
    schedule, m, repeats = how
    data = {**data, "keys": keys}
    first = lambda embed, b: embed[b["x"]]
    last = lambda head, x, b: meshdp.Mean.of(losses(x @ head, b["y"]), b["mask"])
    remat = "keeping" not in schedule
    if "1f1b" in schedule or "zero" in schedule:
        params = (p["embed"], p["layers"], p["head"])
        options: Any = dict(microbatches=m, repeats=repeats, remat=remat)
        options["zero_bubble"] = "zero" in schedule
        return pipeline_loss(first, layer, last, params, data, **options)
    x = first(p["embed"], data)
    context = {"keys": keys, "mask": data["mask"]}
    x = pipeline(layer, p["layers"], x, context, microbatches=m, repeats=repeats, remat=remat)
    return last(p["head"], x, data)


def layout(repeats):
    lead = ("stage",) if repeats == 1 else (None, "stage")
    split = meshdp.by_path(
        {
            r"up": P(*lead, "tensor"),
            r"down": P(*lead, None, "tensor"),
            r"index": P(*lead),
            r"embed|head": P(),
        }
    )
    return split | meshdp.fsdp(min_size=1)


def in_train_step(sizes, how, **options):
    mesh = meshdp.make_mesh(**sizes)
    step = meshdp.make_train_step(
        lambda model, data, keys: total(model, data, keys, how),
        optax.sgd(1.0),
        mesh=mesh,
        layout=layout(how[2]),
        **options,
    )
    state = step.init(functools.partial(init, repeats=how[2]), jax.random.key(0))
    grads, metrics = step.gradients(state, batch())
    key = jax.random.fold_in(state.key, state.step)
    return metrics["loss"], grads, tuple(np.asarray(jax.random.key_data(key)).tolist())


def in_distributed(sizes, how):
    mesh = meshdp.make_mesh(**sizes)
    key = jax.random.key(7)

    def step(params, data):
        def mean(floats):
            p = {**floats, "layers": {**floats["layers"], "index": params["layers"]["index"]}}
            return total(p, data, row_keys(key), how).value()

        floats = {**params, "layers": {k: params["layers"][k] for k in ("up", "down")}}
        return params, jax.value_and_grad(mean)(floats)

    step = meshdp.distributed(step, mesh=mesh, layout=layout(how[2]))
    params = step.init(functools.partial(init, repeats=how[2]), jax.random.key(0))
    loss, grads = step(params, batch())[1]
    return loss, grads, tuple(np.asarray(jax.random.key_data(key)).tolist())


def check(loss, grads, key_data, tolerance=1e-5):
    want, want_grads = oracle(key_data)
    np.testing.assert_allclose(loss, want, rtol=tolerance)
    for name, got in (
        ("embed", grads["embed"]),
        ("head", grads["head"]),
        ("up", grads["layers"]["up"]),
        ("down", grads["layers"]["down"]),
    ):
        expected = want_grads["layers"][name] if name in ("up", "down") else want_grads[name]
        got = np.asarray(got).reshape(expected.shape)
        near = tolerance * np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=near, err_msg=name)


def poisoned(monkeypatch):
    monkeypatch.setattr(_pipeline, "BUBBLE", np.nan)


@pytest.mark.parametrize("how", [("gpipe", 4, 1), ("circular", 4, 2)], ids=lambda how: how[0])
def test_a_poisoned_pipeline_of_tensor_split_stages_trains_as_one_device(how, monkeypatch):
    poisoned(monkeypatch)
    check(*in_train_step(dict(data=2, stage=2, tensor=2), how))


@pytest.mark.parametrize(
    "sizes, how",
    [
        (dict(stage=4, fsdp=2), ("gpipe", 8, 1)),
        (dict(stage=4, data=2), ("circular", 4, 2)),
        (dict(stage=8), ("1f1b", 16, 1)),
        (dict(stage=2, data=4), ("interleaved zero bubble", 4, 4)),
    ],
    ids=["gpipe", "circular", "1f1b", "zero"],
)
def test_a_poisoned_pipeline_under_automatic_axes_trains_as_one_device(sizes, how, monkeypatch):
    poisoned(monkeypatch)
    check(*in_distributed(sizes, how))


def test_an_accumulating_pipeline_of_fsdp_split_weights_trains_as_one_device(monkeypatch):
    poisoned(monkeypatch)
    how = ("interleaved zero bubble, keeping all", 4, 2)
    loss, grads, key = in_train_step(dict(fsdp=2, stage=2, tensor=2), how, accumulate=2)
    check(loss, grads, key)
    up = grads["layers"]["up"]  # [2, LAYERS / 2, 2 * DIM, DIM]
    assert up.sharding.spec == P(None, "stage", "tensor", "fsdp")
    assert up.addressable_data(0).shape == (2, LAYERS // 4, DIM, DIM // 2)


def test_a_pipeline_in_bfloat16_trains_nearly_as_one_device_in_float32(monkeypatch):
    poisoned(monkeypatch)
    how = ("zero bubble", 4, 1)
    loss, grads, key = in_train_step(dict(data=2, fsdp=2, stage=2), how, precision="bf16")
    check(loss, grads, key, tolerance=0.04)
    assert grads["layers"]["up"].dtype == jnp.float32


def test_gradients_of_bfloat16_weights_are_added_up_in_float32():
    # In bfloat16 the sum of ones stops at 256.
    rows = 512
    first = lambda _, x: x
    last = lambda _, x, b: meshdp.Mean(x.astype(jnp.float32).sum(), jnp.float32(1))
    layer = lambda w, x, _: x * w[None]

    def loss(w, x):
        with _jaxapi.tracing_mesh(mesh):
            return pipeline_loss(first, layer, last, ((), w, ()), x, microbatches=rows).total

    mesh = meshdp.make_mesh(stage=2, devices=jax.devices()[:2])
    w, x = jnp.ones((2, 1), jnp.bfloat16), jnp.ones((rows, 1), jnp.bfloat16)
    w = jax.device_put(w, jax.NamedSharding(mesh, P("stage")))
    x = jax.device_put(x, jax.NamedSharding(mesh, P()))
    grad = jax.jit(jax.grad(loss))(w, x)
    assert grad.dtype == jnp.bfloat16 and grad.tolist() == [[rows], [rows]]


def test_without_a_mesh_pipelines_are_loops_over_the_layers():
    key = jax.random.key(7)
    keys, data = row_keys(key), batch()
    want, _ = oracle(tuple(np.asarray(jax.random.key_data(key)).tolist()))
    for how in (("gpipe", 4, 1), ("circular", 4, 2), ("1f1b", 4, 2)):
        params = init(jax.random.key(0), repeats=how[2])
        loss = jax.jit(lambda p: total(p, data, keys, how).value())(params)  # noqa: B023
        np.testing.assert_allclose(loss, want, rtol=1e-5)
