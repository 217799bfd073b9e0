"""Placement over two processes of four CPU devices each, joined on loopback."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from meshdp import _processes
from meshdp.launch._local import run

VALUE = np.arange(96, dtype=np.float32).reshape(16, 6)
PROGRAM = Path(__file__).with_name("placing_processes.py")


@pytest.fixture(scope="module")
def results():
    """For each process what each case returned; all cases run in one start."""
    ended = run([str(PROGRAM)], processes=2, devices=4, timeout=120)
    return [json.loads(e.stdout.splitlines()[-1]) for e in ended]


@pytest.fixture
def both(results, request):
    """What the case with the name of the test returned on process 0 and 1."""
    name = request.node.name.removeprefix("test_")
    return [r[name] for r in results]


def assert_shards(both, value, shard_shape, count=4):
    """Each process has `count` shards of that shape, in their places."""
    for got in both:
        assert got["shape"] == list(value.shape)
        assert len(got["shards"]) == count
        for place, shape, held in got["shards"]:
            assert tuple(shape) == shard_shape
            want = value[tuple(slice(*p) for p in place)]
            np.testing.assert_array_equal(np.reshape(held, shape), want)


def of(both, key):
    return [got[key] for got in both]


def test_own_rows_become_the_global_batch(both):
    assert_shards(of(both, "x"), VALUE, (2, 6))
    assert of(both, "total") == [2 * VALUE.sum()] * 2
    assert of(both, "n") == [[3] * 4] * 2
    assert of(both, "flag") == of(both, "spec") == [True, True]


def test_device_arrays_and_keys_are_own_rows_too(both):
    assert_shards(of(both, "x"), VALUE, (2, 6))
    assert_shards(of(both, "keys"), np.array(both[0]["want"]), (2, 2))


def test_processes_that_share_rows_pass_the_same(both):
    assert_shards(both, VALUE, (4, 6))


def test_whole_rows_are_passed_also_where_columns_are_split_over_processes(both):
    assert_shards(both, VALUE, (4, 3))


def test_rows_of_a_process_may_lie_apart(both):
    assert_shards(of(both, "x"), VALUE, (2, 6))
    for me, back in enumerate(of(both, "back")):
        np.testing.assert_array_equal(back, VALUE.reshape(8, 2, 6)[me::2].reshape(8, 6))


def test_a_batch_changed_afterwards_keeps_its_values(both):
    assert_shards(both, VALUE, (2, 6))


def test_a_batch_that_is_global_already_is_laid_out_as_asked(both):
    assert of(both, "same") == [True, True]
    assert_shards(of(both, "x"), VALUE, (4, 6))
    assert_shards(of(both, "y"), VALUE, (4, 6))


def test_padded_rows_are_masked(both):
    assert of(both, "mask") == [15, 15]
    assert_shards(of(both, "x"), VALUE[[*range(15), 14]], (2, 6))


def test_unchanged_shapes_need_no_word_from_others(both):
    assert both == [2, 2]


def test_rows_come_back_as_they_were_passed(both):
    np.testing.assert_array_equal(of(both, "x"), VALUE.reshape(2, 8, 6))
    assert of(both, "n") == [3, 3]


def test_whole_rows_are_missing_where_columns_are_elsewhere(both):
    assert both == [
        f"Without whole rows on process {me}: 1 leaf:\n"
        "  ['w']: shape (16, 6), P(None, 'tensor')\n"
        "Read them with meshdp.to_host, or meshdp.reshard them to be split along rows only."
        for me in (0, 1)
    ]


def test_values_are_placed_shard_by_shard(both):
    assert_shards(of(both, "split"), VALUE, (4, 6))
    assert_shards(of(both, "whole"), VALUE + 1, (16, 6))
    assert_shards(of(both, "double"), VALUE, (16, 6))
    assert_shards(of(both, "scalar"), np.int32(7), ())
    assert_shards(of(both, "flags"), VALUE % 2 == 0, (4, 3))
    assert_shards(of(both, "none"), np.ones((0, 3)), (0, 3))


def test_whole_values_come_back_to_every_process(both):
    for got in both:
        values = got["values"]
        np.testing.assert_array_equal(values["split"], VALUE)
        np.testing.assert_array_equal(values["columns"], VALUE)
        np.testing.assert_array_equal(values["whole"], VALUE + 1)
        np.testing.assert_array_equal(values["flags"], VALUE % 2 == 0)
        assert (values["scalar"], values["none"], got["keys"]) == (7, [], True)
        assert got["dtypes"] == {
            "split": "float32",
            "columns": "bfloat16",
            "whole": "float32",
            "scalar": "int32",
            "none": "float32",
            "flags": "bool",
            "double": "float32",
        }
        # Half of `columns` (192 bytes) and of `flags` (96) comes from each process.
        assert got["largest"] == 64
        assert 144 <= got["sent"] < 144 + 64


def test_what_all_processes_hold_does_not_travel(both):
    np.testing.assert_array_equal(both, [VALUE, VALUE])


def test_python_numbers_stay_weakly_typed(both):
    assert both == [[True, 0.5, True, 0.5]] * 2


def test_donating_the_result_leaves_the_original_alone(both):
    assert_shards(of(both, "first"), VALUE, (4, 6))
    assert of(both, "apart") == [True, True]


def test_sharing_passes_arrays_in_place_through(both):
    assert of(both, "same") == of(both, "renamed") == [True, True]
    assert_shards(of(both, "y"), VALUE, (4, 6))


def test_layouts_and_meshes_change(both):
    assert_shards(of(both, "same_devices"), VALUE, (8, 6))
    assert_shards(of(both, "other_order"), VALUE, (8, 6))
    assert_shards(of(both, "fewer"), VALUE, (8, 3), count=2)
    assert_shards(of(both, "keys"), np.array(both[0]["want"]), (4, 2), count=2)


def test_donated_arrays_are_deleted_when_moved(both):
    assert of(both, "gone") == [[True, True]] * 2
    assert_shards(of(both, "b"), VALUE, (8, 6))


def test_a_mesh_of_one_process_needs_no_other(both):
    for me, got in enumerate(both):
        mine = VALUE[8 * me : 8 * me + 8]
        assert_shards([got["x"], got["batch"]], mine, (2, 6))
        np.testing.assert_array_equal(got["back"], mine)


SAME_VALUES = """\
All processes must place the same values together:
{}
Make them from the same seed or file on every process, or give each process its own rows with \
meshdp.shard_batch."""


def checksum(x):
    return f"float32{list(x.shape)} with checksum {zlib.crc32(x.tobytes()):08x}"


def test_different_values_are_refused(both):
    c = f"{checksum(VALUE[:4])} on process 0, {checksum(VALUE[:8])} on process 1"
    w = f"{checksum(VALUE)} on process 0, {checksum(VALUE + 1)} on process 1"
    assert both == [SAME_VALUES.format(f"  ['c']: {c}\n  ['w']: {w}")] * 2


def test_different_trees_are_refused(both):
    assert both == [SAME_VALUES.format("  process 0: 1 array\n  process 1: 2 arrays")] * 2


FITTING = """\
The processes passed batches that do not fit together:
{}
On every process pass the same leaves, and as many rows per device as on the others. At the \
end of the data pad on all: meshdp.pad_batch."""


def test_different_numbers_of_rows_are_refused(both):
    words = FITTING.format(
        "  ['x']: shape (8, 6) of float32 on process 0, shape (4, 6) of float32 on process 1\n"
        "  ['y']: shape (8,) of float32 on process 0, shape (4,) of float32 on process 1"
    )
    assert both == [words, words]


def test_rows_that_do_not_divide_on_one_process_are_refused_on_all(both):
    fault = (
        "Process 1 passed 6 rows, which do not divide over the 4 parts of data*fsdp=8 that it "
        "holds: 6 % 4 = 2."
    )
    fix = "Add 2, leave out 2, or pad and mask: batch, mask = meshdp.pad_batch(batch, 4)"
    assert both == [FITTING.format(f"  {fault}"), f"{fault}\n  [0]: shape (6, 6)\n{fix}"]


def test_a_process_without_devices_is_refused(both):
    assert both[1] == (
        "Process 1 has no device in the mesh, so it has no rows. Call shard_batch on the "
        "processes of the mesh only."
    )


def test_a_process_that_is_silent_is_named(both):
    assert both[0] == FITTING.format(
        "  process 1 did not call shard_batch with anything new within 0.5 s"
    )


def test_all_processes_send_about_as_much():
    held_by = [frozenset(p) for p in ({1, 2}, {1, 2}, {0, 1}, {2, 3}, {3})]
    assert _processes._senders(held_by, [8, 4, 4, 2, 2]) == [1, 2, 0, 3, 3]


def test_every_case_of_the_program_has_its_test(results):
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(results[0]) <= tests
    assert len(results[0]) > 20
