"""Directories that cannot be saved in, saves that fail, checkpoints that may not be read."""

import socket
import subprocess
import sys

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp._place import place
from meshdp.loop import Checkpoints, TensorBoard, _files, _lock, fit

from . import fitting

MESH = meshdp.make_mesh(data=2, fsdp=4)


def state(n=1.0):
    x = np.random.default_rng(int(n)).normal(size=1000)  # which no compression makes small
    return {"x": place(x, NamedSharding(MESH, P()))}


@pytest.fixture(scope="module")
def step():
    return fitting.make_step(MESH)


def run(step, at, records=None, steps=3, **kwargs):
    log = None if records is None else records.append
    return fit(
        step,
        fitting.start(step),
        [fitting.batch(seed=i) for i in range(steps)],
        steps=steps,
        checkpoint=at,
        log=log,
        **kwargs,
    )


# Two runs in one directory.

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
file.truncate(0)
print(sys.argv[2], end="", file=file, flush=True)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that saves in `tmp_path`; called with what it says of itself."""
    started = []

    def start(words):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / ".lock"), words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        end(process)


def end(process):
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_a_directory_in_which_another_run_saves_is_refused_until_that_has_ended(
    step, tmp_path, other
):
    words = f"process 7 on {socket.gethostname()}"
    process = other(words)
    with pytest.raises(OSError) as e:
        run(step, tmp_path)
    assert str(e.value) == (
        f"No checkpoints can be saved in {tmp_path}: {words} saves there. End it, or choose "
        "another directory."
    )
    with pytest.raises(OSError, match="saves there"):
        Checkpoints(tmp_path).save(1, state())
    end(process)
    assert run(step, tmp_path).step == 3


def test_a_run_on_another_machine_is_waited_for_in_case_it_died(tmp_path, other, monkeypatch):
    process = other("process 7 on elsewhere")
    monkeypatch.setattr(_lock, "PATIENCE", 0.1)
    with pytest.raises(OSError, match="process 7 on elsewhere saves there"):
        Checkpoints(tmp_path).claim()
    monkeypatch.setattr(_lock, "PATIENCE", 60.0)
    monkeypatch.setattr(_lock.time, "sleep", lambda _: end(process))
    Checkpoints(tmp_path).claim()


# A disk that is full, a directory that cannot be.


def test_a_directory_that_cannot_be_made_is_refused_before_the_first_step(step, tmp_path):
    (tmp_path / "file").touch()
    at, seen = tmp_path / "file" / "run", []
    with pytest.raises(OSError) as e:
        run(step, at, callbacks=[lambda n, m: seen.append(n)])
    assert str(e.value) == (
        f"No checkpoints can be saved in {at}: it cannot be written to (Not a directory)."
    )
    assert seen == []


# In a process of its own: pytest writes files too. Orbax drops its other writes, half done.
SAVES = """
import pathlib, resource, sys
import numpy as np
import jax
jax.config.update("jax_platforms", "cpu")
from meshdp.loop import Checkpoints

def state(n):  # which no compression makes small
    return {"x": jax.device_put(np.random.default_rng(n).normal(size=1000))}

checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, state(1))
checkpoints.wait()
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as on a disk that is full
try:
    checkpoints.save(2, state(2))
    checkpoints.wait()
except Exception as e:
    print("File too large" in str(e), e.__notes__[-1])
checkpoints.close()  # it has been told
resource.setrlimit(resource.RLIMIT_FSIZE, before)
print(Checkpoints(sys.argv[1]).restore(state(0)).step)
"""


def test_a_save_that_fails_is_told_with_the_checkpoint_that_is_left(tmp_path):
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == (
        f"True The checkpoint of step 2 in {tmp_path} was not written to its end; the newest "
        "is of step 1.\n1\n"
    ), done.stderr


def test_what_ends_the_run_is_told_with_the_last_step_and_checkpoint(step, tmp_path):
    def callback(n, metrics):
        if n == 2:
            raise RuntimeError("an odd number")

    with pytest.raises(RuntimeError, match="^an odd number") as e:
        run(step, Checkpoints(tmp_path, every=1), callbacks=[callback])
    assert e.value.__notes__ == [
        f"fit had begun 2 steps; the last checkpoint is of step 1, in {tmp_path}."
    ]


# What is found at the start.


def test_a_half_written_checkpoint_is_kept_when_its_step_is_saved_again(step, tmp_path, caplog):
    half = tmp_path / "00000003.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    run(step, tmp_path)
    assert Checkpoints(tmp_path).steps() == [3]
    assert (tmp_path / "00000003.unfinished" / "state").is_dir()
    assert [r.getMessage() for r in caplog.records] == [
        f"{half.name} in {tmp_path} was not written to its end; kept as 00000003.unfinished."
    ]


def test_a_run_without_a_good_checkpoint_says_that_it_begins_anew(step, tmp_path):
    (tmp_path / "00000002").mkdir()
    records = []
    run(step, tmp_path, records)
    assert [r["text"] for r in records if r["event"] == "note"] == [
        f"no checkpoint in {tmp_path} is good; beginning at step 0"
    ]


def test_a_checkpoint_that_may_not_be_read_is_no_damaged_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state())
    checkpoints.close()

    def forbidden(directory, step):
        raise PermissionError(13, "Permission denied", "metadata")

    monkeypatch.setattr(_files, "information", forbidden)
    with pytest.raises(PermissionError):
        checkpoints.restore(state())
    assert checkpoints.steps() == [1]


# Extras that are not installed.


@pytest.mark.parametrize(
    ("package", "make", "words"),
    [
        ("orbax.checkpoint", Checkpoints, "Checkpoints need orbax-checkpoint"),
        ("tensorboardX", TensorBoard, "TensorBoard logs need tensorboardX"),
    ],
)
def test_without_an_extra_the_command_that_installs_it_is_told(
    tmp_path, monkeypatch, package, make, words
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as e:
        make(tmp_path)
    assert str(e.value) == f"{words}: pip install 'meshdp[train]'"
    assert e.value.__suppress_context__  # one error, not two


def test_fit_without_orbax_tells_it_before_anything_else(step, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match="pip install 'meshdp"):
        run(step, tmp_path)
