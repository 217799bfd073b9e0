"""`python -m meshdp launch`: flags, output, signals, restarts. No JAX in the programs."""

import os
import signal
import subprocess
import sys
import time

import pytest

from meshdp.launch import _command, _local


@pytest.fixture
def launched(monkeypatch, capfd):
    """Runs the command in this process, with programs that join nothing."""
    real = _local._environment

    def environment(*args):
        return {k: v for k, v in real(*args).items() if k != "MESHDP_JOIN"}

    class Popen(subprocess.Popen):
        def __init__(self, argv, **kwargs):
            number = kwargs["env"].get("NUMBER", "")
            super().__init__([argv[0], *argv[3:]], **kwargs)
            self.number = number

    numbers = iter(range(100))

    def numbered(*args):
        return {**environment(*args), "NUMBER": str(next(numbers) % 2)}

    monkeypatch.setattr(_local, "_environment", numbered)
    monkeypatch.setattr(_local.subprocess, "Popen", Popen)

    def run(*arguments):
        status = _command.main(arguments)
        out, err = capfd.readouterr()
        return status, out, err

    return run


def test_the_output_of_each_process_is_marked(launched):
    code = "import os, sys; print('out', os.environ['NUMBER'] ); print('err', file=sys.stderr)"
    status, out, err = launched("-c", code)
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert sorted(err.splitlines()) == ["[0] err", "[1] err"]


def test_one_that_dies_ends_all_and_gives_its_status(launched):
    code = "import os, sys, time; time.sleep(30 * (os.environ['NUMBER'] == '0')); sys.exit(3)"
    begun = time.monotonic()
    status, _, err = launched("-c", code)
    assert status == 3
    assert err == "meshdp launch: process 1 ended with exit status 3; all were stopped.\n"
    assert time.monotonic() - begun < 20


def test_all_are_started_again_as_often_as_allowed(launched, tmp_path):
    code = f"open({str(tmp_path / 'tries')!r}, 'a').write('x'); raise SystemExit(75)"
    status, _, err = launched("--max-restarts", "2", "--processes=1", "-c", code)
    assert (status, (tmp_path / "tries").read_text()) == (75, "xxx")
    stopped = "meshdp launch: process 0 ended with exit status 75; all were stopped"
    assert err.splitlines() == [
        f"{stopped}; starting again, 2 restarts left.",
        f"{stopped}; starting again, 1 restart left.",
        f"{stopped}.",
    ]


def test_a_signal_reaches_all_and_ends_the_restarts(launched):
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "if os.environ['NUMBER'] == '0': os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(30)\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    status, out, err = launched("--max-restarts=5", "--processes", "1", "-c", code)
    assert (status, out.splitlines()) == (75, ["[0] ready"])
    assert err == "meshdp launch: process 0 ended with exit status 75; all were stopped.\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_has_not_ended_some_time_after_a_signal_is_killed(launched, monkeypatch):
    monkeypatch.setattr(_local, "GRACE", 0.2)
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(30)\n"
    )
    begun = time.monotonic()
    status, _, err = launched("--max-restarts=5", "--grace=1", "--processes=1", "-c", code)
    assert status == 128 + signal.SIGTERM
    assert err == (
        "meshdp launch: not all had ended 1 s after SIGTERM, the --grace; they were killed.\n"
    )
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    "arguments, fault",
    [
        (["-c"], "-c takes code"),
        (["-m"], "-m takes a module"),
        (["-m", "no_such.module"], "there is no module 'no_such.module'"),
        (["no_such.py", "--x"], "there is no file 'no_such.py'"),
        ([], "a program is missing: script.py, -m module or -c code"),
        (
            ["--processes", "0", "x.py"],
            "argument --processes: '0' is not a whole number from 1",
        ),
        (["--process", "2", "x.py"], "unrecognized arguments: --process 2"),
    ],
)
def test_wrong_flags_are_named(capsys, arguments, fault):
    assert _command.main(arguments) == 2
    words = capsys.readouterr().err
    assert words.startswith(f"python -m meshdp launch: {fault}")


def test_the_flags_after_the_program_are_its_own():
    flags = _command.parse(["--devices", "4", "train.py", "--devices", "9"])
    assert (flags.devices, flags.program) == (4, ["train.py", "--devices", "9"])
    assert _command.parse(["-m", "package", "-x"]).program == ["-m", "package", "-x"]


def test_the_command_is_known_to_python_m_meshdp():
    done = subprocess.run(
        [sys.executable, "-m", "meshdp", "launch", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--max-restarts" in done.stdout
    assert os.path.exists(_command.__file__)
