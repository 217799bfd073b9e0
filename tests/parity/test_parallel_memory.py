"""What moves and what is held: read from the compiled programs, hardly anything is run."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp import _jaxapi
from meshdp.parallel import attention, bubble, columns, pipeline, pipeline_loss, row
from meshdp.parallel._halves import Halves
from meshdp.parallel._schedule import Schedule
from meshdp.report._hlo import collectives
from meshdp.report._pipelines import Pipeline, table, words

SEQ = P(("data", "fsdp"), "seq")


def compiled(f, mesh, *args):
    """`f` on a mesh; `args` are pairs of a shape and a spec."""

    def traced(*args):
        with _jaxapi.tracing_mesh(mesh):
            return f(*args)

    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p)) for s, p in args
    ]
    return jax.jit(traced).lower(*shapes).compile()


def temporaries(program) -> int:
    return program.memory_analysis().temp_size_in_bytes


def ring_gradient(q, k, v):
    f = lambda q, k, v: attention(q, k, v, causal=True, order="zigzag").sum()
    return jax.grad(f, (0, 1, 2))(q, k, v)


def ring_on(devices, tokens):
    mesh = meshdp.make_mesh(seq=devices, devices=jax.devices()[:devices])
    shape = (1, tokens, 2, 8)
    return compiled(ring_gradient, mesh, *[(shape, SEQ)] * 3)


def test_a_ring_speaks_only_to_neighbours_forward_and_backward():
    text = ring_on(8, 64).as_text()
    kinds = re.findall(r"(all-gather|all-reduce|all-to-all|reduce-scatter)[\w-]*\(", text)
    assert kinds == []
    sent = re.findall(r"source_target_pairs=\{(\{[^=]*?\})\}", text)
    onward = {(i, (i + 1) % 8) for i in range(8)}
    pairs = [{tuple(map(int, p)) for p in re.findall(r"\{(\d+),(\d+)\}", s)} for s in sent]
    assert len(pairs) >= 6  # keys and values, there and back, and their gradients
    assert all(p == onward for p in pairs)


def test_memory_per_device_falls_with_the_number_of_devices():
    two, eight = (temporaries(ring_on(n, 8192)) for n in (2, 8))
    assert eight < 1.3 * two / 4


@pytest.mark.slow
def test_32k_tokens_run_where_plain_attention_needs_many_times_the_memory():
    tokens = 32768
    mesh = meshdp.make_mesh(seq=8)

    def plain(q, k, v):
        f = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True).sum()
        return jax.grad(f, (0, 1, 2))(q, k, v)

    whole = compiled(plain, mesh, *[((1, tokens, 1, 8), P())] * 3)
    natural = lambda q, k, v: attention(q, k, v, causal=True)
    ring = compiled(natural, mesh, *[((1, tokens, 1, 8), SEQ)] * 3)
    assert temporaries(whole) > 8 * temporaries(ring)

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, tokens, 1, 8)).astype(np.float32) for _ in range(3))
    out = np.asarray(ring(*(jax.device_put(x, NamedSharding(mesh, SEQ)) for x in (q, k, v))))
    for t in (0, 5000, tokens - 1):
        scores = k[0, : t + 1, 0] @ q[0, t, 0] / 8**0.5
        shares = np.exp(scores - scores.max())
        want = shares @ v[0, : t + 1, 0] / shares.sum()
        np.testing.assert_allclose(out[0, t, 0], want, rtol=1e-4, atol=1e-6)


WIDTH = 64


def test_a_pipeline_that_keeps_all_and_a_loop_that_was_changed_are_reported_as_such():
    schedule = Schedule("pipeline", stages=2, microbatches=3, remat=False)
    assert Schedule.read(f"jit(f)/jvp({schedule.scope})/while/ppermute") == schedule
    assert Schedule.read("jit(f)/jvp(my_pipeline)/while/ppermute") is None
    found = (Pipeline(schedule, 6, None, 1000), Pipeline(schedule, None, 8, 1000))
    zero = dataclasses.replace(schedule, block="pipeline_loss", zero_bubble=True)
    assert Schedule.read(f"jit(f)/{zero.scope}/ppermute") == zero
    assert words(found[:1], str)[2:] == (
        "As pipeline_loss, pipeline(stages=2,microbatches=3,repeats=1,whole) would keep 3000.",
        (
            "pipeline(stages=2,microbatches=3,repeats=1,whole) sends 6 times where 8 were "
            "predicted: the compiler has changed its loop."
        ),
    )
    assert table(found, str) == (
        ("pipeline", "2", "3", "1", "2 x 4", "6", "?", "25.0%", "0.0%", "1000", "all"),
        ("pipeline", "2", "3", "1", "4", "?", "8", "25.0%", "?", "1000", "all"),
    )


@functools.cache
def gradient_of(name, stages, microbatches, repeats=1, **options):
    """A pipeline's gradient, compiled, in microbatches of 64 rows, however many."""
    layer = lambda w, x, _: x + jnp.tanh(x @ w)

    def total(w, x):
        if name == "1f1b":
            first = lambda _, b: jnp.tile(b, (1, WIDTH))
            last = lambda _, x, b: meshdp.Mean.of((x * x).sum(-1))
            params = ((), w, ())
            sizes = dict(microbatches=microbatches, repeats=repeats, **options)
            return pipeline_loss(first, layer, last, params, x, **sizes).total
        x = jnp.tile(x, (1, WIDTH))
        y = pipeline(layer, w, x, microbatches=microbatches, repeats=repeats)
        return (y**2).sum()

    mesh = meshdp.make_mesh(stage=stages, devices=jax.devices()[:stages])
    lead, spec = ((), P("stage")) if repeats == 1 else ((repeats,), P(None, "stage"))
    weights = ((*lead, stages, WIDTH, WIDTH), spec)
    program = compiled(jax.grad(total), mesh, weights, ((64 * microbatches, 1), P()))
    return program, mesh


