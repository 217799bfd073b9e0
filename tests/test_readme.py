"""What the README shows runs, and what it promises of commands is what is there."""

import pathlib
import re
import tomllib

import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
OWN = TEXT.split("## Migrating")[0]


def test_the_code_of_the_readme_runs_from_top_to_bottom(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", OWN, re.DOTALL):
        exec(compile(block, "README.md", "exec"), names)
    # One step of gradient descent from zero on ones: the gradient is -2 for each weight.
    np.testing.assert_allclose(names["weights"], 0.2 * jnp.ones((8, 1)), rtol=1e-6)
    printed = capsys.readouterr().out
    assert printed.count("leaves agree on 8 devices and on one") == 2
    assert "<svg" in (tmp_path / "step.html").read_text()
    assert (names["run"].step, names["run"].best_step) == (100, 100)
    assert names["run"].evaluation["loss"] < 1.0  # nothing learned: 8
    assert len((tmp_path / "runs/1/log.jsonl").read_text().splitlines()) > 4
    assert "reduce-scatter" in printed
    assert printed.count("[0.2 0.2 0.2 0.2 0.2 0.2 0.2 0.2]") == 2


def test_the_section_on_migrating_is_the_one_that_is_tested_row_by_row():
    section = (ROOT / "tests/compat/migrate/migrating.md").read_text()
    assert section.strip() in TEXT


def test_the_extras_that_the_readme_names_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = set(re.findall(r"(?:meshdp|\.)\[(\w+)\]", TEXT))
    assert named <= set(extras)
    assert {"train", "dev", "migrate"} <= named
