"""The parser and its sums, on text written by hand; no device is needed."""

import itertools

import pytest

from meshdp.report._groups import axes_of, parse_groups
from meshdp.report._hlo import by_axis, collectives, ring_bytes, table, total
from meshdp.report._hlo_text import parse

EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}


def program(body: str, computations: str = "", partitions: int = 8) -> str:
    return (
        f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n{computations}\n"
        f"ENTRY %main (p: f32[4,8]) -> f32[4,8] {{\n  %p = f32[4,8]{{1,0}} parameter(0)\n"
        f"{body}\n}}\n"
    )


def only(text: str, mesh=EIGHT):
    (found,) = collectives(text, mesh)
    return found


@pytest.mark.parametrize(
    "text, groups",
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # Count over [4,2], read the columns: every second device together.
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(2,1,0)", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("mesh['data'=2,'tensor'=4] {'data'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        # The named order is the order inside the group.
        ("mesh['a'=2,'b'=2] {'b','a'}", [[0, 2, 1, 3]]),
        # A part of an axis: the slow half of eight is its factor 2 after 1...
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        # ...and the fast half the factor 4 after 2.
        ("mesh['a'=8] {'a':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh[a=2,b=2], device_ids=(3,1,2,0) {a}", [[3, 2], [1, 0]]),
        ("mesh[a=2,b=2], device_ids=([2,2]T(1,0)) {a}", [[0, 1], [2, 3]]),
        # As 0.10.2 writes what automatic partitioning does on a 2 x 4 mesh.
        (
            "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}",
            [[0, 1, 2, 3], [4, 5, 6, 7]],
        ),
    ],
)
def test_each_spelling_of_replica_groups_is_read(text, groups):
    assert parse_groups(text, 8) == groups


def test_an_unknown_spelling_of_replica_groups_is_shown():
    with pytest.raises(ValueError) as e:
        parse_groups("ring(8)", 8)
    assert str(e.value) == (
        "Cannot read these replica groups: 'ring(8)'. Expected {{0,1},{2,3}}, [2,2]<=[4] or "
        "mesh['data'=2] {'data'}. Please report it with the XLA version."
    )


def test_axes_are_those_along_which_members_differ_on_every_subset_of_512_devices():
    sizes = {"data": 8, "fsdp": 1, "stage": 4, "seq": 2, "tensor": 8}
    names = ["data", "stage", "seq", "tensor"]
    places = list(itertools.product(*(range(n) for n in sizes.values())))
    for size in range(1, 5):
        for subset in itertools.combinations(names, size):
            fixed = [k for k, name in enumerate(sizes) if name not in subset]
            groups: dict = {}
            for position, place in enumerate(places):
                groups.setdefault(tuple(place[k] for k in fixed), []).append(position)
            assert axes_of(list(groups.values()), sizes) == subset


@pytest.mark.parametrize(
    "kind, operand, devices, sent",
    [
        ("all-reduce", 800, 8, 1400),
        ("reduce-scatter", 800, 8, 700),
        ("all-gather", 100, 8, 700),
        ("all-to-all", 800, 8, 700),
        ("collective-permute", 800, 2, 800),
        ("collective-broadcast", 800, 8, 800),
        # A scalar cannot be cut in eight: rounded up.
        ("all-reduce", 4, 3, 6),
    ],
)
def test_bytes_sent_follow_the_ring(kind, operand, devices, sent):
    assert ring_bytes(kind, operand, devices) == sent


def test_an_asynchronous_pair_counts_once_with_its_operand_bytes():
    c = only(
        program(
            "  %s = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%p), channel_id=1, "
            "replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true\n"
            "  ROOT %d = f32[8,8]{1,0} all-gather-done(%s)"
        )
    )
    assert (c.kind, c.axes, c.shape, c.bytes, c.sent_bytes, c.count) == (
        ("all-gather", ("tensor",), (4, 8), 128, 128, 1)
    )


def test_a_collective_wrapped_in_async_start_counts_once():
    wrapped = (
        "%wrapped (q: f32[4,8]) -> f32[2,8] {\n  %q = f32[4,8]{1,0} parameter(0)\n"
        "  ROOT %r = f32[2,8]{1,0} reduce-scatter(%q), channel_id=2, "
        "replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, "
        "dimensions={0}, to_apply=%add\n}\n"
    )
    c = only(
        program(
            "  %s = ((f32[4,8]{1,0}), f32[2,8]{1,0}, u32[]) async-start(%p), calls=%wrapped\n"
            "  ROOT %d = f32[2,8]{1,0} async-done(%s), calls=%wrapped",
            wrapped,
        )
    )
    assert (c.kind, c.axes, c.count, c.sent_bytes) == ("reduce-scatter", ("data",), 1, 64)