# Of a machine that there is not, so that nothing is measured.
HAND = meshdp.Device(kind="hand", flops=1e12, memory=1e11, link=1e10, network=1e9)


def reported(program, mesh):
    report = meshdp.report_compiled(program, mesh, device=HAND)
    lines = str(report).partition("\nPipeline\n--------\n")[2].split("\n\n")[0].splitlines()
    assert meshdp.Report.from_json(report.to_json()).pipelines == report.pipelines
    return report.pipelines, lines


@pytest.mark.parametrize(
    "name, p, m, v",
    [
        ("gpipe", 4, 6, 1),
        ("circular", 4, 5, 3),
        ("1f1b", 4, 6, 1),
        ("1f1b", 2, 4, 1),
        ("1f1b", 4, 8, 2),
    ],
)
def test_the_bubble_of_a_compiled_pipeline_is_the_predicted_one(name, p, m, v):
    program, mesh = gradient_of(name, p, m, v)
    # A device sends on once a tick, forward; 1F1B goes forward in m + p - 1 of its ticks.
    sends = [c for c in collectives(program, mesh) if c.kind == "collective-permute"]
    ticks = sum(c.count for c in sends if not re.search(r"transpose|/back/", c.op_name))
    assert 1 - v * m / ticks == pytest.approx(bubble(p, m, v))
    [found], _ = reported(program, mesh)
    assert found.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert (found.forward, found.passes) == (ticks, 1)
    assert ticks - 1 <= found.backward <= ticks
    assert found.bytes == 4 * 64 * WIDTH


def test_a_pipeline_run_for_each_of_three_batches_is_reported_as_three_passes():
    def grads(w, x):
        layer = lambda w, x, _: x + jnp.tanh(x @ w)
        loss = lambda w, x: (pipeline(layer, w, x, microbatches=2) ** 2).sum()
        step = lambda total, x: (total + jax.grad(loss)(w, x), None)
        return jax.lax.scan(step, w, x)[0]

    mesh = meshdp.make_mesh(stage=2, devices=jax.devices()[:2])
    program = compiled(grads, mesh, ((2, 8, 8), P("stage")), ((3, 4, 8), P()))
    [found], lines = reported(program, mesh)
    assert (found.passes, found.forward, found.backward, found.bubble) == (3, 9, 9, 1 / 3)
    assert lines[-1].split()[4:7] == ["3", "x", "3"]


def test_a_layer_of_split_weights_is_cut_into_three_equal_parts():
    def layer(w, x, rest):
        (h,) = columns(x, w["up"])
        return x + row(jnp.tanh(h), w["down"])

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    w, x = {"up": f32(32, 8), "down": f32(8, 32)}, f32(4, 3, 8)
    with _jaxapi.tracing_mesh(meshdp.make_mesh(tensor=8)):
        halves = Halves(layer, w, x, None)
        y, kept = jax.eval_shape(halves.forward, w, x, None)
        dx, saved = jax.eval_shape(halves.inputs, w, kept, y)
        products = lambda f, *args: str(jax.make_jaxpr(f)(*args)).count("dot_general")
        assert products(halves.forward, w, x, None) == 2
        assert products(halves.inputs, w, kept, y) == 2
        assert products(halves.weights, w, saved) == 2
        assert jax.eval_shape(halves.weights, w, saved) == w and dx == x
    assert len(saved) == 4  # of each product with a weight its two ends


