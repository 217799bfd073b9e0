"""The commands: what they print, write and return."""

import json
import os
import stat
import subprocess
import sys

import libcst
import pytest

from compat.migrate import cli

OLD = "import jax\n\n\ndef f(x):\n    return jax.tree_map(abs, x)\n"
NEW = OLD.replace("tree_map", "tree.map")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a file that breaks, one that is slow, and one that is fine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "breaks.py").write_text(OLD)
    (tmp_path / "src" / "slow.py").write_text("from flax.jax_utils import unreplicate\n")
    (tmp_path / "src" / "fine.py").write_text("import jax\njax.tree.map(abs, [1])\n")
    return tmp_path


def run(capsys, *argv):
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_check_says_where_what_and_what_to_do(folder, capsys):
    code, out, err = run(capsys, "check", "src")
    where = os.path.join("src", "breaks.py")
    slow = os.path.join("src", "slow.py")
    assert (code, err) == (1, "")
    assert out == (
        f"{where}:5:12: MD102 breaks: jax.tree_map is not in JAX 0.6 or later: "
        "it raises AttributeError.\n"
        "    Write jax.tree.map. (fix: python -m compat fix)\n"
        f"{slow}:1:28: MD303 slow: flax.jax_utils.unreplicate runs an operation for each "
        "leaf, and its result stays tied to a device.\n"
        "    Use compat.unreplicate, which reads one shard of each leaf and ties it to nothing."
        " (fix: python -m compat fix)\n"
        "2 findings (1 breaks, 1 slow), 2 of them fixable; 3 files read.\n"
    )


def test_check_returns_nought_when_nothing_breaks(folder, capsys):
    assert run(capsys, "check", "src/slow.py")[0] == 0
    assert run(capsys, "check", "src/fine.py") == (0, "Nothing found; 1 file read.\n", "")


def test_check_judges_against_the_jax_asked_for(folder, capsys):
    (folder / "new.py").write_text("import jax\njax.core.gensym()\n")
    assert run(capsys, "check", "--jax", "0.12", "new.py")[0] == 1
    assert run(capsys, "check", "--jax", "0.10.2", "new.py")[0] == 0


def test_json_has_the_place_and_both_sentences(folder, capsys):
    _, out, _ = run(capsys, "check", "--format", "json", "src/breaks.py")
    assert json.loads(out) == {
        "files": 1,
        "findings": [
            {
                "path": "src/breaks.py",
                "cell": None,
                "line": 5,
                "column": 12,
                "code": "MD102",
                "severity": "breaks",
                "what": "jax.tree_map is not in JAX 0.6 or later: it raises AttributeError.",
                "do": "Write jax.tree.map.",
                "fixable": True,
            }
        ],
    }


def test_sarif_names_rule_level_and_region(folder, capsys):
    _, out, _ = run(capsys, "check", "--format", "sarif", "src/breaks.py")
    sarif = json.loads(out)
    (result,) = sarif["runs"][0]["results"]
    rules = {r["id"] for r in sarif["runs"][0]["tool"]["driver"]["rules"]}
    assert sarif["version"] == "2.1.0"
    assert (result["ruleId"], result["level"]) == ("MD102", "error")
    assert result["ruleId"] in rules
    location = result["locations"][0]["physicalLocation"]
    assert location == {
        "artifactLocation": {"uri": "src/breaks.py"},
        "region": {"startLine": 5, "startColumn": 12},
    }
    assert sarif["runs"][0]["columnKind"] == "unicodeCodePoints"