def test_a_fused_all_reduce_is_split_and_launched_once():
    text = program(
        "  %h = bf16[4,8]{1,0} convert(%p)\n"
        "  ROOT %r = (f32[4,8]{1,0}, /*index=1*/bf16[4,8]{1,0}) all-reduce(%p, /*index=1*/%h), "
        "channel_id=1, replica_groups={}, use_global_device_ids=true, to_apply=%add"
    )
    found = collectives(text, EIGHT)
    assert [(c.part, c.dtype, c.bytes, c.calls) for c in found] == [
        (0, "f32", 128, 1),
        (1, "bf16", 64, 0),
    ]
    assert (total(found).count, total(found).bytes) == (1, 192)


def test_an_all_to_all_in_pieces_is_one_exchange_of_their_sum():
    c = only(
        program(
            "  %a = f32[4,4]{1,0} slice(%p), slice={[0:4], [0:4]}\n"
            "  %b = f32[4,4]{1,0} slice(%p), slice={[0:4], [4:8]}\n"
            "  ROOT %t = (f32[4,4]{1,0}, f32[4,4]{1,0}) all-to-all(%a, %b), channel_id=1, "
            "replica_groups={{0,2},{1,3},{4,6},{5,7}}"
        )
    )
    assert (c.axes, c.shape, c.bytes, c.sent_bytes) == (("fsdp",), (2, 4, 4), 128, 64)


def test_a_permute_names_the_axis_of_its_pairs_and_ignores_idle_ones():
    c = only(
        program(
            "  ROOT %r = f32[4,8]{1,0} collective-permute(%p), channel_id=1, "
            "source_target_pairs={{0,2},{1,3},{4,4}}"
        )
    )
    assert (c.axes, c.sent_bytes) == (("fsdp",), 128)


def test_collectives_that_join_no_two_devices_are_left_out():
    text = program(
        "  ROOT %r = f32[4,8]{1,0} all-reduce(%p), channel_id=1, replica_groups=[8,1]<=[8], "
        "use_global_device_ids=true, to_apply=%add"
    )
    assert collectives(text, EIGHT) == ()


def test_a_permute_in_which_every_device_keeps_its_own_is_left_out():
    text = program(
        "  ROOT %r = f32[4,8]{1,0} collective-permute(%p), channel_id=1, "
        "source_target_pairs={{0,0},{1,1}}"
    )
    assert collectives(text, EIGHT) == ()


def test_groups_without_global_ids_join_replicas_and_all_their_partitions():
    c = only(
        program(
            "  ROOT %r = f32[4,8]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0}}, "
            "to_apply=%add"
        )
    )
    assert (c.axes, c.group_size) == (("data", "fsdp", "tensor"), 8)


LOOP = """
%step (s: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {{
  %s = (s32[], f32[4,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4,8]{{1,0}} get-tuple-element(%s), index=1
  %k = s32[] constant({step})
  %next = s32[] add(%i, %k)
  %r = f32[4,8]{{1,0}} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], \
use_global_device_ids=true, to_apply=%add
  ROOT %t = (s32[], f32[4,8]{{1,0}}) tuple(%next, %r)
}}

%test (s.1: (s32[], f32[4,8])) -> pred[] {{
  %s.1 = (s32[], f32[4,8]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%s.1), index=0
  %limit = s32[] constant({limit})
  ROOT %lt = pred[] compare({sides}), direction={direction}
}}
"""
WHILE = (
    "  %zero = s32[] constant({start})\n  %c = s32[] copy(%zero)\n"
    "  %in = (s32[], f32[4,8]{{1,0}}) tuple(%c, %p)\n"
    "  ROOT %w = (s32[], f32[4,8]{{1,0}}) while(%in), condition=%test, body=%step{said}"
)


@pytest.mark.parametrize(
    "start, step, direction, limit, trips",
    [
        (0, 1, "LT", 5, 5),
        (1, 2, "LT", 6, 3),  # 1, 3, 5
        (1, 2, "LE", 7, 4),  # 1, 3, 5, 7
        (5, -1, "GT", 0, 5),
        (6, -2, "GE", 0, 4),  # 6, 4, 2, 0
        (0, 3, "NE", 12, 4),
        (9, 1, "LT", 5, 0),
        (0, 0, "LT", 5, None),
        (0, 3, "NE", 11, None),
    ],
)
def test_trips_are_counted_from_start_step_and_limit(start, step, direction, limit, trips):
    loop = LOOP.format(step=step, limit=limit, sides="%j, %limit", direction=direction)
    assert only(program(WHILE.format(start=start, said=""), loop)).count == trips


def test_a_limit_on_the_left_is_read_backwards():
    loop = LOOP.format(step=1, limit=5, sides="%limit, %j", direction="GT")
    assert only(program(WHILE.format(start=0, said=""), loop)).count == 5


def test_what_the_compiler_says_about_trips_comes_first():
    loop = LOOP.format(step=1, limit=5, sides="%j, %limit", direction="LT")
    said = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0"}}'
    c = only(program(WHILE.format(start=0, said=said), loop))
    assert (c.count, c.loop_depth) == (7, 1)


