"""`python -m meshdp demo --run DIR`, ended by a signal and resumed."""

import json
import signal
import subprocess
import sys

import pytest

from meshdp import _demo
from meshdp.loop import Checkpoints


def demo(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "meshdp", "demo", "--mesh", "data=2", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_to(line, *arguments):
    """Starts the demo and waits for a line that begins so."""
    process = demo(*arguments)
    for said in process.stdout:
        if said.startswith(line):
            return process
    raise AssertionError(process.stderr.read())


@pytest.mark.slow
def test_a_demo_that_was_ended_goes_on_where_it_was(tmp_path):
    at = ["--steps", "30", "--run", tmp_path]
    first = run_to("step  3/30  loss ", *at)
    first.send_signal(signal.SIGTERM)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 75, err
    (*_, saved) = Checkpoints(tmp_path / "checkpoints").steps()
    assert 3 <= saved < 30
    second = run_to(f"step {saved + 1:2}/30  loss ", *at, "--resume")
    second.kill()
    second.communicate()
    records = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert [r["step"] for r in records if r["event"] == "start"] == [0, saved]


def test_a_run_is_not_gone_on_with_unasked(tmp_path):
    (tmp_path / "checkpoints" / "00000012").mkdir(parents=True)
    with pytest.raises(_demo.Fault) as e:
        _demo.open_run(_demo.parse(["--run", str(tmp_path)]))
    assert str(e.value) == (
        f"argument --run: {tmp_path} has a run that came to step 12; go on with --resume, or "
        "choose another directory"
    )
    assert _demo.open_run(_demo.parse(["--run", str(tmp_path), "--resume"])).steps() == [12]


def test_to_resume_takes_a_directory():
    with pytest.raises(_demo.Fault) as e:
        _demo.parse(["--resume"])
    assert str(e.value) == (
        "argument --resume: it needs --run DIR, the directory to go on from"
    )


def test_a_directory_that_cannot_be_made_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert _demo.main(["--run", str(tmp_path / "file")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "python -m meshdp demo: argument --run: No checkpoints can be saved in "
        f"{tmp_path / 'file' / 'checkpoints'}: it cannot be written to (Not a directory).\n"
    )
