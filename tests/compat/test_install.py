"""The removed names, put back and taken away again."""

import sys

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import compat
from compat._install import HINT, REMOVED

X = np.arange(8, dtype=np.float32)


def state_of_jax():
    gone = ("jax.tools", "jax.config")
    tools = {k: v for k, v in sys.modules.items() if k.startswith(gone)}
    return dict(vars(jax)), dict(vars(jtu)), tools, sys.excepthook


def test_uninstalling_restores_jax_exactly():
    before = state_of_jax()
    handle = compat.install()
    assert jax.pmap is compat.pmap
    handle.uninstall()
    assert state_of_jax() == before
    handle.uninstall()
    assert state_of_jax() == before


def test_leaving_the_with_statement_restores_jax_even_after_an_error():
    before = state_of_jax()
    with pytest.raises(KeyError):
        with compat.install():
            raise KeyError
    assert state_of_jax() == before


def test_installing_twice_and_undoing_in_reverse_restores_jax():
    before = state_of_jax()
    with compat.install(), compat.install():
        assert jax.pmap is compat.pmap
    assert state_of_jax() == before


@pytest.fixture
def installed():
    with compat.install() as handle:
        yield handle


TREE = {"a": 1, "b": (2, 3)}
CALLS = {
    "device_put_replicated": lambda f: f(X, jax.devices()).shape == (8, 8),
    "device_put_sharded": lambda f: f([1, 2], jax.devices()[:2]).tolist() == [1, 2],
    "host_count": lambda f: f() == 1,
    "host_id": lambda f: f() == 0,
    "host_ids": lambda f: f() == [0],
    "tree_all": lambda f: f({"a": True}) is True,
    "tree_flatten": lambda f: f(TREE)[0] == [1, 2, 3],
    "tree_leaves": lambda f: f(TREE) == [1, 2, 3],
    "tree_map": lambda f: f(lambda x: -x, TREE) == {"a": -1, "b": (-2, -3)},
    "tree_multimap": lambda f: f(lambda x, y: x + y, TREE, TREE) == {"a": 2, "b": (4, 6)},
    "tree_reduce": lambda f: f(lambda x, y: x + y, TREE) == 6,
    "tree_structure": lambda f: f(TREE).num_leaves == 3,
    "tree_transpose": lambda f: (
        f(jtu.tree_structure([0, 0]), jtu.tree_structure((0, 0)), [(1, 2), (3, 4)])
        == ([1, 3], [2, 4])
    ),
    "tree_unflatten": lambda f: f(jtu.tree_structure(TREE), [1, 2, 3]) == TREE,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_removed_name_is_back_and_works(installed, name):
    assert CALLS[name](getattr(jax, name))


def test_every_name_that_install_adds_has_a_case_above():
    assert set(CALLS) == set(REMOVED)


def test_tree_multimap_is_back_in_tree_util_too(installed):
    assert jtu.tree_multimap(lambda x, y: x * y, [2], [3]) == [6]


def test_the_notebook_line_for_tpus_does_nothing_but_say_so(installed, capsys):
    import jax.tools.colab_tpu

    jax.tools.colab_tpu.setup_tpu()
    assert capsys.readouterr().out == (
        "compat: jax.tools.colab_tpu.setup_tpu() is no longer needed; JAX finds the devices.\n"
    )


def test_mixing_results_of_different_devices_is_explained():
    four = compat.pmap(lambda x: x)(X[:4])
    eight = compat.pmap(lambda x: x)(X)
    with pytest.raises(ValueError) as e:
        with compat.install():
            jnp.concatenate([four, eight])
    assert e.value.__notes__[-1] == HINT
    assert HINT == (
        "Results of maps over different devices do not mix on this JAX. Bring each together "
        "first: compat.local(y) for all rows, compat.unreplicate(y) for one replica's."
    )


def test_an_uncaught_error_gets_the_same_note(installed, capsys):
    error = ValueError("Received incompatible devices for jitted computation. Got ...")
    sys.excepthook(ValueError, error, None)
    assert capsys.readouterr().err.splitlines()[-1] == HINT


def test_installing_twice_and_undoing_in_any_order_restores_jax():
    before = state_of_jax()
    first, second = compat.install(), compat.install()
    first.uninstall()
    assert jax.pmap is compat.pmap
    second.uninstall()
    assert state_of_jax() == before


def test_the_config_module_is_back(installed):
    from jax.config import config  # pyright: ignore

    assert config is jax.config
    assert not isinstance(jax.config, type(sys))