def test_the_report_prints_the_bubble_and_what_waits_for_the_backward_pass():
    _, lines = reported(*gradient_of("circular", 4, 5, 3))
    assert lines == [
        (
            "Bubble: the share of time in which a device has nothing to do; as predicted, and "
            "as counted in the program."
        ),
        "Keeps: the inputs of stages that wait for the backward pass, per device (predicted).",
        "As pipeline_loss, pipeline(stages=4,microbatches=5,repeats=3) would keep 246 kB.",
        (
            "schedule  stages  microbatches  repeats  ticks  sends on  back  bubble  counted  "
            "microbatch   keeps"
        ),
        (
            "pipeline       4             5        3     18        18    18   16.7%    16.7%   "
            "  16.4 kB  295 kB"
        ),
    ]


def test_1f1b_holds_as_much_for_32_microbatches_as_for_8_and_gpipe_more_for_each():
    held = lambda name, m, v=1: temporaries(gradient_of(name, 4, m, v)[0])
    one = 4 * 64 * WIDTH  # bytes of a microbatch
    gpipe = held("gpipe", 32) - held("gpipe", 8)
    flat = held("1f1b", 32) - held("1f1b", 8)
    assert gpipe >= 24 * one  # its input of the stage, for each of 24 more
    assert flat < 2 * one
    assert held("1f1b", 32, 2) - held("1f1b", 8, 2) < 2 * one
    kept = lambda name, m, v=1: reported(*gradient_of(name, 4, m, v))[0][0].schedule.kept
    assert [kept("gpipe", m) for m in (8, 32)] == [11, 35]
    assert [kept("1f1b", m) for m in (8, 32)] == [7, 7]
    assert [kept("1f1b", m, 2) for m in (8, 32)] == [15, 15]


@pytest.mark.parametrize("v, remat", [(1, True), (2, False)])
def test_zero_bubble_computes_as_much_less_as_predicted(v, remat):
    def flops(**options):
        program, mesh = gradient_of("1f1b", 4, 8, v, **options)
        report = meshdp.report_compiled(program, mesh, device=HAND)
        return report.work.flops, report.pipelines[0]

    (plain, _), (ours, found) = flops(), flops(zero_bubble=True, remat=remat)
    # Forward, forward anew, backward for inputs and for weights: as long for such layers.
    passes, busy, ticks = 2 + remat, 8 * v, 8 * v + 3
    assert ours / plain == pytest.approx((passes * ticks + busy) / (4 * ticks), rel=0.01)
    assert found.bubble == pytest.approx(1 - (passes + 1) * busy / (passes * ticks + busy))
    assert found.bubble == bubble(4, 8, v, remat=remat, zero_bubble=True)


@pytest.mark.parametrize("v", [1, 2])
def test_of_pipeline_loss_without_gradients_the_compiler_keeps_the_way_forward_only(v):
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s).astype(np.float32) for s in ((8, 8, 8), (16, 8)))
    first = lambda _, x: x
    layer = lambda w, x, _: x + jnp.tanh(x @ w)
    last = lambda _, x, b: meshdp.Mean.of((x * x).sum(-1))
    sizes: Any = dict(microbatches=8, repeats=v)
    loss = lambda w, x: pipeline_loss(first, layer, last, ((), w, ()), x, **sizes).total
    mesh = meshdp.make_mesh(stage=4, data=2)
    lead, spec = ((8,), P("stage")) if v == 1 else ((2, 4), P(None, "stage"))
    program = compiled(loss, mesh, ((*lead, 8, 8), spec), ((16, 8), P(("data", "fsdp"))))
    [found], _ = reported(program, mesh)
    assert (found.forward, found.backward) == (8 * v + 3, 0)

    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    got = program(put(w.reshape(*lead, 8, 8), spec), put(x, P(("data", "fsdp"))))
    for one in w:
        x = x + np.tanh(x @ one)
    np.testing.assert_allclose(got, (x * x).sum(), rtol=1e-5)


def test_circular_keeps_no_slice_of_the_weights_for_each_tick():
    held = lambda m: temporaries(gradient_of("circular", 4, m, 4)[0])
    one, tick = 4 * 64 * WIDTH, 4 * WIDTH * WIDTH  # bytes of a microbatch, of a slice
    assert tick == one
    # Of each of 4 more microbatches: the inputs of 4 ticks; itself, its result, gradients.
    assert held(8) - held(4) <= 4 * (4 + 4) * one
