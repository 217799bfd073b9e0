"""`python -m compat run|doctor`, as a person starts them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from compat.__main__ import main
from compat._doctor import removed_names

PROGRAMS = Path(__file__).parent / "programs"


def compat(*args, cwd=None):
    command = [sys.executable, "-m", "compat", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


def losses(text):
    return [float(x) for x in re.findall(r"(?:Loss:|first|last) (\S+)", text)]


def test_the_tutorials_linear_regression_runs_word_for_word():
    done = compat("run", "--cpu-devices", 8, PROGRAMS / "linear_regression.py")
    assert done.returncode == 0, done.stderr
    assert "setup_tpu() is no longer needed" in done.stdout
    assert "可用的设备数量: 8" in done.stdout
    assert re.findall(r"Batch (\d+)", done.stdout) == ["0", "100"] * 3
    assert losses(done.stdout)[-1] < 1e-4 < losses(done.stdout)[0]
    w, b = re.search(r"weight (\S+) bias (\S+)", done.stdout).groups()
    assert abs(float(w) - 2) < 1e-2 and abs(float(b) - 1) < 1e-2


def test_the_same_program_dies_without_us():
    done = subprocess.run(
        [sys.executable, PROGRAMS / "linear_regression.py"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "No module named 'jax.tools.colab_tpu'" in done.stderr


@pytest.mark.slow
def test_an_old_flax_script_runs_with_arguments_on_the_newest_flax():
    done = compat("run", "--cpu-devices=8", PROGRAMS / "flax_batchnorm.py", 12)
    assert done.returncode == 0, done.stderr
    first, last = losses(done.stdout)
    assert last < 0.9 * first
    assert done.stdout.splitlines()[-1] == "tree 2 step 12"


def test_a_module_is_run_with_its_arguments(tmp_path):
    tmp_path.joinpath("old.py").write_text(
        "import jax, sys\nprint(__name__, sys.argv[1:], jax.tree_map(len, ['ab']))\n"
    )
    done = compat("run", "-m", "old", "--flag", "x", cwd=tmp_path)
    assert done.stdout == "__main__ ['--flag', 'x'] [2]\n"


def test_the_exit_status_and_the_error_are_the_programs_own(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    assert compat("run", script, 7).returncode == 7
    script.write_text("raise ValueError('incompatible devices for jitted computation')\n")
    done = compat("run", script)
    assert done.returncode == 1
    assert "compat.local(y) for all rows" in done.stderr.splitlines()[-1]


def test_a_script_finds_the_modules_beside_it(tmp_path):
    tmp_path.joinpath("beside.py").write_text("answer = 42\n")
    tmp_path.joinpath("script.py").write_text("import beside\nprint(beside.answer)\n")
    assert compat("run", tmp_path / "script.py").stdout == "42\n"


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ([], 2, "usage: python -m compat COMMAND ..."),
        (["--help"], 0, "usage: python -m compat COMMAND ..."),
        (["walk"], 2, "compat has no command 'walk'."),
        (["run"], 2, "usage: python -m compat run [--cpu-devices N] SCRIPT [ARGS...]"),
        (["run", "-m"], 2, "usage: python -m compat run [--cpu-devices N] SCRIPT [ARGS...]"),
        (
            ["run", "no.py"],
            2,
            "compat run: there is no file 'no.py'. For a module write -m no.py.",
        ),
        (
            ["run", "--cpu-devices", "many", "x.py"],
            2,
            "compat run: --cpu-devices wants a number of devices, not 'many'",
        ),
    ],
)
def test_a_wrong_command_line_gets_a_sentence(capsys, argv, status, words):
    assert main(argv) == status
    assert capsys.readouterr().out.splitlines()[0] == words


def test_the_doctor_tells_devices_versions_and_guilty_packages(tmp_path, monkeypatch):
    info = tmp_path / "oldlib-1.2.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Name: oldlib\nVersion: 1.2\nRequires-Dist: jax>=0.3\n"
    )
    info.joinpath("RECORD").write_text("oldlib.py,,\n")
    tmp_path.joinpath("oldlib.py").write_text("import jax\n\nf = jax.tree_map\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    done = compat("doctor")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^jax +\d+\.\d+", done.stdout, re.M)
    assert re.search(r"^devices +\d+ × ", done.stdout, re.M)
    assert "  oldlib 1.2: 1 uses\n" in done.stdout
    assert f"    {tmp_path / 'oldlib.py'}:3: jax.tree_map\n" in done.stdout


def test_the_doctor_knows_removed_names_from_comments_and_other_names():
    source = """
import jax.tools.colab_tpu
from jax import tree_map, pmap
from jax.tree_util import tree_multimap, tree_map as tm
# jax.device_put_sharded
jax.tree_util.tree_map(f, x); tree.tree_leaves(x)
jax.device_put_sharded(x, d); jax.tree_util.tree_multimap(f, x)
"""
    assert removed_names(source) == [
        (2, "jax.tools.colab_tpu"),
        (3, "jax.tree_map"),
        (4, "jax.tree_util.tree_multimap"),
        (7, "jax.device_put_sharded"),
        (7, "jax.tree_util.tree_multimap"),
    ]
