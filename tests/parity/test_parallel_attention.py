"""Attention over `seq` against `jax.nn.dot_product_attention` on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.parallel import _blockwise, attention, unzigzag, zigzag

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
        "keep": np.ones((B, T, HEADS, SIZE), np.float32),
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
def gradient(causal, masked):
    batch = inputs()
    allowed = seen(batch, causal, masked)
    counts = allowed.any(-1)[:, :, None, None]

    def loss(q, k, v, keep):
        out = jax.nn.dot_product_attention(q, k, v, mask=allowed[:, None]) * keep
        return jnp.where(counts, (out - batch["target"]) ** 2, batch["target"] ** 2).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def oracle(causal, masked, keep):
    """The loss and the gradients of q, k and v. Tokens of padding see nothing and count 0."""
    return gradient(causal, masked)(*(inputs()[n] for n in "qkv"), keep)


@jax.jit
def keys_of(key):
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(B))


@jax.jit
def kept(keys):
    """Dropout: each example's own, for the tokens in their natural order."""
    return jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (T, HEADS, SIZE)) / 0.8)(keys)


def losses(batch, q, k, v, causal, masked, method, order):
    """One sum for each example."""
    more = dict(segment_ids=batch["segments"], mask=batch["mask"]) if masked else {}
    if order == "zigzag":
        batch, q, k, v, more = zigzag((batch, q, k, v, more))
    out = attention(q, k, v, causal=causal, method=method, order=order, **more) * batch["keep"]
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
        return meshdp.Mean(losses({**batch, "keep": kept(keys)}, q, k, v, *how).sum(), 1.0)

    step = meshdp.make_train_step(loss_fn, optax.sgd(1.0), mesh=mesh, batch=SEQ)
    state = step.init(lambda key: probe, jax.random.key(0))
    grads, metrics = step.gradients(state, inputs())
    return metrics, grads, kept(keys_of(jax.random.fold_in(state.key, state.step)))


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
    want, want_grads = oracle(causal, masked, inputs()["keep"])
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for got, grad in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, grad, rtol=1e-5, atol=1e-5)


def test_blocks_are_left_out_only_where_the_tokens_are_in_order(monkeypatch):
    monkeypatch.setattr(_blockwise, "BLOCK", 4)
    sizes = dict(data=2, seq=2, tensor=2)
    loss, grads = in_distributed(sizes, True, True, "ulysses", "zigzag")
    want, want_grads = oracle(True, True, inputs()["keep"])
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for got, grad in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_inside_a_train_step_has_the_same_values_and_gradients(method):
    sizes = dict(data=2, seq=2, tensor=2)
    metrics, grads, keep = in_train_step(sizes, True, True, method, "zigzag")
    batch, (want, want_grads) = inputs(), oracle(True, True, keep)
    weight = 2  # one for each of data
    np.testing.assert_allclose(metrics["loss"], want / weight, rtol=1e-5)
    for name, grad in zip("qkv", want_grads, strict=True):
        slope = (batch[name] * grad).sum() / weight
        np.testing.assert_allclose(grads[name], slope, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("block", [512, 4, 6])
def test_without_a_mesh_it_is_a_plain_function_however_many_keys_it_takes_at_a_time(
    block, monkeypatch
):
    monkeypatch.setattr(_blockwise, "BLOCK", block)
    batch, (want, want_grads) = inputs(), oracle(True, True, inputs()["keep"])
    batch["mask"] = batch["mask"].astype(np.float32)  # numbers will do
    f = lambda *qkv: losses(batch, *qkv, True, True, "ring", "zigzag").sum()
    loss, grads = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*(batch[n] for n in "qkv"))
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for got, grad in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, grad, rtol=1e-5, atol=1e-5)


def test_a_token_that_sees_nothing_gets_zero_and_makes_no_gradient_nan():
    q = jnp.asarray(inputs()["q"])
    f = lambda q: attention(q, q, q, causal=True, mask=jnp.zeros((B, T), bool))
    out, back = jax.jit(lambda q: jax.vjp(f, q))(q)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(back(out + 1)[0], 0)


def said(f):
    with pytest.raises(ValueError) as e:
        meshdp.distributed(
            lambda state, batch: (state, f()), mesh=meshdp.make_mesh(data=2, seq=2, tensor=2)
        )({"w": jnp.zeros(8)}, np.ones(2))
    return str(e.value)


def test_every_argument_that_does_not_fit_is_named_at_once():
    x = lambda *shape: jnp.zeros(shape)
    call = lambda: attention(
        x(3, 31, 4, 8),
        x(3, 31, 3, 8),
        x(3, 31, 4, 8),
        mask=x(3, 2),
        segment_ids=x(31),
        method="rng",
        order="spiral",
    )
    assert said(call) == (
        "attention cannot use these arguments:\n"
        '  method: \'rng\'; it takes "ring" or "ulysses"\n'
        '  order: \'spiral\'; it takes "natural" or "zigzag"\n'
        "  k: shape (3, 31, 3, 8); to fit q it takes (3, 31, kv_heads, 8), where kv_heads "
        "divides 4\n"
        "  v: shape (3, 31, 4, 8); to fit k its first three are (3, 31, 3)\n"
        "  batch: 3 examples do not divide by data*fsdp=2; give 2 or 4\n"
        "  tokens: 31 do not divide by seq=2; give 30 or 32\n"
        "  kv_heads: 3 do not divide by tensor=2; give 2 or 4\n"
        "  mask: shape (3, 2); it takes [batch, tokens], (3, 31)\n"
        "  segment_ids: shape (31,); it takes [batch, tokens], (3, 31)"
    )


def test_too_few_heads_of_keys_may_be_repeated():
    q, k = jnp.zeros((2, 8, 8, 4)), jnp.zeros((2, 8, 2, 4))
    assert said(lambda: attention(q, k, k, method="ulysses")) == (
        "attention cannot use these arguments:\n"
        '  kv_heads: 2 do not divide by seq*tensor=4; give 4, or method="ring", or repeat '
        "each: jnp.repeat(k, 2, axis=2), and v likewise"
    )


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError) as e:
        attention([1.0], [2.0], jnp.zeros((1, 1, 1, 1)))  # type: ignore[arg-type]
    assert str(e.value) == (
        "attention takes arrays, but q is a list, k is a list. Use jnp.asarray."
    )


def test_zigzag_names_every_array_that_cannot_be_cut():
    batch = {"x": jnp.zeros((2, 6)), "lengths": jnp.zeros(2), "y": jnp.zeros((2, 8))}
    assert said(lambda: zigzag(batch)) == (
        "zigzag over seq=2 cuts dimension 1, the tokens, into 4 chunks:\n"
        "  ['lengths']: shape (2,) has no such dimension; leave it out\n"
        "  ['x']: shape (2, 6); give 4 or 8 tokens"
    )
