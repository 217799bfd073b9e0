"""Attention over `seq` against `jax.nn.dot_product_attention` on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.parallel import attention, unzigzag, zigzag

B, T, HEADS, KV, SIZE = 4, 16, 8, 4, 4
SEQ = P(("data", "fsdp"), "seq")


def inputs():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    lengths = rng.integers(T // 2, T, (B, 1))
    return {
        "q": normal(B, T, HEADS, SIZE),
        "k": normal(B, T, KV, SIZE),
        "v": normal(B, T, KV, SIZE),
        "mask": np.arange(T) < lengths,
        "segments": np.sort(rng.integers(0, 3, (B, T)), axis=1).astype(np.int32),
        "target": normal(B, T, HEADS, SIZE),
    }


def seen(batch, causal, masked):
    allowed = np.ones((B, T, T), bool)
    if causal:
        allowed &= np.tril(np.ones((T, T), bool))
    if masked:
        allowed &= batch["segments"][:, :, None] == batch["segments"][:, None]
        allowed &= batch["mask"][:, None]
    return allowed


@functools.cache
def oracle(causal, masked):
    """The loss and the gradients of q, k and v. Tokens of padding see nothing and count 0."""
    batch = inputs()
    allowed = seen(batch, causal, masked)
    counts = allowed.any(-1)[:, :, None, None]

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, mask=allowed[:, None])
        return jnp.where(counts, (out - batch["target"]) ** 2, batch["target"] ** 2).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*(batch[n] for n in "qkv"))


def losses(batch, q, k, v, causal, masked, method, order):
    """One sum for each example."""
    more = dict(segment_ids=batch["segments"], mask=batch["mask"]) if masked else {}
    if order == "zigzag":
        batch, q, k, v, more = zigzag((batch, q, k, v, more))
    out = attention(q, k, v, causal=causal, method=method, order=order, **more)
    out, target = (
        unzigzag((out, batch["target"])) if order == "zigzag" else (out, batch["target"])
    )
    return ((out - target) ** 2).sum((1, 2, 3))


def in_distributed(sizes, *how):
    mesh = meshdp.make_mesh(**sizes)

    def step(state, batch):
        f = lambda q, k, v: losses(batch, q, k, v, *how).sum()
        return state, jax.value_and_grad(f, (0, 1, 2))(batch["q"], batch["k"], batch["v"])

    step = meshdp.distributed(step, mesh=mesh, batch=SEQ)
    return step({"w": jnp.zeros(8)}, inputs())[1]


def in_train_step(sizes, *how):
    mesh = meshdp.make_mesh(**sizes)
    # The gradient of each probe is the sum of x * dx for q, k or v.
    probe = {name: jnp.ones(()) for name in "qkv"}

    def loss_fn(model, batch, keys):
        q, k, v = (batch[n] * model[n] for n in "qkv")
        return meshdp.Mean(losses(batch, q, k, v, *how).sum(), 1.0)

    step = meshdp.make_train_step(loss_fn, optax.sgd(1.0), mesh=mesh, batch=SEQ)
    state = step.init(lambda key: probe, jax.random.key(0))
    grads, metrics = step.gradients(state, inputs())
    return metrics, grads


@pytest.mark.parametrize(
    "sizes, causal, masked, method, order",
    [
        (dict(seq=8), True, False, "ring", "zigzag"),
        (dict(data=2, seq=2, tensor=2), True, True, "ring", "zigzag"),
        (dict(fsdp=2, seq=4), True, True, "ring", "natural"),
        (dict(data=2, seq=2, tensor=2), False, True, "ring", "natural"),
        (dict(data=2, seq=2, tensor=2), True, True, "ulysses", "zigzag"),
    ],
)
def test_attention_over_seq_has_the_values_and_gradients_of_plain_attention(
    sizes, causal, masked, method, order
):
    loss, grads = in_distributed(sizes, causal, masked, method, order)
    want, want_grads = oracle(causal, masked)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for got, grad in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_inside_a_train_step_has_the_same_values_and_gradients(method):
    sizes = dict(data=2, seq=2, tensor=2)
    metrics, grads = in_train_step(sizes, True, True, method, "zigzag")
    batch, (want, want_grads) = inputs(), oracle(True, True)
    weight = 2  # one for each of data
    np.testing.assert_allclose(metrics["loss"], want / weight, rtol=1e-5)
    for name, grad in zip("qkv", want_grads, strict=True):
        slope = (batch[name] * grad).sum() / weight
        np.testing.assert_allclose(grads[name], slope, rtol=2e-5, atol=1e-4)


def test_without_a_mesh_it_is_a_plain_function():
    batch, (want, want_grads) = inputs(), oracle(True, True)
    f = lambda q, k, v: losses(batch, q, k, v, True, True, "ring", "zigzag").sum()
    loss, grads = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*(batch[n] for n in "qkv"))
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for got, grad in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, grad, rtol=1e-5, atol=1e-5)
