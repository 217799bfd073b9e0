"""The README's section on migrating: every row and every program in it runs."""

import ast
import functools
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils
from flax.training import common_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import compat
import meshdp
from compat.migrate._check import check_source
from compat.migrate._fix import fix_source
from meshdp._place import shard_batch

# The README's section itself; the lead's README holds the same text.
TEXT = pathlib.Path(__file__).with_name("migrating.md").read_text()
ROWS = [
    tuple(cell.strip("` ") for cell in line.strip("| ").split(" | "))
    for line in TEXT.splitlines()
    if line.startswith("| `")
]
# Flax still has its `shard`, which works; all else in the first column is old or gone.
OLD_ROWS = [row for row in ROWS if "common_utils" not in row[0]]
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)

IMPORTS = """\
import functools
import jax
import jax.numpy as jnp
from flax import jax_utils
from flax.training import common_utils
"""


def names():
    data = np.random.default_rng(0)
    mesh = meshdp.make_mesh()
    state = {"w": np.arange(6.0, dtype=np.float32)}
    return {
        "P": P,
        "batch": {
            "x": data.normal(size=(16, 3)).astype(np.float32),
            "y": data.normal(size=16).astype(np.float32),
        },
        "common_utils": common_utils,
        "compat": compat,
        "everywhere": NamedSharding(mesh, P()),
        "f": lambda x, s=2.0: x * s,
        "functools": functools,
        "grid": np.arange(16.0, dtype=np.float32).reshape(2, 4, 2),
        "jax": jax,
        "jax_utils": jax_utils,
        "jnp": jnp,
        "many": np.arange(32.0, dtype=np.float32).reshape(16, 2),
        "mesh": mesh,
        # Until the public name is there.
        "meshdp": types.SimpleNamespace(**{**vars(meshdp), "shard_batch": shard_batch}),
        "optax": optax,
        "params": jnp.zeros(3),
        "state": state,
        "x": np.arange(16.0, dtype=np.float32).reshape(8, 2),
        "y": compat.replicate(state),
    }


def flat(value):
    """All numbers of a value, in order, whatever its dimensions."""
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(jax.device_get(value))]
    return np.concatenate(leaves)


def check_copies(numbers, like):
    """Compares each copy, of which there is one, or one for each device."""
    copies = len(numbers) // len(like)
    for copy in np.split(numbers, copies):
        np.testing.assert_allclose(copy, like, rtol=1e-6)


def test_the_table_has_its_rows_and_its_programs():
    assert len(ROWS) == 14
    assert {len(row) for row in ROWS} == {3}
    assert len(PROGRAMS) == 4


@pytest.mark.parametrize(("old", "new", "mesh"), ROWS)
def test_a_row_gives_the_same_numbers_in_compat_and_on_a_mesh(old, new, mesh):
    check_copies(flat(eval(new, names())), flat(eval(mesh, names())))


@pytest.mark.parametrize(("old", "new", "mesh"), OLD_ROWS)
def test_check_has_something_to_say_of_an_old_row_and_nothing_of_a_new_one(old, new, mesh):
    assert check_source(f"{IMPORTS}y = jax.pmap(f)(x)  # noqa\n{old}") != []
    assert check_source(f"{IMPORTS}import compat\n{new}") == []
    assert check_source(f"{IMPORTS}{mesh}") == []


@pytest.mark.parametrize(("old", "new", "mesh"), [r for r in OLD_ROWS if "tree_m" not in r[0]])
def test_fix_turns_an_old_row_into_the_new_one_or_what_jax_has_for_it(old, new, mesh):
    fixed = fix_source(f"{IMPORTS}{old}\n")
    assert fixed.splitlines()[-1] in (new, mesh)


def test_all_programs_end_with_the_same_parameters():
    w = np.zeros(3)
    batch = names()["batch"]
    for _ in range(3):
        w = w - 0.1 * 2 * batch["x"].T @ (batch["x"] @ w - batch["y"]) / 16
    for program in PROGRAMS[1:]:
        space = names()
        exec(program, space)
        np.testing.assert_allclose(space["params"], w, rtol=1e-5)


def test_fix_makes_the_second_program_of_the_first_and_the_third_with_meshdp():
    old, for_compat, for_meshdp, _ = PROGRAMS
    same = lambda a, b: ast.dump(ast.parse(a).body[-1]) == ast.dump(ast.parse(b).body[-1])
    preamble = IMPORTS + "\n"
    fixed = fix_source(preamble + old)
    assert fixed.endswith(for_compat)
    fixed = fix_source(preamble + old, "meshdp")
    assert fixed.endswith(for_meshdp)
    assert not same(for_compat, for_meshdp)