def test_a_loop_of_unknown_length_is_said_to_be_unknown_in_the_sums():
    loop = LOOP.format(step=0, limit=5, sides="%j, %limit", direction="LT")
    found = collectives(program(WHILE.format(start=0, said=""), loop), EIGHT)
    (traffic,) = by_axis(found)[("tensor",)].values()
    assert (traffic.count, traffic.bytes, traffic.unknown) == (0, 0, 1)
    assert table(found) == (
        "axis    collective  count  bytes  sent/device\n"
        "tensor  all-reduce  0 + 1?    0 B          0 B\n"
        "total               0 + 1?    0 B          0 B\n"
        "?: in a loop of unknown length; its bytes are not in the sums"
    ).replace("count  bytes", " count  bytes")


def test_both_branches_count_as_the_most_there_can_be():
    branch = (
        "%{0} (q{0}: f32[4,8]) -> f32[4,8] {{\n  %q{0} = f32[4,8]{{1,0}} parameter(0)\n"
        "  ROOT %r{0} = f32[4,8]{{1,0}} all-reduce(%q{0}), channel_id=1, "
        "replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%add\n}}\n"
    )
    text = program(
        "  %b = pred[] constant(true)\n  ROOT %c = f32[4,8]{1,0} conditional(%b, %p, %p), "
        "true_computation=%yes, false_computation=%no",
        branch.format("yes") + branch.format("no"),
    )
    found = collectives(text, EIGHT)
    assert [(c.count, c.conditional) for c in found] == [(1, True), (1, True)]


def test_a_computation_that_is_called_twice_counts_twice():
    shared = (
        "%shared (q: f32[4,8]) -> f32[4,8] {\n  %q = f32[4,8]{1,0} parameter(0)\n"
        "  ROOT %r = f32[4,8]{1,0} all-reduce(%q), channel_id=1, "
        "replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%add\n}\n"
    )
    text = program(
        "  %a = f32[4,8]{1,0} call(%p), to_apply=%shared\n"
        "  ROOT %b = f32[4,8]{1,0} call(%a), to_apply=%shared",
        shared,
    )
    c = only(text)
    # Called once with the argument and once with something computed.
    assert (c.count, c.argument) == (2, "")


def test_the_table_adds_up_by_axis_and_kind():
    one = (
        "  %r{0} = f32[4,8]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={1}, "
        "use_global_device_ids=true, to_apply=%add"
    )
    data, tensor = "mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','fsdp'}", "[4,2]<=[8]"
    text = program("\n".join(one.format(i, g) for i, g in enumerate([data, tensor, data])))
    assert table(collectives(text, EIGHT)) == (
        "axis       collective  count  bytes  sent/device\n"
        "data+fsdp  all-reduce      2  256 B        384 B\n"
        "tensor     all-reduce      1  128 B        128 B\n"
        "total                      3  384 B        512 B"
    )


def test_a_mesh_of_another_size_is_refused():
    text = program(
        "  ROOT %r = f32[4,8]{1,0} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[8], "
        "use_global_device_ids=true, to_apply=%add"
    )
    with pytest.raises(ValueError) as e:
        collectives(text, {"data": 4})
    assert str(e.value) == (
        "The program runs on 8 devices, but the mesh {'data': 4} has 4. Pass the mesh that "
        "the step was compiled for."
    )


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError) as e:
        collectives("module @jit_f {", EIGHT)
    assert str(e.value) == (
        "Expected the text of a compiled program, which begins with 'HloModule'; got "
        "'module @jit_f {'. Pass `compiled.as_text()`, or the compiled step itself."
    )


def test_a_number_is_no_mesh():
    with pytest.raises(TypeError) as e:
        collectives(program("  ROOT %r = f32[4,8]{1,0} copy(%p)"), 8)
    assert str(e.value) == (
        "`mesh` must be a jax.sharding.Mesh, or a mapping such as {'data': 8}; got 8."
    )


def test_source_lines_skip_installed_packages():
    import os

    text = program(
        "  ROOT %r = f32[4,8]{1,0} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[8], "
        'use_global_device_ids=true, to_apply=%add, metadata={op_name="f" stack_frame_id=2}',
        f'FileNames\n1 "/home/me/train.py"\n2 "{os.__file__}"\n\n'
        'FunctionNames\n1 "step"\n2 "helper"\n\nFileLocations\n'
        "1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=0 end_column=0}\n"
        "2 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=0 end_column=0}\n\n"
        # The parent is printed one too high: frame 2 was called from frame 1.
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n"
        "2 {file_location_id=2 parent_frame_id=2}\n",
    )
    assert only(text).source == "/home/me/train.py:12"


def test_two_thousand_lines_give_two_thousand_collectives():
    line = "  %r{0} = f32[4,8]{{1,0}} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[8], \
use_global_device_ids=true, to_apply=%add"
    assert len(parse(program(line.format(0))).main.instructions) == 2
    found = collectives(program("\n".join(line.format(i) for i in range(2000))), EIGHT)
    assert (len(found), total(found).bytes) == (2000, 2000 * 128)
