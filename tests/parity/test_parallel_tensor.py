"""A transformer block over `tensor` against Equinox's own parts on one device."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.parallel import columns, cross_entropy, embed, megatron, mlp, row, self_attention
from meshdp.report._hlo import collectives

ROWS, TOKENS, WIDTH, HEADS, VOCAB = 4, 8, 16, 4, 24


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    scale: jax.Array
    head: eqx.nn.Linear

    def __init__(self, key):
        k = jax.random.split(key, 4)
        bias = dict(use_query_bias=True, use_key_bias=True, use_value_bias=True)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=k[0])
        self.attention = eqx.nn.MultiheadAttention(
            HEADS, WIDTH, use_output_bias=True, key=k[1], **bias
        )
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=k[2])
        self.scale = jnp.linspace(0.5, 1.5, WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=k[3])


def batch():
    rng = np.random.default_rng(0)
    return {n: rng.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32) for n in "xy"}


def norm(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[None, None]


EVERYTHING = np.ones((ROWS, TOKENS, WIDTH), np.float32)


@jax.jit
def keys_of(key):
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(ROWS))


@jax.jit
def kept(keys):
    return jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (TOKENS, WIDTH)) / 0.8)(keys)


def block(model, x, sequence, keep=EVERYTHING):
    h = self_attention(model.attention, norm(x, model.scale), causal=True, sequence=sequence)
    x = x + h * keep
    return x + mlp(model.mlp, norm(x, model.scale), sequence=sequence)


def total(model, data, keep=EVERYTHING, sequence=False):
    x = block(model, embed(model.embed, data["x"]), sequence, keep)
    (logits,) = columns(x, model.head)
    return cross_entropy(logits, data["y"]).sum()


@eqx.filter_jit
def oracle(keep):
    """Equinox's parts, one example and one token at a time."""
    data = batch()
    causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))

    def one(model, tokens, labels, keep):
        x = jax.vmap(model.embed)(tokens)
        h = norm(x[None], model.scale)[0]
        x = x + model.attention(h, h, h, mask=causal) * keep
        x = x + jax.vmap(model.mlp)(norm(x[None], model.scale)[0])
        logits = jax.vmap(model.head)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    def loss(model):
        return jax.vmap(one, (None, 0, 0, 0))(model, data["x"], data["y"], keep).sum()

    return eqx.filter_value_and_grad(loss)(Model(jax.random.key(0)))


