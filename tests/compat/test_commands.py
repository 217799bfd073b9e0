"""`python -m compat run|doctor`, as a person starts them."""

import re
import signal
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


@pytest.mark.parametrize(
    "text",
    [
        "def divide():\n    return 1 / 0\n\ndivide()\n",
        "if True\n    pass\n",
        "try:\n    {}[1]\nexcept KeyError as e:\n    raise OSError('lost') from e\n",
    ],
    ids=["within_a_function", "syntax", "with_a_cause"],
)
def test_a_program_that_fails_fails_as_it_would_alone(tmp_path, text):
    script = tmp_path / "fails.py"
    script.write_text(text)
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True)
    done = compat("run", script)
    assert (done.returncode, done.stderr, done.stdout) == (1, alone.stderr, "")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_a_program_starts_have_the_names_and_the_devices(tmp_path, method):
    script = tmp_path / "starts.py"
    script.write_text(
        "import multiprocessing, jax\n"
        "double = jax.pmap(lambda x: jax.tree_map(lambda y: 2 * y, x))\n"
        "def child(queue):\n"
        "    queue.put([jax.host_id(), double(jax.numpy.arange(4))[3].item()])\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context('{method}')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    print(process.exitcode, queue.get(timeout=1))\n"
    )
    done = compat("run", "--cpu-devices", 4, script)
    assert (done.stdout, done.returncode) == ("0 [0, 6]\n", 0), done.stderr


@pytest.mark.slow
def test_an_old_flax_script_runs_with_arguments_on_the_newest_flax():
    done = compat("run", "--cpu-devices=8", PROGRAMS / "flax_batchnorm.py", 30)
    assert done.returncode == 0, done.stderr
    first, last = losses(done.stdout)
    assert last < 0.05 < 2 < first  # nats; guessing one of ten classes costs 2.3
    assert done.stdout.splitlines()[-1] == "tree 2 step 30"


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


def test_the_names_stay_for_threads_and_exit_functions_that_outlive_the_script(tmp_path):
    script = tmp_path / "outlives.py"
    script.write_text(
        "import atexit, jax, threading, time\n"
        "def late(who):\n"
        "    time.sleep(0.2)\n"
        "    print(who, jax.tree_map(len, ['ab']), jax.pmap.__module__)\n"
        "atexit.register(late, 'atexit')\n"
        "threading.Thread(target=late, args=('thread',)).start()\n"
    )
    done = compat("run", script)
    assert done.stdout == "thread [2] compat._pmap\natexit [2] compat._pmap\n"
    assert done.stderr == ""


def test_ctrl_c_reaches_the_script_and_ends_as_pythons_own(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(
        "import jax, time\n"
        "try:\n    print('going', flush=True)\n    time.sleep(60)\n"
        "finally:\n    print('saved', jax.tree_map(len, ['ab']))\n"
    )
    command = [sys.executable, "-m", "compat", "run", str(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (-signal.SIGINT, "saved [2]\n")
    assert err.splitlines()[-1] == "KeyboardInterrupt"


def test_a_script_may_set_jaxs_variables_before_it_imports_jax(tmp_path):
    script = tmp_path / "sets.py"
    script.write_text(
        "import os\n"
        "os.environ['JAX_ENABLE_X64'] = '1'\n"
        "os.environ['JAX_NUM_CPU_DEVICES'] = '3'\n"
        "os.environ['JAX_NO_SUCH_OPTION'] = '1'\n"
        "import jax, jax.numpy as jnp\n"
        "print(jnp.ones(1).dtype, jax.device_count())\n"
        "os.environ['JAX_ENABLE_X64'] = '0'\n"
        "print(jnp.ones(1).dtype, os.environ['JAX_ENABLE_X64'])\n"
    )
    assert compat("run", script).stdout == "float64 3\nfloat64 0\n"
    assert compat("run", "--cpu-devices", 2, script).stdout == "float64 2\nfloat64 0\n"


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
        (
            ["run", "--cpu-devices=²", "x.py"],
            2,
            "compat run: --cpu-devices wants a number of devices, not '²'",
        ),
        (
            ["run", "--verbose", "x.py"],
            2,
            "compat run: there is no option '--verbose'. Those of the program come after it.",
        ),
        (
            ["run", "--", "no.py"],
            2,
            "compat run: there is no file 'no.py'. For a module write -m no.py.",
        ),
        (["run", "-m", "os.no"], 2, "compat run: there is no module 'os.no' to run."),
        (
            ["run", str(PROGRAMS)],
            2,
            f"compat run: {str(PROGRAMS)!r} is a folder without a __main__.py.",
        ),
        (
            ["run", "--help"],
            0,
            "usage: python -m compat run [--cpu-devices N] SCRIPT [ARGS...]",
        ),
        (["doctor", "jax"], 2, "compat doctor takes no arguments, not 'jax'."),
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