def test_sarif_writes_paths_as_addresses(folder, capsys):
    (folder / "a b%é.py").write_text(OLD)
    for path, uri in (
        ("a b%é.py", "a%20b%25%C3%A9.py"),
        (str(folder / "a b%é.py"), (folder / "a b%é.py").as_uri()),
    ):
        _, out, _ = run(capsys, "check", "--format", "sarif", path)
        (result,) = json.loads(out)["runs"][0]["results"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": uri}


def test_github_annotations_are_one_line_each(folder, capsys):
    _, out, _ = run(capsys, "check", "--format", "github", "src/breaks.py")
    assert out == (
        "::error file=src/breaks.py,line=5,col=12,title=MD102::jax.tree_map is not in JAX 0.6 "
        "or later: it raises AttributeError. Write jax.tree.map.\n"
    )


def test_github_annotations_escape_what_would_end_them(folder, capsys):
    (folder / "a,b:c.py").write_text(OLD)
    _, out, _ = run(capsys, "check", "--format", "github", "a,b:c.py")
    assert out.startswith("::error file=a%2Cb%3Ac.py,line=5,")


def test_fix_keeps_the_imports_that_a_package_hands_on(folder, capsys):
    text = "import jax\nfrom flax import jax_utils\nx = jax_utils.replicate(jax)\n"
    for name in ("__init__.py", "module.py"):
        (folder / name).write_text(text)
        run(capsys, "fix", name)
    assert "jax_utils" in (folder / "__init__.py").read_text()
    assert "jax_utils" not in (folder / "module.py").read_text()


def test_fix_writes_and_a_second_run_writes_nothing(folder, capsys):
    code, out, _ = run(capsys, "fix", "src/breaks.py")
    assert (code, out) == (0, "src/breaks.py: rewritten\n1 of 1 file rewritten.\n")
    assert (folder / "src" / "breaks.py").read_text() == NEW
    assert run(capsys, "fix", "src/breaks.py") == (0, "0 of 1 file rewritten.\n", "")


def test_fix_with_diff_prints_and_writes_nothing(folder, capsys):
    code, out, _ = run(capsys, "fix", "--diff", "src/breaks.py")
    assert code == 0
    assert out == (
        "--- a/src/breaks.py\n+++ b/src/breaks.py\n@@ -2,4 +2,4 @@\n \n \n def f(x):\n"
        "-    return jax.tree_map(abs, x)\n+    return jax.tree.map(abs, x)\n"
    )
    assert (folder / "src" / "breaks.py").read_text() == OLD


def test_fix_keeps_permissions_and_leaves_no_file_behind(folder, capsys):
    path = folder / "src" / "breaks.py"
    path.chmod(0o755)
    run(capsys, "fix", "src/breaks.py")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert sorted(p.name for p in path.parent.iterdir()) == ["breaks.py", "fine.py", "slow.py"]


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["fix", "src/breaks.py"])
    assert (folder / "src" / "breaks.py").read_text() == OLD
    assert len(list((folder / "src").iterdir())) == 3


def test_a_link_is_followed_and_stays_a_link(folder, capsys):
    (folder / "link.py").symlink_to(folder / "src" / "breaks.py")
    run(capsys, "fix", "link.py")
    assert (folder / "link.py").is_symlink()
    assert (folder / "src" / "breaks.py").read_text() == NEW


@pytest.mark.parametrize("command", ["check", "fix"])
def test_what_is_not_python_is_refused_by_file_and_line(folder, capsys, command):
    (folder / "bad.py").write_text("import jax\njax.tree_map(\nprint 'x'\n")
    code, _, err = run(capsys, command, "bad.py", "src/breaks.py")
    assert code == 2
    assert err.startswith("bad.py:2: not Python 3: ")
    assert err.endswith(" Left as it is.\n")
    assert (folder / "bad.py").read_text() == "import jax\njax.tree_map(\nprint 'x'\n"


def test_what_libcst_does_not_know_is_refused_and_the_rest_is_fixed(
    folder, capsys, monkeypatch
):
    (folder / "src" / "strange.py").write_text(OLD + "strange = 1\n")
    parse = libcst.parse_module

    def refuse(source):
        if "strange" in source:
            raise libcst.ParserSyntaxError("new syntax", lines=[], raw_line=6, raw_column=1)
        return parse(source)

    monkeypatch.setattr(libcst, "parse_module", refuse)
    code, _, err = run(capsys, "fix", "src")
    assert code == 2
    assert err == (
        "src/strange.py:6: not Python 3: libcst cannot parse it (new syntax). Left as it is.\n"
    )
    assert (folder / "src" / "breaks.py").read_text() == NEW


