"""The local launcher: processes that are one JAX program, and that end together."""

import os
import subprocess
import sys
import time

import pytest

from meshdp.launch import _local
from meshdp.launch._local import ProcessesFailed, run

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(_local, "GRACE", 0.3)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] != "Z"


def assert_gone(pids, seconds=10.0):
    end = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_each_process_is_told_its_number_its_devices_and_its_arguments(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, jax\n"
        "from meshdp.launch import initialize\n"
        "import beside\n"
        "initialize()\n"  # joined already
        "print(jax.process_index(), jax.process_count(), jax.device_count(), sys.argv[1:])\n"
        "print(beside.name, file=sys.stderr)\n"
        "sys.exit()\n"
    )
    (tmp_path / "beside.py").write_text("name = 'found'\n")
    lines = []
    ended = run(
        [str(program), "--steps", "3"],
        processes=2,
        devices=2,
        timeout=60,
        on_line=lambda process, line: lines.append((process, line)),
    )
    assert [e.stdout for e in ended] == [f"{i} 2 4 ['--steps', '3']\n" for i in (0, 1)]
    assert [(e.process, e.returncode) for e in ended] == [(0, 0), (1, 0)]
    assert {e.stderr for e in ended} == {"found\n"}
    assert sorted(lines) == sorted(
        (i, line) for i in (0, 1) for line in ("found\n", ended[i].stdout)
    )


def test_when_one_fails_all_are_stopped_and_each_says_why(impatient):
    program = (
        "import jax, subprocess, sys, time\n"
        "if jax.process_index() == 1: raise ValueError('bad luck')\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n" + SLEEP
    )
    with pytest.raises(ProcessesFailed) as e:
        run(["-c", program], processes=2, devices=1, timeout=60)
    first, second = e.value.ended
    assert (first.returncode, second.returncode) == (-15, 1)
    assert second.stderr.endswith("ValueError: bad luck\n")
    message = str(e.value)
    assert message.startswith("process 1 failed first, of 2 processes; all were stopped.\n")
    assert "--- process 0, signal SIGTERM\n" in message
    assert "--- process 1, exit status 1\n" in message
    assert message.endswith("ValueError: bad luck")
    assert_gone([int(pid) for pid in first.stdout.split()])


@pytest.mark.parametrize(
    ("leave", "status", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        # As Python itself says it: without the frames of what started the program.
        (
            "raise KeyboardInterrupt",
            130,
            (
                'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
                "KeyboardInterrupt\n"
            ),
        ),
    ],
)
def test_an_exit_status_is_handed_on_without_waiting_for_others(impatient, leave, status, said):
    with pytest.raises(ProcessesFailed) as e:
        run(["-c", f"import sys; {leave}"], processes=1, devices=1, timeout=60)
    assert e.value.ended[0].returncode == status
    assert e.value.ended[0].stderr == said


def test_when_time_is_up_all_are_stopped(impatient):
    with pytest.raises(ProcessesFailed) as e:
        run(["-c", SLEEP], processes=1, devices=1, timeout=0.5)
    assert str(e.value).startswith("0.5 s were not enough, of 1 processes; all were stopped.\n")
    assert e.value.ended[0].returncode < 0


def test_when_the_caller_dies_all_end():
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    call = (
        "from meshdp.launch._local import run\n"
        f"run(['-c', {program!r}], processes=1, devices=1, "
        "on_line=lambda _, line: print(line, flush=True))"
    )
    caller = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True)
    with caller:
        pid = int(caller.stdout.readline())
        assert is_running(pid)
        caller.kill()
    assert_gone([pid])


@pytest.mark.parametrize("wrong", [{"processes": 0}, {"processes": 2, "devices": 0}])
def test_at_least_one_process_and_device_are_needed(wrong):
    with pytest.raises(ValueError, match="^(processes|devices)=0, expected at least 1.$"):
        run(["-c", SLEEP], **wrong)


def test_the_older_flag_for_cpu_devices_does_not_reach_the_processes(monkeypatch):
    flags = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=8"
    monkeypatch.setenv("XLA_FLAGS", flags)
    env = _local._environment({"X": "1"}, 2, "address", 2, 1, 9)
    assert env["XLA_FLAGS"].strip() == "--xla_cpu_enable_fast_math=false"
    assert (env["JAX_NUM_CPU_DEVICES"], env["X"]) == ("2", "1")
    assert _local._environment(None, None, "address", 2, 1, 9)["XLA_FLAGS"] == flags
