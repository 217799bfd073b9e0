"""The commands in trouble: odd files, odd notebooks, interruptions."""

import json
import os
import signal
import subprocess
import sys

import pytest

from compat.migrate import cli

OLD = "import jax\njax.tree_map(abs, x)\n"
NEW = OLD.replace("tree_map", "tree.map")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *argv):
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def notebook(*cells):
    found = [{"cell_type": "code", "metadata": {}, "source": cell} for cell in cells]
    return {"cells": found, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def test_a_file_that_cannot_be_written_is_named_and_the_others_are(folder, capsys, monkeypatch):
    (folder / "a.py").write_text(OLD)
    (folder / "b.py").write_text(OLD)
    replace = os.replace

    def refuse(old, new):
        if str(new).endswith("a.py"):
            raise PermissionError(13, "no")
        replace(old, new)

    monkeypatch.setattr(os, "replace", refuse)
    assert run(capsys, "fix", ".") == (
        2,
        "b.py: rewritten\n1 of 2 files rewritten.\n",
        "a.py: cannot be written: [Errno 13] no. Left as it is.\n",
    )
    assert ((folder / "a.py").read_text(), (folder / "b.py").read_text()) == (OLD, NEW)


def test_ctrl_c_ends_without_a_traceback(folder, capsys, monkeypatch):
    (folder / "a.py").write_text(OLD)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    want = "Interrupted. Every file is as it was, or rewritten whole.\n"
    assert run(capsys, "fix", "a.py") == (130, "", want)
    assert [p.name for p in folder.iterdir()] == ["a.py"]
    assert (folder / "a.py").read_text() == OLD


def test_ctrl_c_reaches_the_one_that_writes_and_not_its_helpers():
    ask = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    before = signal.getsignal(signal.SIGINT)
    with cli._ignoring_ctrl_c():
        helper = subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE)
    assert signal.getsignal(signal.SIGINT) is before
    assert helper.communicate()[0].strip() == b"True"


def test_a_reader_that_leaves_is_no_error(folder):
    (folder / "a.py").write_text(OLD + "jax.tree_map(abs, x)\n" * 2000)
    command = f"{sys.executable} -m compat check a.py | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("a.py:2:1: MD102 ")
    assert done.stderr == ""


def test_a_file_is_read_once_by_whatever_names(folder, capsys):
    (folder / "a.py").write_text(OLD)
    (folder / "link.py").symlink_to("a.py")
    _, out, _ = run(capsys, "check", "a.py", ".", str(folder / "a.py"))
    assert out.endswith("1 finding (1 breaks), 1 of them fixable; 1 file read.\n")


def test_an_environment_in_a_folder_is_passed_by(folder, capsys):
    (folder / "env" / "lib").mkdir(parents=True)
    (folder / "env" / "pyvenv.cfg").write_text("")
    (folder / "env" / "lib" / "a.py").write_text(OLD)
    assert run(capsys, "check", ".") == (0, "Nothing found; 0 files read.\n", "")
    assert run(capsys, "check", "env")[0] == 1


def test_what_is_nested_too_deeply_is_refused(folder, capsys):
    (folder / "a.py").write_text(OLD + "y = " + " + ".join(["x"] * 5000))
    code, _, err = run(capsys, "fix", "a.py")
    assert (code, err) == (2, "a.py: nested too deeply to be read. Left as it is.\n")


def test_a_diff_breaks_lines_where_python_does(folder, capsys):
    (folder / "a.py").write_text("import jax\ns = '''\x0c\u2028'''\njax.tree_map(abs, x)\n")
    assert run(capsys, "fix", "--diff", "a.py")[1] == (
        "--- a/a.py\n+++ b/a.py\n@@ -1,3 +1,3 @@\n import jax\n s = '''\x0c\u2028'''\n"
        "-jax.tree_map(abs, x)\n+jax.tree.map(abs, x)\n"
    )


def test_a_version_below_nought_is_an_error_of_usage(folder, capsys):
    with pytest.raises(SystemExit):
        cli.main(["check", "--jax=-1.0", "."])
    assert "not a JAX version: '-1.0'." in capsys.readouterr().err


CELLS = (
    "import jax\nx = jax.tree_map(abs, y)  # all of it?",
    "z = ('%s'\n  % jax.tree_map(abs, 1))\njax.tree_map?",
    "files = !ls\nn, t = %timeit -o f()\njax.tree_map(abs, files)",
    "%%capture out\njax.tree_map(abs, 1)",
)


def test_a_notebook_is_python_wherever_it_can_be(folder, capsys):
    (folder / "a.ipynb").write_text(json.dumps(notebook(*CELLS)))
    assert run(capsys, "fix", "a.ipynb")[0] == 0
    fixed = [c["source"] for c in json.loads((folder / "a.ipynb").read_text())["cells"]]
    want = [c.replace("tree_map(", "tree.map(") for c in CELLS]
    assert fixed == want


def test_the_diff_of_a_notebook_is_what_people_wrote(folder, capsys):
    cells = ("%matplotlib inline\nimport jax", "jax.tree_map(abs, x)\n!ls")
    (folder / "a.ipynb").write_text(json.dumps(notebook(*cells)))
    assert run(capsys, "fix", "--diff", "a.ipynb")[1] == (
        "--- a/a.ipynb\n+++ b/a.ipynb\n@@ -2,5 +2,5 @@\n %matplotlib inline\n import jax\n"
        " # cell 2\n-jax.tree_map(abs, x)\n+jax.tree.map(abs, x)\n !ls\n"
    )


def test_a_notebook_keeps_its_line_ends_and_escapes(folder, capsys):
    text = json.dumps(notebook("import jax\r\n", "jax.tree_map(f, '\u00e9')"), indent=1)
    (folder / "a.ipynb").write_bytes(text.replace("\n", "\r\n").encode())
    run(capsys, "fix", "a.ipynb")
    want = text.replace("tree_map", "tree.map").replace("\n", "\r\n")
    assert (folder / "a.ipynb").read_bytes() == want.encode()


def test_annotations_name_the_cell(folder, capsys):
    (folder / "a.ipynb").write_text(json.dumps(notebook("import jax", "jax.tree_map")))
    _, out, _ = run(capsys, "check", "--format", "github", "a.ipynb")
    assert out.startswith(
        "::error file=a.ipynb,line=1,col=1,title=MD102::Cell 2: jax.tree_map is not in JAX"
    )
