"""Flops, memory traffic, bounds and scaling, against numbers worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType

from meshdp.report._devices import DEVICES, Device, device_of, find_device
from meshdp.report._hlo import Collective
from meshdp.report._hlo_text import parse
from meshdp.report._time import Bound, bound, scaling, takeover, utilisation
from meshdp.report._work import Work, work

FLOAT = jnp.float32


def counted(f, *shapes):
    args = [jax.ShapeDtypeStruct(s, FLOAT) for s in shapes]
    compiled = jax.jit(f).lower(*args).compile()
    return work(parse(compiled.as_text())), compiled.cost_analysis()


def test_a_matrix_product_is_two_flops_for_each_triple():
    ours, _ = counted(lambda a, b: a @ b, (64, 32), (32, 128))
    assert ours.matmul_flops == ours.flops == 2 * 64 * 32 * 128
    # Both operands are read and the result is written, four bytes each.
    assert ours.memory_bytes == 4 * (64 * 32 + 32 * 128 + 64 * 128)


def test_a_scanned_layer_counts_once_for_each_time_it_runs():
    layer = lambda h, w: (jnp.tanh(h @ w), None)
    ours, xla = counted(lambda h, w: lax.scan(layer, h, w)[0], (16, 32), (7, 32, 32))
    assert ours.matmul_flops == 7 * 2 * 16 * 32 * 32
    # This is what the report is for: XLA's own analysis counts the body once.
    assert xla["flops"] < ours.matmul_flops / 6


def test_nested_loops_multiply():
    def inner(h, w):
        return lax.fori_loop(0, 5, lambda _, h: jnp.tanh(h @ w), h), None

    ours, _ = counted(lambda h, w: lax.scan(inner, h, w)[0], (16, 32), (3, 32, 32))
    assert ours.matmul_flops == 3 * 5 * 2 * 16 * 32 * 32


def test_a_loop_of_unknown_length_is_said_and_counted_once():
    def f(h, w):
        return lax.while_loop(lambda h: jnp.sum(h) < 9.0, lambda h: h @ w, h)

    ours, _ = counted(f, (16, 32), (32, 32))
    assert (ours.matmul_flops, ours.unknown_loops) == (2 * 16 * 32 * 32, 1)


def test_of_two_branches_the_dearer_one_counts():
    def f(h, w):
        return lax.cond(h[0, 0] > 0, lambda h: (h @ w) @ w, lambda h: h @ w, h)

    ours, _ = counted(f, (16, 32), (32, 32))
    assert ours.matmul_flops == 2 * 2 * 16 * 32 * 32


def test_what_a_checkpoint_computes_again_is_counted_apart():
    # sin keeps its argument for the backward pass, so its product is done again.
    layer = lambda h, w: (jax.checkpoint(lambda h, w: jnp.sin(h @ w))(h, w), None)
    loss = lambda w, h: jnp.sum(lax.scan(layer, h, w)[0] ** 2)
    ours, _ = counted(jax.grad(loss), (3, 32, 32), (16, 32))
    assert ours.recomputed_flops == 3 * 2 * 16 * 32 * 32
    assert ours.matmul_flops == 4 * 3 * 2 * 16 * 32 * 32


def test_a_padded_strided_convolution_counts_no_padding():
    def f(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=numbers)

    ours, xla = counted(f, (4, 16, 16, 8), (3, 3, 8, 16))
    # Along one dimension: 8 outputs of 3 taps, one of which falls on padding.
    assert ours.matmul_flops == 2 * 4 * 16 * 8 * (8 * 3 - 1) ** 2 == xla["flops"]


@pytest.mark.parametrize("wrt", [0, 1])
def test_gradients_of_a_convolution_count_as_xla_counts_them(wrt):
    def f(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jnp.sum(lax.conv_general_dilated(x, k, (2, 2), "SAME", None, (1, 1), numbers))

    # A quadratic, so that the backward pass is not all constants.
    ours, xla = counted(jax.grad(lambda x, k: f(x, k) ** 2, wrt), (4, 16, 16, 8), (3, 3, 8, 16))
    assert abs(ours.flops - xla["flops"]) <= 0.01 * xla["flops"]


def text_of(instruction):
    return (
        "HloModule m\n\nENTRY %main (a: f32[64,32], b: f32[32,128]) -> f32[64,128] {\n"
        "  %a = f32[64,32]{1,0} parameter(0)\n  %b = f32[32,128]{1,0} parameter(1)\n"
        "  %x = f32[4,16,16,8]{3,2,1,0} constant({...})\n"
        "  %y = f32[4,8,8,16]{3,2,1,0} constant({...})\n"
        "  %k = f32[3,3,8,16]{3,2,1,0} constant({...})\n"
        f"{instruction}\n}}\n"
    )


def test_a_library_call_for_a_product_counts_as_the_product():
    call = (
        "  ROOT %g = (f32[64,128]{1,0}, s8[4194304]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}'
    )
    assert work(parse(text_of(call))).matmul_flops == 2 * 64 * 32 * 128


@pytest.mark.parametrize(
    "operands, result, target",
    [
        ("%x, %k", "f32[4,8,8,16]", "__cudnn$convForward"),
        ("%y, %k", "f32[4,16,16,8]", "__cudnn$convBackwardInput"),
        ("%x, %y", "f32[3,3,8,16]", "__cudnn$convBackwardFilter"),
    ],
)
def test_library_calls_for_a_convolution_and_its_gradients_count_alike(
    operands, result, target
):
    call = (
        f"  ROOT %c = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call({operands}), "
        "window={size=3x3 pad=0_1x0_1 stride=2x2}, dim_labels=b01f_01io->b01f, "
        f'custom_call_target="{target}"'
    )
    assert work(parse(text_of(call))).matmul_flops == 2 * 4 * 16 * 8 * (8 * 3 - 1) ** 2


HAND = Device(kind="hand", flops=1e12, memory=1e11, link=1e10, network=1e9, latency=0.0)


def moved(kind, axes, operand, group, sent, count=1) -> Collective:
    return Collective(
        kind=kind,
        axes=axes,
        dtype="f32",
        shape=(operand // 4,),
        bytes=operand,
        sent_bytes=sent,
        count=count,
        loop_depth=0,
        source="",
        op_name="",
        group_size=group,
    )


ALL_REDUCE = moved("all-reduce", ("data",), 8_000_000, 8, 14_000_000)


@pytest.mark.parametrize(
    "flops, memory_bytes, found, by, seconds",
    [
        (2_000_000_000, 10, [], "compute", 2e-3),
        (10, 300_000_000, [], "memory", 3e-3),
        (10, 10, [ALL_REDUCE], "communication", 1.4e-3),
    ],
)
def test_the_slowest_of_the_three_bounds_the_step(flops, memory_bytes, found, by, seconds):
    b = bound(Work(flops=flops, memory_bytes=memory_bytes), found, HAND)
    assert (b.by, b.seconds) == (by, pytest.approx(seconds))


def test_axes_over_the_network_take_its_speed():
    b = bound(Work(), [ALL_REDUCE], HAND, slow=("data",))
    assert b.communication == pytest.approx(14e-3)


def test_each_launch_costs_a_latency_for_each_hop_of_a_tree():
    slow = dataclasses.replace(HAND, latency=1e-6)
    b = bound(Work(), [dataclasses.replace(ALL_REDUCE, count=10)], slow)
    assert b.communication == pytest.approx(10 * (1.4e-3 + 3e-6))


def test_utilisation_leaves_out_what_was_computed_twice():
    w = Work(flops=9_000, matmul_flops=8_000, recomputed_flops=2_000)
    assert utilisation(w, dataclasses.replace(HAND, flops=1000.0), 10.0) == 0.6


def test_a_time_of_zero_is_refused():
    with pytest.raises(ValueError) as e:
        utilisation(Work(), HAND, 0.0)
    assert str(e.value) == "`seconds` must be a measured time above 0; got 0.0."


def test_scaling_follows_the_ring():
    # 2 ms of work; gradients of 8 MB, which a ring of n sends 2(n-1)/n times.
    w = Work(flops=2_000_000_000)
    rows = scaling(w, [ALL_REDUCE], HAND, {"data": 8}, devices=(8, 64))
    assert [r.devices for r in rows] == [8, 64]
    assert rows[1].weak == Bound(2e-3, 0.0, pytest.approx(2 * 63 / 64 * 8e6 / 1e10))
    assert rows[1].weak_efficiency == 1.0
    # The same batch on 8 times the devices: an eighth of the work, all of the traffic.
    assert rows[1].strong.compute == pytest.approx(0.25e-3)
    assert rows[1].strong_efficiency == pytest.approx(0.25e-3 / (2 * 63 / 64 * 8e-4))
    assert takeover(rows) is None


def test_communication_takes_over_where_its_latency_does():
    w = Work(flops=1_405_000_000)
    device = dataclasses.replace(HAND, latency=1e-6)
    rows = scaling(w, [ALL_REDUCE], device, {"data": 8, "tensor": 1})
    # 1.4 ms + 3 us of talk against 1.405 ms of work on 8; on 16, 1.5 ms + 4 us.
    assert takeover(rows) == 16


def test_gathered_shards_shrink_so_that_the_whole_stays():
    gather = moved("all-gather", ("fsdp",), 1_000_000, 8, 7_000_000)
    (row,) = scaling(Work(flops=1), [gather], HAND, {"fsdp": 8}, devices=(64,))
    assert row.weak.communication == pytest.approx(63 / 64 * 8e6 / 1e10)


def test_activations_of_other_axes_shrink_with_the_batch_of_a_device():
    talk = moved("all-reduce", ("tensor",), 1_000_000, 4, 1_500_000)
    mesh = {"data": 2, "tensor": 4}
    (row,) = scaling(Work(flops=1), [talk], HAND, mesh, devices=(64,))
    assert row.weak.communication == pytest.approx(1.5e-4)
    assert row.strong.communication == pytest.approx(1.5e-4 / 8)


def test_an_axis_longer_than_an_island_takes_the_network():
    device = dataclasses.replace(HAND, island=16)
    rows = scaling(Work(flops=1), [ALL_REDUCE], device, {"data": 8}, devices=(16, 32))
    assert rows[0].weak.communication == pytest.approx(2 * 15 / 16 * 8e6 / 1e10)
    assert rows[1].weak.communication == pytest.approx(2 * 31 / 32 * 8e6 / 1e9)
    assert rows[1].strong.communication == rows[1].weak.communication


def test_device_counts_that_the_other_axes_do_not_divide_are_left_out():
    rows = scaling(Work(flops=1), [], HAND, {"data": 2, "tensor": 3}, devices=(8, 12, 64))
    assert [r.devices for r in rows] == [12]


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5 lite"),
        ("TPU v5e", "TPU v5 lite"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6e", "TPU v6 lite"),
    ],
)
def test_device_kinds_are_found_by_the_names_that_jax_gives(kind, name):
    assert find_device(kind) is DEVICES[name]


def test_a_cpu_is_measured_and_says_so():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    device = device_of(mesh)
    assert (device.kind, device.measured) == ("cpu", True)
    assert min(device.flops, device.memory, device.link, device.latency) > 0


def test_an_unknown_device_has_no_speeds():
    assert find_device("abacus") is None
