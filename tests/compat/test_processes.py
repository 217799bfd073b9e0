"""`pmap` over two processes of four CPU devices each, joined on loopback."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshdp.launch._local import run

PROGRAM = Path(__file__).with_name("mapping_processes.py")
ROWS = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
ALL = [28.0] * 4


@pytest.fixture(scope="module")
def results():
    """For each process what each case returned; all cases run in one start."""
    ended = run([str(PROGRAM)], processes=2, devices=4, timeout=200)
    return [json.loads(e.stdout.splitlines()[-1]) for e in ended]


@pytest.fixture
def both(results, request):
    """What the case with the name of the test returned on process 0 and 1."""
    name = request.node.name.removeprefix("test_")
    return [r[name] for r in results]


def test_local_in_local_out_collectives_over_all(both):
    assert both == [[ROWS[0], ALL, [0, 1, 2, 3]], [ROWS[1], ALL, [4, 5, 6, 7]]]


def test_as_jax_pmap_does(results):
    for r in results:
        assert r["as_jax_pmap_does"] == r["local_in_local_out_collectives_over_all"]


def test_a_result_in_place_moves_nothing(both):
    assert both == [{"moves": 0, "local": True}] * 2


def test_one_row_is_read(both):
    assert both == [[0.0, 0.0, ROWS[0]], [4.0, 4.0, ROWS[1]]]


def test_what_was_compiled_ahead_converts_as_the_call_does(both):
    assert both == [[ALL, ALL]] * 2


def test_more_replicas_than_devices(both):
    index = [list(range(8)), list(range(8, 16))]
    assert both == [[[56.0] * 8, index[0]], [[56.0] * 8, index[1]]]


def test_devices_of_both_processes_in_any_order(both):
    # Rows go to a process's own devices in the order of the list.
    assert both == [[[0.0, 1.0, 4.0, 5.0], [4.0, 0.0, 5.0, 1.0]]] * 2


def test_arguments_and_results_that_are_not_mapped(both):
    assert both == [[7.0, ROWS[0]], [7.0, ROWS[1]]]


def test_keys_and_negative_axes(both):
    for (keys, x), rows in zip(both, ROWS, strict=True):
        assert np.shape(keys) == (4, 2)
        assert x == [rows, rows]


def test_the_donated_argument_is_gone(both):
    assert both == [[[224.0] * 4, True]] * 2


def test_an_array_over_all_processes_is_mapped_by_its_own_rows(both):
    assert both == [[ROWS[0], ALL, [0, 1, 2, 3]], [ROWS[1], ALL, [4, 5, 6, 7]]]


def test_axis_size_counts_the_replicas_of_all_processes(both):
    assert both == ROWS


def test_grad_and_nested_maps(both):
    for (nested, grad), rows in zip(both, ROWS, strict=True):
        assert nested == [16.0, 16.0]
        assert grad == [2 * x for x in rows]


def test_a_training_loop(both):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 4, 3)).astype(np.float32).reshape(32, 3)
    y = x @ np.float32([1, -2, 3])
    w = np.zeros(3, np.float32)
    for _ in range(5):
        error = x @ w - y
        loss = np.mean(error**2)
        w = w - 0.1 * 2 * x.T @ error / 32
    for got_w, got_loss in both:
        np.testing.assert_allclose(got_w, w, rtol=1e-5)
        np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
