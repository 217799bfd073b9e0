"""Installed packages, which run on the installed JAX: what is said of them must be true."""

import ast
import collections
import functools
import importlib.util
import io
import pathlib
import tokenize

import jax
import pytest

from compat.migrate._check import check_source
from compat.migrate._fix import fix_source
from compat.migrate._sources import find_sources, read_source
from compat.migrate._versions import parse_version

RUNNING = parse_version(jax.__version__)
PACKAGES = ["chex", "equinox", "flax", "haiku", "optax"]
INSTALLED = [p for p in PACKAGES if importlib.util.find_spec(p)]

# Looked at one by one: each is a fact about the package.
TRUE = {
    # jax.experimental.cur_qdd, which JAX 0.12 does not have.
    ("flax/nnx/variablelib.py", "MD122"),
}


@functools.cache
def files(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    root = pathlib.Path(spec.origin).parent
    return [
        (path.relative_to(root.parent).as_posix(), read_source(path).text)
        for path in find_sources([str(root)])
    ]


@functools.cache
def findings(package):
    return [(n, f) for n, text in files(package) for f in check_source(text, version=RUNNING)]


def calls_of_jax_pmap(text):
    """The lines with `jax.pmap(`, by tokens: an oracle that shares nothing with the rule."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for i, token in enumerate(tokens[:-3]):
        if [t.string for t in tokens[i : i + 4]] == ["jax", ".", "pmap", "("]:
            yield token.start[0]


@pytest.mark.slow
@pytest.mark.parametrize("package", [*INSTALLED, "jax"])
def test_nothing_is_said_to_break_in_a_package_that_runs(package):
    broken = [(n, f.span, f.what) for n, f in findings(package) if f.rule.severity == "breaks"]
    assert broken == []


@pytest.mark.slow
@pytest.mark.parametrize("package", INSTALLED)
def test_all_else_that_is_said_is_that_jax_pmap_is_used(package):
    others = {(n, f.rule.code) for n, f in findings(package) if f.rule.code != "MD123"}
    assert others <= TRUE


@pytest.mark.slow
@pytest.mark.parametrize("package", INSTALLED)
def test_every_use_of_jax_pmap_is_found_and_nothing_else_is_taken_for_one(package):
    found = collections.Counter(
        (n, f.span[0]) for n, f in findings(package) if f.rule.code == "MD123"
    )
    lines = {name: text.split("\n") for name, text in files(package)}
    assert all("pmap" in lines[name][line - 1] for name, line in found)
    missed = [
        (name, line)
        for name, text in files(package)
        for line in calls_of_jax_pmap(text)
        if (name, line) not in found
    ]
    assert missed == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compat", "jax", "meshdp"])
@pytest.mark.parametrize("package", INSTALLED)
def test_a_fix_of_real_code_parses_and_settles(package, mode):
    found = {n for n, _ in findings(package)}
    for name, text in files(package):
        if name in found:
            once = fix_source(text, mode, RUNNING)
            ast.parse(once)
            assert fix_source(once, mode, RUNNING) == once, name
