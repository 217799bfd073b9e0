"""`python -m meshdp demo`: its flags, its text, its progress, and the whole of it."""

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshdp import _demo
from meshdp.__main__ import main
from meshdp._mesh import make_mesh
from meshdp.train import Mean, make_train_step

ROOT = Path(__file__).parents[2]


def start(*flags, **options):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-W", "error", "-m", "meshdp", "demo", *flags]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipe, **options)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "python -m meshdp: a command is missing. The commands: demo, launch."),
        (["try"], "python -m meshdp: there is no command 'try'. The commands: demo, launch."),
        (
            ["demo", "--step", "3"],
            "python -m meshdp demo: unrecognized arguments: --step 3; --help lists the flags.",
        ),
        (
            ["demo", "--steps", "0"],
            (
                "python -m meshdp demo: argument --steps: '0' is not a whole number from 1; "
                "--help lists the flags."
            ),
        ),
        (
            ["demo", "--seed", "-1"],
            (
                "python -m meshdp demo: argument --seed: '-1' is not a whole number from 0; "
                "--help lists the flags."
            ),
        ),
        (
            ["demo", "--seed", "9" * 19],
            (
                "python -m meshdp demo: argument --seed: '9999999999999999999' has more than "
                "18 digits; --help lists the flags."
            ),
        ),
        (
            ["demo", "--accumulate"],
            (
                "python -m meshdp demo: argument --accumulate: expected one argument; "
                "--help lists the flags."
            ),
        ),
        (
            ["demo", "--mesh", "data=4,stage=2"],
            (
                "python -m meshdp demo: argument --mesh: 'stage=2' in 'data=4,stage=2'; it "
                "takes data, fsdp, tensor, each once and with a number of devices, such as "
                "data=4,fsdp=2; --help lists the flags."
            ),
        ),
        (
            ["demo", "--mesh", "data=4,data=2"],
            (
                "python -m meshdp demo: argument --mesh: 'data=2' in 'data=4,data=2'; it takes "
                "data, fsdp, tensor, each once and with a number of devices, such as "
                "data=4,fsdp=2; --help lists the flags."
            ),
        ),
        (
            ["demo", "--mesh", "data=5,fsdp=2"],
            (
                "python -m meshdp demo: argument --mesh: data=5 * fsdp=2 = 10, but there are 8 "
                "devices; nearest that work: data=4, fsdp=2 or data=8, fsdp=1."
            ),
        ),
        (
            ["demo", "--mesh", "data=-1,tensor=3"],
            (
                "python -m meshdp demo: argument --mesh: data=-1 * tensor=3: there are 8 "
                "devices, and 8 does not divide by 3; nearest that work: data=2, tensor=4 or "
                "data=4, tensor=2."
            ),
        ),
        (
            ["demo", "--text", "no/such/file"],
            (
                "python -m meshdp demo: argument --text: no/such/file cannot be read: "
                "No such file or directory."
            ),
        ),
    ],
)
def test_a_wrong_command_or_flag_gets_one_sentence(arguments, says, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == says + "\n"


def test_a_text_that_is_too_short_is_refused_with_both_lengths(tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 1000)
    assert main(["demo", "--text", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"python -m meshdp demo: argument --text: {path} has 1000 bytes; "
        "it takes at least 1290.\n"
    )


def wrong_report(path, problem):
    return (
        f"python -m meshdp demo: argument --report: {str(path)!r} {problem}; "
        "--help lists the flags.\n"
    )


def test_a_report_that_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    assert main(["demo", "--report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == wrong_report(tmp_path, "is a directory, not a file")

    path = tmp_path / "none" / "out.html"
    assert main(["demo", "--report", str(path)]) == 2
    problem = f"cannot be written: there is no directory {str(path.parent)!r}"
    assert capsys.readouterr().err == wrong_report(path, problem)

    assert main(["demo", "--report", ""]) == 2
    assert capsys.readouterr().err == wrong_report("", "is no file")


def test_a_report_without_permission_is_refused_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    path = tmp_path / "out.html"
    assert main(["demo", "--report", str(path)]) == 2
    problem = "cannot be written: Permission denied"
    assert capsys.readouterr().err == wrong_report(path, problem)


def test_the_report_of_a_step_is_written_and_gives_the_table_its_collectives(tmp_path, capsys):
    mesh = make_mesh(data=8)
    step = make_train_step(
        lambda model, batch, key: Mean.of(batch @ model["w"]), optax.sgd(0.1), mesh=mesh
    )
    state = step.init(lambda key: {"w": jnp.ones(4)}, jax.random.key(0))
    path = tmp_path / "out.html"
    found = _demo.write_report(step, state, jnp.ones((8, 4)), path)
    assert {(c.kind, c.axes) for c in found} == {("all-reduce", ("data",))}
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "Against the least possible" in text
    assert capsys.readouterr().out == f"report: {path}\n"

    with pytest.raises(_demo.Fault) as e:
        _demo.write_report(step, state, jnp.ones((8, 4)), tmp_path)
    assert str(e.value) == f"argument --report: {tmp_path} cannot be written: Is a directory"


def test_help_names_the_commands(capsys):
    assert main(["--help"]) == 0
    assert "  demo: trains a language model" in capsys.readouterr().out


def test_the_default_text_is_the_standard_library_the_same_each_time():
    (train, held_out, source), again = _demo.load_text(None), _demo.load_text(None)
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}'s standard library" in source
    np.testing.assert_array_equal(train, again[0])
    np.testing.assert_array_equal(held_out, again[1])
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert train.tobytes().startswith(first.read_bytes())


def test_one_block_in_ten_is_held_out_and_not_trained_on(tmp_path):
    path = tmp_path / "numbered.txt"
    path.write_bytes(bytes(np.repeat(np.arange(20, dtype=np.uint8), 200)))
    train, held_out, _ = _demo.load_text(path)
    # 4000 bytes: blocks of 400, which hold two numbers each.
    assert set(held_out.tolist()) == {18, 19}
    assert set(train.tolist()) == set(range(18))


def test_batches_are_windows_of_the_text_drawn_by_the_seed():
    text = np.arange(256, dtype=np.uint8)
    first = next(_demo.batches(text, 7, 5))
    assert first.shape == (5, _demo.CONTEXT + 1)
    np.testing.assert_array_equal(np.diff(first, axis=1), 1)
    np.testing.assert_array_equal(first, next(_demo.batches(text, 7, 5)))
    assert (first != next(_demo.batches(text, 8, 5))).any()


def test_without_a_terminal_progress_is_at_most_a_line_in_ten_steps(capsys):
    with _demo.progress(100, 1000) as advance:
        for i in range(100):
            advance(5 - i / 50)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert lines[0] == "step   1/100  loss 5.000  "
    assert re.fullmatch(r"step 100/100  loss 3\.020  [\d,]+ tokens/s  0 s left", lines[-1]), (
        lines[-1]
    )


def test_in_a_terminal_without_rich_progress_is_plain_lines(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    with _demo.progress(1, 1000) as advance:
        advance(5.0)
    assert capsys.readouterr().out == "step 1/1  loss 5.000  \n"


def test_in_a_terminal_progress_is_a_bar_with_loss_and_speed(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with _demo.progress(2, 1000) as advance:
        advance(5.0)
        advance(4.5)
    out = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"training ━+ 2/2 loss 4\.500 +[\d,]+ tokens/s +0 s left", out), out


@pytest.mark.slow
def test_the_demo_learns_real_text_and_proves_its_step_right(tmp_path):
    page = tmp_path / "out.html"
    done = start("--steps", "20", "--report", str(page))
    out, err = done.communicate(timeout=500)
    assert (done.returncode, err) == (0, "")
    before, after = map(float, re.findall(r"held-out loss: (\S+) (?:before|after)", out))
    assert after < 0.6 * before
    assert "mesh: data=2 x fsdp=2 x tensor=2, 8 cpu devices; accumulate=2" in out
    assert re.search(r"^step 20/20  loss \d\.\d+  [\d,]+ tokens/s  0 s left$", out, re.M)
    assert re.search(r"^sample:\n  \| .", out, re.M)
    assert re.search(r"^parity: \d+ leaves agree on 8 devices and on one", out, re.M)
    assert f"report: {page}\n" in out
    assert "Where things live" in page.read_text(encoding="utf-8")
    assert re.search(r"^fsdp +reduce-scatter +\d+ ", out, re.M)
    assert re.search(r"^tensor +all-reduce +\d+ ", out, re.M)


def test_devices_that_are_too_many_to_force_are_told_with_a_number_that_works():
    run = start("--mesh", "data=100000")
    _, err = run.communicate(timeout=60)
    assert err == (
        "python -m meshdp demo: argument --mesh: data=100000, but there are 256 devices; "
        "nearest that works: data=256.\n"
    )
    assert run.returncode == 2


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_with_one_line_on_a_number_of_devices_that_divides_nothing():
    with start("--steps", "500", "--mesh", "data=3") as run:
        for line in run.stdout:
            if line.startswith("step"):
                break
        time.sleep(1)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130
        assert run.stderr.read() == "\nStopped by Ctrl-C; the demo keeps nothing.\n"
