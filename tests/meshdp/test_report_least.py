"""Our own training steps against the least that their mesh allows."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp.report._devices import Device
from meshdp.report._hlo import Collective
from meshdp.report._least import against
from meshdp.report._report import report
from meshdp.report._tensor_least import reshaped, tensor_bytes
from meshdp.report._train_least import _weight_bytes

HAND = Device(kind="hand", flops=1e12, memory=1e11, link=1e10, network=1e9)
LAYERS, WIDTH, HEADS, HIDDEN, VOCAB, ROWS, TOKENS = 3, 64, 8, 256, 128, 16, 8


def make_model(key):
    keys = jax.random.split(key, 6)
    draw = lambda k, *shape: 0.05 * jax.random.normal(keys[k], shape)
    head = WIDTH // HEADS
    return {
        "embed": draw(0, VOCAB, WIDTH),
        "unembed": draw(1, WIDTH, VOCAB),
        "blocks": {
            # One product for q, k and v: three would have their gradients summed apart.
            "qkv": draw(2, LAYERS, WIDTH, HEADS, 3 * head),
            "out": draw(3, LAYERS, HEADS, head, WIDTH),
            "up": draw(4, LAYERS, WIDTH, HIDDEN),
            "down": draw(5, LAYERS, HIDDEN, WIDTH),
        },
    }


def loss_fn(model, batch, keys):
    normed = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    split = lambda x: meshdp.constrain(x, P(None, None, "tensor"))
    whole = lambda x: meshdp.constrain(x, P())

    def block(x, w):
        q, k, v = jnp.split(split(jnp.einsum("btd,dhk->bthk", normed(x), w["qkv"])), 3, -1)
        scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
        mixed = split(jnp.einsum("bhts,bshk->bthk", scores, v))
        x = x + whole(jnp.einsum("bthk,hkd->btd", mixed, w["out"]))
        return x + whole(split(jax.nn.gelu(normed(x) @ w["up"])) @ w["down"]), None

    x, _ = jax.lax.scan(block, model["embed"][batch["x"]], model["blocks"])
    logits = normed(x) @ model["unembed"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return meshdp.Mean.of(losses)


LAYOUT = meshdp.by_path(
    {
        r"'(qkv|up)'": P(None, None, "tensor"),
        r"'(out|down)'": P(None, "tensor"),
    }
) | meshdp.fsdp(min_size=2**10)


def reported(sizes, **options):
    mesh = meshdp.make_mesh(**sizes)
    step = meshdp.make_train_step(
        loss_fn, optax.adam(1e-3), mesh=mesh, layout=LAYOUT, skip=False, **options
    )
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)

    def make_state(key):  # only its shapes are needed
        model = make_model(key)
        return meshdp.TrainState(model, optax.adam(1e-3).init(model), jnp.zeros((), int), key)

    state = jax.eval_shape(make_state, jax.random.key(0))
    return report(step, state, {"x": tokens, "y": tokens}, device=HAND)


slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "sizes, options",
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
        ({"fsdp": 8}, {}),
        slow({"data": 8}, {}),
        slow({"data": 8}, {"accumulate": 2, "shard_update": False}),
        slow({"fsdp": 8}, {"accumulate": 2, "gather": "step"}),
        slow({"tensor": 8}, {}),
        slow({"data": 2, "fsdp": 4}, {"accumulate": 2}),
    ],
    ids=lambda v: "_".join(f"{k}{n}" for k, n in v.items()) or "plain",
)
def test_our_steps_send_hardly_more_than_they_must(sizes, options):
    least = reported(sizes, **options).least
    assert {a for s in least.shares for a in s.axes} == {a for a, n in sizes.items() if n > 1}
    assert {s.axes: s.ratio for s in least.shares if s.ratio > 1.05} == {}
    # Nor does the report ask for what no step could do: half of the least was sent at least.
    assert all(s.ratio > 0.5 for s in least.shares)


def least_of(loss, inputs, *shapes):
    """Operand bytes for inputs given as (split dimension or None, trained)."""
    closed = jax.make_jaxpr(loss)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    flags = [
        (tuple(d == at for d in range(len(s))), trained)
        for (at, trained), s in zip(inputs, shapes, strict=True)
    ]
    return tensor_bytes(closed, flags)


# x: [5, 8], up: [8, 16] split along its columns, down: [16, 8] split along its rows.
MLP = ((5, 8), (8, 16), (16, 8))


def mlp(x, up, down):
    return jnp.sum(jnp.tanh(x @ up) @ down)


@pytest.mark.parametrize("x_trained, all_reduces", [(True, 2), (False, 1)])
def test_a_split_block_sums_its_result_and_the_gradient_of_its_input(x_trained, all_reduces):
    found = least_of(mlp, [(None, x_trained), (1, True), (0, True)], *MLP)
    assert found == all_reduces * 4 * 5 * 8


def test_a_block_that_is_not_split_sums_nothing():
    assert least_of(mlp, [(None, True)] * 3, *MLP) == 0


def test_products_that_share_their_input_sum_its_gradient_once():
    loss = lambda x, a, b: jnp.sum(jnp.tanh(x @ a) * (x @ b))
    found = least_of(loss, [(None, True), (1, True), (1, True)], (5, 8), (8, 16), (8, 16))
    # The gradient of x, and the scalar loss, which is a sum over the split columns.
    assert found == 4 * 5 * 8 + 4


def test_scanned_layers_sum_as_often_as_they_run():
    def loss(x, up, down):
        layer = lambda h, w: (h + jnp.tanh(h @ w[0]) @ w[1], None)
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, (up, down))[0])

    shapes = (5, 8), (3, 8, 16), (3, 16, 8)
    assert least_of(loss, [(None, True), (2, True), (1, True)], *shapes) == 3 * 2 * 4 * 5 * 8


def test_split_heads_attend_without_a_word():
    def loss(x, qkv, out):
        q, k, v = jnp.einsum("td,cdhk->cthk", x, qkv)
        scores = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k))
        return jnp.sum(jnp.einsum("hts,shk,hkd->td", scores, v, out))

    found = least_of(
        loss, [(None, True), (2, True), (0, True)], (5, 8), (3, 8, 4, 2), (4, 2, 8)
    )
    assert found == 2 * 4 * 5 * 8


def test_a_softmax_over_a_split_vocabulary_sums_one_number_a_token_three_times():
    def loss(x, out, target):
        logits = x @ out
        return jnp.sum(jax.nn.logsumexp(logits, -1)) - jnp.sum(logits * target)

    found = least_of(loss, [(None, True), (1, True), (1, False)], (5, 8), (8, 16), (5, 16))
    # The gradient of x; per token a maximum and a sum; and the scalar that picks the targets.
    assert found == 4 * 5 * 8 + 2 * 4 * 5 + 4


def test_a_branch_counts_what_either_way_needs():
    def loss(x, up, down):
        return jax.lax.cond(x[0, 0] > 0, mlp, lambda x, up, down: jnp.sum(x), x, up, down)

    assert least_of(loss, [(None, True), (1, True), (0, True)], *MLP) == 0


@pytest.mark.parametrize(
    "before, after, at, to",
    [
        ((4, 6), (24,), 0, 0),
        ((4, 6), (24,), 1, None),  # the fast one of two that are merged
        ((24,), (4, 6), 0, 0),
        ((2, 3, 4), (2, 12), 1, 1),
        ((2, 1, 4), (2, 4), 2, 1),
        ((2, 4), (2, 1, 2, 2), 1, 2),
    ],
)
def test_a_split_dimension_is_followed_through_a_reshape(before, after, at, to):
    split = reshaped([d == at for d in range(len(before))], before, after)
    assert split == tuple(d == to for d in range(len(after)))


def split_over(**axes):
    return {"data": 1, "fsdp": 1, "tensor": 1, **axes}


@pytest.mark.parametrize(
    "dims, sizes, options, sent",
    [
        # 4096 bytes; all-reduce over 8: 2 * 7/8.
        (((), ()), split_over(data=8), (1, "microbatch"), 7168),
        # Gathered twice, reduce-scattered once.
        ((("fsdp",), ()), split_over(fsdp=8), (1, "microbatch"), 3 * 3584),
        # Each of two microbatches does.
        ((("fsdp",), ()), split_over(fsdp=8), (2, "microbatch"), 6 * 3584),
        ((("fsdp",), ()), split_over(fsdp=8), (2, "step"), 2 * 3584),
        # A half of it over tensor; then 3 * 1/2 of 2048, and 2 * 1/2 of the 1024 that are left.
        (
            (("fsdp",), ("tensor",)),
            split_over(data=2, fsdp=2, tensor=2),
            (1, "microbatch"),
            3072 + 1024,
        ),
        # Whole over fsdp as well: one all-reduce over both.
        (((), ()), split_over(data=2, fsdp=4), (1, "microbatch"), 7168),
    ],
)
def test_the_least_for_a_weight_follows_its_layout(dims, sizes, options, sent):
    weight = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert _weight_bytes(weight, dims, sizes, *options) == sent


def test_weights_gathered_in_half_precision_count_half():
    weight = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    sizes, dims = split_over(data=2, fsdp=4), (("fsdp",), ())
    sent = _weight_bytes(weight, dims, sizes, 1, "microbatch", reduced=jnp.float32)
    # 3 * 3/4 of 2048 in bfloat16, then 2 * 1/2 of the quarter that is left, in float32.
    assert sent == 3 * 1536 + 1024


def test_weights_that_do_not_train_are_gathered_and_nothing_else():
    weight = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    sizes, dims = split_over(data=2, fsdp=4), (("fsdp",), ())
    sent = _weight_bytes(weight, dims, sizes, 1, "microbatch", trains=False)
    assert sent == 2 * 3072


def test_every_collective_is_set_against_one_share():
    def over(*axes):
        return Collective(
            kind="all-reduce",
            axes=axes,
            dtype="f32",
            shape=(1,),
            bytes=4,
            sent_bytes=100,
            count=1,
            loop_depth=0,
            source="",
            op_name="",
        )

    found = [over("data"), over("fsdp", "tensor"), over("tensor"), over("seq")]
    least = against(found, {("data", "fsdp"): (100, ""), ("tensor",): (50, "")})
    assert [(s.axes, s.sent_bytes, s.ratio) for s in least.shares] == [
        (("data", "fsdp"), 200, 2.0),
        (("tensor",), 100, 2.0),
        (("seq",), 100, None),
    ]
    assert least.ratio == 2.0