def arrays(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def check(loss, grads, keep=EVERYTHING, divisor=1):
    want, want_grads = oracle(keep)
    np.testing.assert_allclose(loss, want / divisor, rtol=1e-5)
    largest = max(np.abs(g).max() for g in arrays(want_grads))
    for got, expected in zip(arrays(grads), arrays(want_grads), strict=True):
        # The gradient of a key's bias is 0 but for rounding.
        scale = max(np.abs(expected).max(), largest / 100) / divisor
        np.testing.assert_allclose(got, expected / divisor, rtol=1e-5, atol=1e-5 * scale)


def layout():
    return megatron(eqx.filter_eval_shape(Model, jax.random.key(0))) | meshdp.replicate()


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_a_block_in_a_train_step_has_the_values_and_gradients_of_equinox(sequence):
    mesh = meshdp.make_mesh(data=2, seq=2, tensor=2)
    step = meshdp.make_train_step(
        lambda model, data, keys: meshdp.Mean(
            total(model, data, kept(keys), sequence), data["x"].shape[0]
        ),
        optax.sgd(1.0),
        mesh=mesh,
        layout=layout(),
    )
    state = step.init(Model, jax.random.key(0))
    grads, metrics = step.gradients(state, batch())
    keep = kept(keys_of(jax.random.fold_in(state.key, state.step)))
    check(metrics["loss"], grads, keep, ROWS)
    assert state.model.mlp.layers[0].weight.sharding.spec == P("tensor")


def test_under_automatic_axes_too_and_without_a_mesh():
    mesh = meshdp.make_mesh(data=2, tensor=4)
    gradient = eqx.filter_value_and_grad(total)
    step = meshdp.distributed(
        lambda model, data: (model, gradient(model, data)), mesh=mesh, layout=layout()
    )
    model = step.init(Model, jax.random.key(0))
    check(*step(model, batch())[1])
    check(*eqx.filter_jit(gradient)(Model(jax.random.key(0)), batch()))


@functools.cache
def traffic(sequence, backward):
    """(kind, share of the activations of one device in each message) over `tensor`."""
    mesh = meshdp.make_mesh(data=2, tensor=4)

    def forward(model, data):
        x = meshdp.constrain(data["h"], P(("data", "fsdp"), "tensor" if sequence else None))
        y = block(model, x, sequence)
        return (y * data["g"]).sum()

    def step(model, data):
        if not backward:
            return model, forward(model, data)
        grads = eqx.filter_grad(lambda both: forward(*both))((model, data))
        return model, grads

    step = meshdp.distributed(step, mesh=mesh, layout=layout())
    model = eqx.filter_eval_shape(Model, jax.random.key(0))
    data = {n: np.ones((ROWS, TOKENS, WIDTH), np.float32) for n in "hg"}
    found = collectives(step.lower(model, data).compile(), mesh)
    large = [c for c in found if "tensor" in c.axes and c.bytes >= 4 * TOKENS * WIDTH // 4]
    return sorted(c.kind for c in large)


def test_a_block_sums_over_tensor_twice_forward_and_twice_backward():
    assert traffic(False, False) == ["all-reduce"] * 2
    assert traffic(False, True) == ["all-reduce"] * 4


def test_with_sequence_parallel_norms_each_sum_is_a_scatter_and_a_gather():
    assert traffic(True, False) == ["all-gather"] * 2 + ["reduce-scatter"] * 2
    assert traffic(True, True) == ["all-gather"] * 4 + ["reduce-scatter"] * 4


def test_in_a_train_step_weights_travel_over_fsdp_as_shards_of_tensor():
    shapes = eqx.filter_eval_shape(Model, jax.random.key(0))
    step = meshdp.make_train_step(
        lambda model, data, keys: meshdp.Mean(total(model, data, EVERYTHING[:1]), 1.0),
        optax.sgd(1.0),
        mesh=meshdp.make_mesh(fsdp=2, tensor=4),
        layout=megatron(shapes) | meshdp.fsdp(min_size=1),
    )
    found = collectives(
        step.lower(step.init(Model, jax.random.key(0)), batch()).compile(), step.mesh
    )
    large = [c for c in found if c.bytes >= 4 * 4 * WIDTH]
    # Embedding and head have half a block's: one forward, one backward.
    assert [c.kind for c in large if "tensor" in c.axes] == ["all-reduce"] * 6
    fsdp = [c for c in large if c.axes == ("fsdp",)]
    assert {c.kind for c in fsdp} == {"all-gather", "reduce-scatter"}
    assert max(c.bytes for c in fsdp) <= 4 * (4 * WIDTH * WIDTH // 4)
    assert len(large) == 6 + len(fsdp)


def test_the_logits_are_never_gathered():
    mesh = meshdp.make_mesh(data=2, tensor=4)

    def step(state, data):
        f = lambda logits: cross_entropy(logits, data["y"]).sum()
        return jax.value_and_grad(f)(state)[::-1]

    spec = meshdp.by_path({"": P(("data", "fsdp"), None, "tensor")})
    step = meshdp.distributed(step, mesh=mesh, layout=spec)
    logits = np.zeros((ROWS, TOKENS, VOCAB), np.float32)
    found = collectives(step.lower(logits, batch()).compile(), mesh)
    assert {c.kind for c in found} == {"all-reduce"}
    # At most the sum of exponentials and the label's logit of each token.
    assert max(c.bytes for c in found) <= 2 * 4 * (ROWS // 2) * TOKENS


def test_megatron_states_the_layout_of_what_it_knows():
    shapes = eqx.filter_eval_shape(Model, jax.random.key(0))
    found = meshdp.specs(shapes, megatron(shapes), {"tensor": 4})
    assert found.embed.weight == P("tensor")
    assert found.attention.query_proj.weight == P("tensor")
    assert found.attention.query_proj.bias == P("tensor")
    assert found.attention.output_proj.weight == P(None, "tensor")
    assert found.attention.output_proj.bias == P()
    assert [layer.weight for layer in found.mlp.layers] == [P("tensor"), P(None, "tensor")]
    assert found.scale == P()
    assert found.head.weight == P("tensor")


def test_megatron_counts_the_dimensions_of_stacked_layers_from_the_end():
    shapes = {"blocks": {"up": np.zeros((3, 8, 4)), "down": np.zeros((3, 4, 8))}}
    found = meshdp.specs(shapes, megatron(shapes), {"tensor": 4})
    assert found["blocks"] == {"up": P(None, "tensor"), "down": P(None, None, "tensor")}


def test_megatron_refuses_a_model_of_which_it_knows_nothing():
    with pytest.raises(ValueError) as e:
        megatron({"a": np.zeros((4, 4)), "b": np.zeros(4)})
    assert str(e.value) == (
        "megatron knows no part of this model: it has no equinox.nn.MultiheadAttention, MLP or "
        "Embedding, and no matrix of a name that it looks for. Its arrays: ['a'], ['b']. Give "
        'your own names: megatron(model, columns={"up"}, rows={"down"}), or write the layout '
        "with meshdp.by_path."
    )


def on(mesh, f, *args):
    step = meshdp.distributed(lambda state, args: (state, f(*args)), mesh=mesh)
    return step({"w": jnp.zeros(8)}, args)[1]


@pytest.fixture(params=[1, 4], ids=["one", "four"])
def mesh(request):
    n = request.param
    return meshdp.make_mesh(tensor=n, devices=jax.devices()[:n])


def test_negative_labels_are_ignored_and_too_large_ones_are_nan(mesh):
    logits = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    labels = np.array([[0, -1, 7, -100], [8, 1, 2, 3]], np.int32)
    f = lambda logits, labels: jax.value_and_grad(
        lambda x: jnp.nan_to_num(cross_entropy(x, labels)).sum()
    )(logits)
    losses, (_, grads) = on(mesh, lambda *a: (cross_entropy(*a), f(*a)), logits, labels)
    want = optax.softmax_cross_entropy_with_integer_labels(logits, np.clip(labels, 0, 7))
    want = np.where(labels < 0, 0, np.where(labels > 7, np.nan, want))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(grads)[labels < 0], 0)
    assert np.isfinite(grads).all()


def test_tokens_past_the_table_are_looked_up_as_jax_does(mesh):
    table = jnp.arange(16.0).reshape(8, 2)
    tokens = np.array([[0, 7, -1, -9], [8, 100, -8, 3]], np.int32)
    got = on(mesh, lambda tokens: embed(table, tokens), tokens)
    np.testing.assert_array_equal(got, table[tokens])


def test_an_mlp_of_scalars_is_that_of_equinox():
    module = eqx.nn.MLP("scalar", "scalar", 8, 1, key=jax.random.key(0))
    x = jnp.arange(4.0).reshape(2, 2)
    np.testing.assert_allclose(mlp(module, x), jax.vmap(jax.vmap(module))(x), rtol=1e-6)


def attend(**how):
    module = eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0), **how)
    return self_attention(module, jnp.zeros((2, 4, 4)))


@pytest.mark.parametrize(
    "f, words",
    [
        (
            lambda: columns(jnp.zeros((2, 4, 16)), jnp.zeros((8, 16)), jnp.zeros((8, 17))),
            """columns: x has the shape (2, 4, 16), but a weight of shape (8, 17) takes 17 in
            the last dimension. Weights are [out, in].""",
        ),
        (
            lambda: row(jnp.zeros((2, 4, 16)), jnp.zeros((2, 3, 4))),
            """row takes equinox.nn.Linear layers or weights of shape [out, in], not an array of
            shape (2, 3, 4).""",
        ),
        (
            lambda: cross_entropy(jnp.zeros((2, 4, 8)), jnp.zeros((2, 4))),
            """cross_entropy takes labels as integers, but their dtype is float32. Use
            labels.astype(jnp.int32).""",
        ),
        (
            lambda: attend(dropout_p=0.5),
            """self_attention drops no attention weights, but the module has dropout_p=0.5. Make
            it with dropout_p=0 (and drop from what it returns, if need be), or call
            eqx.nn.inference_mode on it.""",
        ),
        (
            lambda: megatron({"up": jnp.zeros((4, 4))}, columns="up"),
            "megatron takes columns as a set of names, not 'up': give {'up'}.",
        ),
    ],
    ids=["width", "weight", "labels", "dropout", "megatron"],
)
def test_what_does_not_fit_is_refused_in_words(f, words):
    with pytest.raises(ValueError) as e:
        f()
    assert str(e.value) == " ".join(words.split())


@pytest.mark.parametrize(
    "f, words",
    [
        (
            lambda: row(jnp.zeros((2, 4, 30)), jnp.zeros((8, 30))),
            """row: 30 inputs of a weight of shape (8, 30) do not divide by tensor=4. Use 28 or
            32.""",
        ),
        (
            lambda: columns(jnp.zeros((3, 6, 8)), jnp.zeros((8, 8)), sequence=True),
            """columns cannot split x: batch: 3 examples do not divide by data*fsdp=2; give 2 or
            4 tokens: 6 do not divide by seq*tensor=4; give 4 or 8""",
        ),
        (
            lambda: cross_entropy(jnp.zeros((2, 27)), jnp.zeros(2, jnp.int32)),
            """cross_entropy: 27 classes do not divide by tensor=4. Use 24 or 28: pad the
            vocabulary.""",
        ),
    ],
    ids=["inputs", "tokens", "classes"],
)
def test_what_does_not_divide_is_refused_in_words(f, words):
    with pytest.raises(ValueError) as e:
        on(meshdp.make_mesh(data=2, tensor=4), lambda _: f(), np.ones(2))
    assert " ".join(str(e.value).split()) == " ".join(words.split())


def test_outside_of_the_experts_their_axis_shares_the_examples():
    mesh = meshdp.make_mesh(data=2, expert=4)
    x = jax.device_put(np.ones((8, 4, 16)), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        (y,) = jax.jit(lambda x: columns(x, jnp.ones((8, 16))))(x)
    assert y.sharding.shard_shape(y.shape) == (1, 4, 8)