def test_check_needs_no_libcst(folder):
    script = (
        "import sys; sys.modules['libcst'] = None; from compat.migrate import cli; "
        "sys.exit(cli.main(['check', 'src']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_file_in_another_encoding_keeps_it(folder, capsys):
    text = "# -*- coding: latin-1 -*-\nimport jax\nx = jax.tree_map(f, 'é')\n"
    (folder / "latin.py").write_bytes(text.encode("latin-1"))
    run(capsys, "fix", "latin.py")
    assert (folder / "latin.py").read_bytes() == text.replace("tree_map", "tree.map").encode(
        "latin-1"
    )


def test_a_path_that_is_not_there_is_named(folder, capsys):
    assert run(capsys, "check", "nowhere", "src", "nor_here.py") == (
        2,
        "",
        (
            "no such file or folder: nowhere, nor_here.py. "
            "Give files (.py, .ipynb) or folders that hold them.\n"
        ),
    )


def test_a_version_that_is_none_is_an_error_of_usage(capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["check", "--jax", "new", "."])
    assert e.value.code == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(
            "argument --jax: not a JAX version: 'new'. "
            "Write major and minor number, such as 0.12."
        )
    )


def test_the_commands_are_reached_from_compat(folder):
    for module in ("compat", "compat.migrate"):
        done = subprocess.run(
            [sys.executable, "-m", module, "check", "src/breaks.py"],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (1, "")
        assert "MD102" in done.stdout


def notebook(*cells):
    return {
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": ["jax.tree_map is *old*\n"]},
            *(
                {
                    "cell_type": "code",
                    "execution_count": 3,
                    "metadata": {"keep": "é"},
                    "outputs": [],
                    "source": cell.splitlines(keepends=True),
                }
                for cell in cells
            ),
        ],
        "metadata": {"kernelspec": {"name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


CELLS = (
    "!pip install jax\nimport jax\n%matplotlib inline",
    "%%bash\njax.tree_map",
    "if True:\n    %time jax.tree_leaves\n    y = jax.tree_map(abs, x)",
    "jax.device_put_replicated(x, jax.devices())",
)


def test_a_notebook_is_one_module_and_a_finding_has_its_cell(folder, capsys):
    (folder / "a.ipynb").write_text(json.dumps(notebook(*CELLS), indent=1))
    code, out, _ = run(capsys, "check", "a.ipynb")
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith("a.")] == [
        (
            "a.ipynb:cell 3:3:9: MD102 breaks: jax.tree_map is not in JAX 0.6 or later: "
            "it raises AttributeError."
        ),
        (
            "a.ipynb:cell 4:1:1: MD101 breaks: jax.device_put_replicated is not in JAX 0.10 or "
            "later: it raises AttributeError."
        ),
    ]


def test_a_fixed_notebook_differs_in_its_code_alone(folder, capsys):
    before = json.dumps(notebook(*CELLS), indent=1, ensure_ascii=False) + "\n"
    (folder / "a.ipynb").write_text(before)
    assert run(capsys, "fix", "a.ipynb")[0] == 0
    want = notebook(
        "!pip install jax\nimport jax\nimport compat\n%matplotlib inline",
        CELLS[1],
        CELLS[2].replace("jax.tree_map", "jax.tree.map"),
        "compat.device_put_replicated(x, jax.devices())",
    )
    after = (folder / "a.ipynb").read_text()
    assert after == json.dumps(want, indent=1, ensure_ascii=False) + "\n"
    assert run(capsys, "fix", "a.ipynb")[1] == "0 of 1 file rewritten.\n"


def test_a_notebook_that_is_none_is_refused(folder, capsys):
    (folder / "a.ipynb").write_text("[]")
    code, _, err = run(capsys, "check", "a.ipynb")
    assert code == 2
    assert err.startswith("a.ipynb: not a Jupyter notebook (version 4): ")


def test_many_files_are_read_in_processes_and_reported_in_order(tmp_path, capsys):
    for i in range(60):
        (tmp_path / f"m{i:02}.py").write_text(OLD)
    code, out, _ = run(capsys, "check", "--format", "json", str(tmp_path))
    found = json.loads(out)["findings"]
    assert code == 1
    assert [os.path.basename(f["path"]) for f in found] == [f"m{i:02}.py" for i in range(60)]
