"""`fit` on two processes of four devices: the numbers of one process of eight, through a death,
a restart, a change of the number of processes and back, and a signal."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import meshdp
from meshdp.loop import Batches, Checkpoints, Evaluation, fit

from . import fitting

PROGRAM = Path(__file__).with_name("fitting_processes.py")
LAUNCH = [sys.executable, "-m", "meshdp", "launch", "--processes", "2", "--devices", "4"]


def launch(*arguments, flags=()):
    command = [*LAUNCH, *flags, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def alone(checkpoint, steps, losses):
    """The same program on one process of eight devices."""
    step = fitting.make_step(meshdp.make_mesh(data=2, fsdp=4))
    return fit(
        step,
        fitting.start(step),
        Batches(fitting.make_data(), 16, seed=2),
        steps=steps,
        checkpoint=checkpoint,
        evaluate=Evaluation(fitting.loss_fn, Batches(fitting.make_data(50), 16, epochs=1)),
        evaluate_every=4,
        log=None,
        callbacks=[lambda n, m: losses.append(m["loss"])],
    )


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """Eight steps on two processes, of which one is killed at the fifth: directory, output."""
    at = tmp_path_factory.mktemp("processes")
    process = launch(at, 8, 5, flags=["--max-restarts", "1"])
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    return at, out, err


@pytest.fixture(scope="module")
def want():
    losses = []
    return alone(None, 8, losses), losses


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(died, want):
    at, out, _ = died
    results = [json.loads(x[4:]) for x in out.splitlines() if x[4:].startswith('{"model"')]
    assert len(results) == 2
    for result in results:
        for name, x in want[0].state.model.items():
            np.testing.assert_allclose(result["model"][name], x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            result["evaluation"]["loss"], want[0].evaluation["loss"], rtol=1e-6
        )


@pytest.mark.slow
def test_a_dead_process_ends_all_and_the_restart_resumes(died, want):
    at, _, err = died
    assert (
        "meshdp launch: process 1 ended with signal SIGKILL; all were stopped; starting again, "
        "1 restart left." in err.splitlines()
    )
    records = list(map(json.loads, (at / "log.jsonl").read_text().splitlines()))
    starts = [r["step"] for r in records if r["event"] == "start"]
    assert starts[0] == 0 and starts[1] in (3, 4) and len(starts) == 2
    newest = {r["step"]: r["loss"] for r in records if r["event"] == "train"}
    np.testing.assert_allclose(list(newest.values()), want[1], rtol=1e-5)


@pytest.mark.slow
def test_each_process_reads_its_own_rows_and_only_the_first_prints(died):
    lines = died[1].splitlines()
    read = [json.loads(x[4:])["read"] for x in lines if x[4:].startswith('{"model"')]
    records = map(json.loads, (died[0] / "log.jsonl").read_text().splitlines())
    start = [r["step"] for r in records if r["event"] == "start"][1]
    batches = iter(Batches({"id": np.arange(fitting.EXAMPLES)}, 16, seed=2))
    first = [next(batches)["id"].tolist() for _ in range(start + 1)][-1]
    assert sorted(read) == sorted([first[:8], first[8:]])
    assert all(x.startswith("[0] ") for x in lines if re.match(r"\[\d\] step ", x))
    assert any(x.startswith("[0] step 8/8  loss ") for x in lines)


@pytest.mark.slow
def test_from_several_processes_to_one_and_back_and_a_signal_saves_on_all(died):
    at = died[0]
    losses, want_losses = [], []
    want = alone(None, 10, want_losses)
    one = alone(at / "run", 10, losses)
    np.testing.assert_allclose(losses, want_losses[8:], rtol=1e-5)
    np.testing.assert_allclose(one.state.model["w"], want.state.model["w"], rtol=1e-5)

    process = launch(at, 10**6, 0)
    for line in process.stdout:
        if line.startswith("[0] step 12/"):
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    checkpoints = Checkpoints(at / "run")
    last = checkpoints.steps()[-1]
    assert last >= 12
    assert f"SIGTERM: ended after step {last}; the last checkpoint is of step {last}" in out
    step = fitting.make_step(meshdp.make_mesh(fsdp=2, devices=jax.devices()[:2]))
    assert int(checkpoints.restore(fitting.start(step)).state.step) == last
