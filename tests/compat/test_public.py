"""What is public, and what importing it does not do."""

import subprocess
import sys
import types

import pytest

import compat


def test_all_lists_exactly_the_public_names():
    public = [
        name
        for name, value in vars(compat).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert compat.__all__ == sorted(public, key=str.casefold)


def holds_after(code: str, condition: str) -> bool:
    script = f"import sys\n{code}\nsys.exit(0 if {condition} else 3)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode in (0, 3), done.stderr
    return done.returncode == 0


BACKEND_UP = "__import__('jax._src.xla_bridge', fromlist=['_']).backends_are_initialized()"


@pytest.mark.parametrize("condition", [BACKEND_UP, "'flax' in sys.modules"])
def test_importing_compat_does_not(condition):
    assert not holds_after("import compat", condition)


def test_the_test_above_can_fail():
    assert holds_after("import compat, flax, jax\njax.devices()", BACKEND_UP)


def test_importing_compat_leaves_jax_alone():
    code = "import jax\nbefore = jax.pmap\nimport compat"
    assert holds_after(code, "jax.pmap is before and not hasattr(jax, 'tree_map')")
