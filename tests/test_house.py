"""The rules of the house that a machine can check."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted(
    p
    for folder in ("meshdp", "compat", "examples", "tests")
    for p in (ROOT / folder).rglob("*.py")
)
# It names the API of every JAX there was, as strings about other people's code.
MIGRATE = ROOT / "compat" / "migrate"


def backend_is_up_after(program):
    asks = "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    command = [sys.executable, "-c", f"{program}\n{asks}"]
    return (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"
    )


@pytest.mark.parametrize("package", ["meshdp", "compat"])
def test_importing_us_does_not_start_a_backend(package):
    assert not backend_is_up_after(f"import {package}")


def test_the_test_above_can_fail():
    assert backend_is_up_after("import jax; jax.devices()")


def test_importing_us_needs_no_extra():
    extras = ["orbax", "rich", "tensorboardX", "libcst", "flax", "haiku", "sklearn", "pytest"]
    program = (
        "import sys\n"
        f"for name in {extras}: sys.modules[name] = None\n"
        "import meshdp, meshdp.testing, meshdp.report, compat, compat.migrate.cli"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_only_jaxapi_asks_which_jax_this_is():
    probe = re.compile(
        r"jax\.__version__|jax\._src|hasattr\(jax\b|(from|import) jax\.experimental"
    )
    guilty = [
        str(p.relative_to(ROOT))
        for p in SOURCES
        if p.parts[len(ROOT.parts)] in ("meshdp", "compat", "examples")
        and MIGRATE not in p.parents
        and p.name != "_jaxapi.py"
        and probe.search(p.read_text())
    ]
    assert guilty == []


def test_meshdp_never_imports_compat():
    imports = re.compile(r"^\s*(from|import) compat\b", re.MULTILINE)
    guilty = [str(p) for p in (ROOT / "meshdp").rglob("*.py") if imports.search(p.read_text())]
    assert guilty == []


def test_no_file_is_longer_than_four_hundred_lines():
    long = [str(p.relative_to(ROOT)) for p in SOURCES if p.read_text().count("\n") >= 400]
    assert long == []
