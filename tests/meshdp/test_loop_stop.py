"""Signals and hanging."""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdp
from meshdp.loop import (
    Batches,
    Checkpoints,
    Evaluation,
    Preempted,
    Watchdog,
    fit,
)

from . import fitting

MESH = meshdp.make_mesh(data=2, fsdp=4)


@pytest.fixture(scope="module")
def step():
    return fitting.make_step(MESH)


def run(step, tmp_path, steps=8, **kwargs):
    return fit(
        step,
        fitting.start(step),
        Batches(fitting.make_data(), 16, seed=0),
        steps=steps,
        checkpoint=Checkpoints(tmp_path, every=100),
        log=None,
        **kwargs,
    )


def kill_at(n, number):
    return lambda step, metrics: os.kill(os.getpid(), number) if step == n else None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint_and_the_next_goes_on(
    step, tmp_path, number, capsys
):
    before = signal.getsignal(number)
    with pytest.raises(Preempted) as e:
        run(step, tmp_path, callbacks=[kill_at(3, number)])
    # Step 4 was in flight when the results of step 3 were read.
    assert (e.value.code, e.value.step, e.value.signal) == (75, 4, number.name)
    assert str(e.value) == f"{number.name} ended the run after step 4"
    assert Checkpoints(tmp_path).steps() == [4]
    assert signal.getsignal(number) == before
    assert capsys.readouterr().err == (
        f"{number.name}: ending after the step in flight, with a checkpoint; once more ends at "
        "once.\n"
    )
    found = run(step, tmp_path).state
    want = fit(
        step,
        fitting.start(step),
        Batches(fitting.make_data(), 16, seed=0),
        steps=8,
        log=None,
    ).state
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        if a.dtype == jnp.float32:
            np.testing.assert_array_equal(a, b)


def test_a_second_signal_does_what_it_did_before(step, tmp_path):
    def twice(n, metrics):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(step, tmp_path, callbacks=[twice, twice])


def test_a_signal_ends_an_evaluation_which_the_next_run_makes_up_for(step, tmp_path):
    seen = []

    def batches():
        for i in range(5):
            seen.append(i)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield fitting.batch(seed=i)

    evaluate = Evaluation(fitting.loss_fn, batches)
    records = []
    with pytest.raises(Preempted) as e:
        run(step, tmp_path, evaluate=evaluate, evaluate_every=3)
    assert (e.value.step, Checkpoints(tmp_path).steps()) == (3, [3])
    fit(
        step,
        fitting.start(step),
        Batches(fitting.make_data(), 16, seed=0),
        steps=4,
        checkpoint=tmp_path,
        evaluate=evaluate,
        evaluate_every=3,
        log=records.append,
    )
    assert [r["step"] for r in records if r["event"] == "evaluation"] == [3, 4]


def test_a_signal_during_compilation_is_obeyed_when_that_is_done(tmp_path):
    @meshdp.distributed(mesh=MESH)
    def step(n, batch):
        os.kill(os.getpid(), signal.SIGTERM)  # while it is traced
        return n + 1, batch.sum()

    with pytest.raises(Preempted) as e:
        fit(step, jnp.int32(0), [np.ones(8)] * 9, steps=9, checkpoint=tmp_path, log=None)
    assert (e.value.step, Checkpoints(tmp_path).steps()) == (1, [1])


def test_a_signal_while_waiting_for_data_ends_the_run(step, tmp_path):
    never = threading.Event()

    def batches():
        yield fitting.batch()
        os.kill(os.getpid(), signal.SIGTERM)
        never.wait(30)

    with pytest.raises(Preempted) as e:
        fit(step, fitting.start(step), batches(), steps=9, checkpoint=tmp_path, log=None)
    never.set()
    assert e.value.step in (0, 1)


def test_no_handler_is_installed_outside_the_main_thread(step):
    out = []
    batches = [fitting.batch()] * 2
    state = fitting.start(step)
    thread = threading.Thread(
        target=lambda: out.append(fit(step, state, batches, steps=2, log=None).step)
    )
    thread.start()
    thread.join()
    assert out == [2]


# Hanging.


@pytest.fixture
def catch(monkeypatch, tmp_path):
    """Begins to catch what the watchdog writes, stacks included; gives a function to read it.

    In the test, since pytest sets `sys.stderr` anew when the test begins.
    """
    file = (tmp_path / "stderr").open("w+")

    def begin():
        monkeypatch.setattr(sys, "stderr", file)
        monkeypatch.setattr(sys, "__stderr__", file)
        return lambda: (tmp_path / "stderr").read_text()

    yield begin
    file.close()


def test_the_watchdog_tells_the_program_and_every_stack_and_ends_the_process(catch, step):
    errors = catch()
    ended = threading.Event()
    status = []
    watchdog = Watchdog(0.2, end=True)
    watchdog._end = lambda code: (status.append(code), ended.set())

    class Hanging(type(step)):
        def __call__(self, state, batch):
            taken.append(1)
            if len(taken) == 4:
                ended.wait(20)
            return super().__call__(state, batch)

    taken = []
    hanging = fitting.make_step(MESH)
    hanging.__class__ = Hanging
    fit(
        hanging,
        fitting.start(step),
        [fitting.batch()] * 5,
        steps=5,
        log=None,
        watchdog=watchdog,
    )
    assert status == [76]
    lines = errors().splitlines()
    assert lines[0].startswith("meshdp watchdog: nothing finished for 0.")
    assert lines[0].endswith(
        " s (limit 0.2 s) in step 4. The last program given to the devices was jit_loss_fn; "
        "ending with status 76. Every thread:"
    )
    assert any("test_loop_stop.py" in line for line in lines)
    assert any("_prefetch.py" in line or "_watchdog.py" in line for line in lines)


def test_the_watchdog_is_silent_between_steps_and_about_the_first(catch, step):
    errors = catch()
    fit(
        fitting.make_step(MESH),  # compiles for longer than the limit
        fitting.start(step),
        [fitting.batch()] * 3,
        steps=3,
        log=None,
        watchdog=Watchdog(0.1),
        callbacks=[lambda n, m: time.sleep(0.3)],
    )
    assert errors() == ""


@pytest.mark.parametrize("seconds", [0, "30"])
def test_a_limit_of_no_time_is_refused(seconds):
    with pytest.raises(ValueError) as e:
        Watchdog(seconds)
    assert str(e.value) == (
        f"Watchdog(seconds={seconds!r}): a limit in seconds, above 0; leave the watchdog out "
        "to have none."
    )
