"""Twelve old programs: each fails today as it is, and gives the right numbers when fixed."""

import ast
import pathlib
import runpy
import types

import chex
import jax
import numpy as np
import pytest

from compat.migrate._check import check_source
from compat.migrate._fix import fix_source

HERE = pathlib.Path(__file__).parent
PROGRAMS = sorted(p.stem for p in (HERE / "programs").glob("*.py"))
ORACLES = runpy.run_path(str(HERE / "oracles.py"))

# Where what JAX offers is enough to make the program run again.
IN_PLAIN_JAX = ["generation", "imagenet", "nerf", "score_sde"]
# Where every map is a training step that can be recognised.
OUT_OF_PMAP = ["imagenet", "language_model"]


def source_of(program):
    return (HERE / "programs" / f"{program}.py").read_text()


def run(source):
    module = types.ModuleType("program")
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module.main()


def check_numbers(program, source):
    got, want = run(source), ORACLES[program]()
    to_numpy = lambda tree: jax.tree.map(
        lambda x: np.asarray(x, np.float32), tree, is_leaf=lambda x: isinstance(x, list)
    )
    chex.assert_trees_all_close(to_numpy(got), to_numpy(want), rtol=2e-4, atol=2e-5)


def test_there_are_twelve_programs_and_each_has_an_oracle():
    assert len(PROGRAMS) == 12
    assert set(PROGRAMS) <= set(ORACLES)


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_old_program_fails_today(program):
    with pytest.raises((AttributeError, ImportError, TypeError, ValueError)):
        run(source_of(program))


@pytest.mark.parametrize("program", PROGRAMS)
def test_check_finds_what_breaks_an_old_program(program):
    assert any(f.rule.severity == "breaks" for f in check_source(source_of(program)))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_fixed_for_compat_gives_the_right_numbers(program):
    check_numbers(program, fix_source(source_of(program), "compat"))


@pytest.mark.parametrize("program", IN_PLAIN_JAX)
def test_a_program_fixed_for_jax_gives_the_right_numbers(program):
    fixed = fix_source(source_of(program), "jax")
    assert "compat" not in fixed
    check_numbers(program, fixed)


@pytest.mark.parametrize("program", OUT_OF_PMAP)
def test_a_program_taken_out_of_pmap_gives_the_right_numbers(program):
    fixed = fix_source(source_of(program), "meshdp")
    assert "pmap" not in fixed
    assert "compat.global_view" in fixed
    check_numbers(program, fixed)


@pytest.mark.parametrize("program", sorted(set(PROGRAMS) - set(OUT_OF_PMAP) - {"generation"}))
def test_a_program_not_recognised_keeps_its_maps_and_is_told_why(program):
    for_compat = fix_source(source_of(program), "compat")
    for_meshdp = fix_source(source_of(program), "meshdp")
    assert "# TODO(meshdp): still a pmap, because\n" in for_meshdp
    assert ast.dump(ast.parse(for_meshdp)) == ast.dump(ast.parse(for_compat))


@pytest.mark.parametrize("mode", ["compat", "jax", "meshdp"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_second_run_changes_nothing(program, mode):
    once = fix_source(source_of(program), mode)
    assert fix_source(once, mode) == once


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_that_breaks_is_left_after_a_fix(program):
    fixed = fix_source(source_of(program), "compat")
    assert [f for f in check_source(fixed) if f.rule.severity == "breaks"] == []
