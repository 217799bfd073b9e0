"""What the parallel blocks say when sizes do not fit. Nothing is compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp import _jaxapi
from meshdp.parallel import (
    attention,
    bubble,
    columns,
    cross_entropy,
    embed,
    experts,
    megatron,
    pipeline,
    pipeline_loss,
    route,
    row,
    zigzag,
)


def said(f, *shapes, **sizes):
    """The words of the error that `f` raises on arrays of these shapes, on this mesh."""
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    with _jaxapi.tracing_mesh(meshdp.make_mesh(**sizes)), pytest.raises(ValueError) as e:
        jax.eval_shape(f, *arrays)
    return str(e.value)


def test_attention_names_every_size_that_does_not_divide():
    f = lambda q, k: attention(q, k, k, causal=True, order="zigzag")
    assert said(f, (3, 12, 6, 8), (3, 12, 3, 8), data=2, seq=2, tensor=2) == (
        "attention cannot use these arguments:\n"
        "  batch: 3 examples do not divide by data*fsdp=2; give 2 or 4\n"
        "  kv_heads: 3 do not divide by tensor=2; give 2 or 4, or repeat each: "
        "jnp.repeat(k, 2, axis=2), and v likewise"
    )
    assert said(f, (2, 10, 6, 8), (2, 10, 2, 8), data=2, seq=2, tensor=2) == (
        "attention cannot use these arguments:\n"
        "  tokens: 10 do not divide by 2 * seq=4 (zigzag); give 8 or 12"
    )


def test_ulysses_says_that_the_ring_has_no_such_limit():
    f = lambda q, k: attention(q, k, k, method="ulysses")
    assert said(f, (2, 8, 4, 8), (2, 8, 2, 8), seq=8) == (
        "attention cannot use these arguments:\n"
        '  kv_heads: 2 do not divide by seq*tensor=8; give 8, or method="ring"'
    )


def test_attention_names_every_argument_of_the_wrong_shape():
    f = lambda q, k, v, m: attention(q, k, v, mask=m, method="rings", order="zig")
    assert said(f, (2, 8, 4, 8), (2, 8, 3, 8), (2, 8, 4, 8), (8,), data=8) == (
        "attention cannot use these arguments:\n"
        '  method: \'rings\'; it takes "ring" or "ulysses"\n'
        '  order: \'zig\'; it takes "natural" or "zigzag"\n'
        "  k: shape (2, 8, 3, 8); to fit q it takes (2, 8, kv_heads, 8), where kv_heads "
        "divides 4\n"
        "  v: shape (2, 8, 4, 8); to fit k its first three are (2, 8, 3)\n"
        "  batch: 2 examples do not divide by data*fsdp=8; give 8\n"
        "  mask: shape (8,); it takes [batch, tokens], (2, 8)"
    )


def test_zigzag_says_how_many_tokens_would_do():
    assert said(zigzag, (2, 12), seq=4, data=2) == (
        "zigzag over seq=4 cuts dimension 1, the tokens, into 8 chunks:\n"
        "  x: shape (2, 12); give 8 or 16 tokens"
    )


def test_a_block_refuses_an_axis_that_is_manual_already():
    def f(q):
        inside = lambda q: attention(q, q, q)
        return _jaxapi.shard_map(
            inside, in_specs=P(None, "seq"), out_specs=P(None, "seq"), axis_names={"seq"}
        )(q)

    assert said(f, (2, 8, 2, 4), seq=8) == (
        "attention works over the mesh axis 'seq', which is manual already where it is called: "
        "it stands inside a shard_map over 'seq'. Call it outside of that, or leave 'seq' out "
        "of that shard_map's axis_names."
    )


def test_an_order_of_axes_that_would_end_the_process_is_refused(monkeypatch):
    monkeypatch.setattr(_jaxapi, "nested_axes_must_follow", lambda: True)

    def f(w, x):
        inside = lambda w, x: pipeline(lambda w, x, _: x + w, w, x, microbatches=4)
        spec = P(None, "tensor")
        return _jaxapi.shard_map(
            inside, in_specs=(P(), spec), out_specs=spec, axis_names={"tensor"}
        )(w, x)

    assert said(f, (4,), (4, 8), stage=4, tensor=2) == (
        "pipeline needs 'data', 'fsdp', 'stage' inside a shard_map over 'tensor', which the "
        f"compiler of jax {jax.__version__} cannot do when the outer axis comes later in the "
        "mesh (it aborts the process). The axes lie in the order data, fsdp, stage, expert, "
        "seq, tensor: make the earlier ones manual first."
    )


def test_a_pipeline_names_every_size_that_does_not_fit():
    f = lambda w, x: pipeline(lambda w, x, _: x, w, x, microbatches=2)
    assert said(f, (6, 8), (12, 8), stage=4, data=2) == (
        "pipeline cannot use these sizes:\n"
        "  layers: 6 do not divide by stage=4; give 4 or 8\n"
        "  microbatches: 2, fewer than stage=4; give 6"
    )
    f = lambda w, x: pipeline(lambda w, x, _: x, w, x, microbatches=5, repeats=2)
    assert said(f, (2, 6), (24, 8), stage=4, data=2) == (
        "pipeline cannot use these sizes:\n"
        "  layers of each of 2 repeats: 6 do not divide by stage=4; give 4 or 8\n"
        "  microbatches: 5, which do not divide the 12 examples of a group of devices; give 4 "
        "or 6"
    )
    assert said(f, (3, 4), (3, 8), stage=4, data=2) == (
        "pipeline cannot use these sizes:\n"
        "  params: the first dimension is 3; repeats=2 takes [2, layers / 2, ...]\n"
        "  batch: 3 examples do not divide by data*fsdp=2; give 2 or 4"
    )


def test_pipeline_loss_checks_its_sizes_likewise():
    f = lambda w, x: pipeline_loss(
        lambda w, b: b, lambda w, x, b: x, lambda w, x, b: x, ((), w, ()), x, microbatches=0
    )
    assert said(f, (8,), (8, 8), stage=8) == (
        "pipeline_loss cannot use these arguments:\n"
        "  microbatches: 0; it takes a whole number from 1"
    )


@pytest.mark.parametrize("stages", [1, 4])
def test_a_layer_that_returns_another_x_is_told_what_it_was_given(stages):
    f = lambda w, x: pipeline(
        lambda w, x, _: {"a": x["a"].astype(jnp.bfloat16), "b": x["b"][:, 1:]},
        w,
        {"a": x, "b": x},
        microbatches=4,
    )
    rows = 8 if stages == 1 else 1
    assert said(f, (4, 8), (8, 8), stage=stages, data=8 // stages) == (
        "A layer of pipeline must return x as it was given it, for the next layer (shapes of "
        "a microbatch on one device):\n"
        f"  x['a']: float32[{rows}, 8] became bfloat16[{rows}, 8]\n"
        f"  x['b']: float32[{rows}, 8] became float32[{rows}, 7]\n"
        "Make the change outside of the layers, or cast back what changed."
    )


@pytest.mark.parametrize("stages", [1, 4])
def test_a_pipeline_loss_says_what_its_last_function_returned(stages):
    f = lambda w, x: pipeline_loss(
        lambda w, b: b,
        lambda w, x, b: x,
        lambda w, x, b: x.mean(),
        ((), w, ()),
        x,
        microbatches=4,
    )
    assert said(f, (4, 8), (8, 8), stage=stages, data=8 // stages) == (
        "last of pipeline_loss returned an array of shape (). Return meshdp.Mean.of(losses, "
        "mask), with one loss for each example or token."
    )


def test_an_interleaved_pipeline_loss_takes_as_many_microbatches_as_stages_together():
    def f(w, x, microbatches):
        functions = lambda w, b: b, lambda w, x, b: x, lambda w, x, b: x
        sizes = dict(microbatches=microbatches, repeats=2)
        return pipeline_loss(*functions, ((), w, ()), x, **sizes)

    assert said(lambda w, x: f(w, x, 6), (2, 4), (24, 8), stage=4, data=2) == (
        "pipeline_loss cannot use these sizes:\n"
        "  microbatches: 6, which do not divide by stage=4, as repeats=2 takes; give 4 or 12"
    )
    assert said(lambda w, x: f(w, x, 4), (2, 4), (12, 8), stage=4, data=2) == (
        "pipeline_loss cannot use these sizes:\n"
        "  microbatches: 4, which do not divide the 6 examples of a group of devices; give a "
        "multiple of 4 examples to each group of devices"
    )


def test_the_bubble_is_that_of_the_papers():
    assert bubble(4, 4) == 3 / 7
    assert bubble(4, 4, repeats=2) == 3 / 11
    assert bubble(1, 4) == 0
    assert bubble(4, 8, zero_bubble=True) == 9 / 41
    assert bubble(4, 8, zero_bubble=True, remat=False) == 6 / 30


def test_experts_name_every_size_that_does_not_fit():
    def f(w, x):
        return experts(lambda p, x, rows: x, w, x, route(jnp.zeros((*x.shape[:2], 6)), 2))

    assert said(f, (5, 8), (3, 6, 8), data=2, expert=4) == (
        "experts cannot use these arguments:\n"
        "  params: first dimensions (5,); the router has 6 experts, so each takes (6, ...)\n"
        "  batch: 3 examples do not divide by data*fsdp=2; give 2 or 4\n"
        "  tokens: 6 do not divide by expert=4; give 4 or 8\n"
        "  experts: 6 do not divide by expert=4; give 4 or 8"
    )


def test_route_names_what_does_not_fit():
    f = lambda x, mask: route(x, 7, mask=mask)
    assert said(f, (2, 4, 6), (2, 3), data=8) == (
        "route cannot use these arguments:\n"
        "  top_k: 7; it takes a whole number from 1 to the 6 experts\n"
        "  mask: shape (2, 3); it takes (2, 4)"
    )


def test_tensor_parallel_layers_say_which_sizes_would_do():
    assert said(columns, (2, 4, 8), (6, 8), data=2, tensor=4) == (
        "columns: 6 outputs of a weight of shape (6, 8) do not divide by tensor=4. Use 4 or 8."
    )
    assert said(row, (2, 4, 6), (8, 6), data=2, tensor=4) == (
        "row: 6 inputs of a weight of shape (8, 6) do not divide by tensor=4. Use 4 or 8."
    )
    f = lambda x, w: row(x, w, sequence=True)
    assert said(f, (3, 6, 8), (8, 8), data=2, tensor=4) == (
        "row cannot split x:\n"
        "  batch: 3 examples do not divide by data*fsdp=2; give 2 or 4\n"
        "  tokens: 6 do not divide by seq*tensor=4; give 4 or 8"
    )
    f = lambda table: embed(table, jnp.zeros((2, 4), int))
    assert said(f, (255, 8), data=2, tensor=4) == (
        "embed: 255 outputs of a weight of shape (255, 8) do not divide by tensor=4. Use 252 "
        "or 256."
    )


def test_cross_entropy_says_which_vocabulary_would_do():
    f = lambda logits: cross_entropy(logits, jnp.zeros((2, 4), int))
    assert said(f, (2, 4, 255), data=2, tensor=4) == (
        "cross_entropy: 255 classes do not divide by tensor=4. Use 252 or 256: pad the "
        "vocabulary."
    )
    assert said(f, (2, 5, 256), data=2, tensor=4) == (
        "cross_entropy takes one label for each row of logits, but logits have the shape "
        "(2, 5, 256) and labels (2, 4). Give labels of shape (2, 5)."
    )


def test_megatron_refuses_a_name_in_two_lists():
    with pytest.raises(ValueError) as e:
        megatron({"up": jnp.zeros((4, 4))}, columns={"up"}, rows={"up"})
    assert str(e.value) == (
        "megatron: 'up' in more than one of columns, rows and tables. A matrix is split one "
        "way: keep each name in one."
    )
