"""Our names for the collectives are the operations of `jax.lax`."""

import jax
import numpy as np
import pytest
from jax import lax

import compat

X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
RING = [(j, (j + 1) % 8) for j in range(8)]

ARGUMENTS = {
    "psum": ("i",),
    "pmean": ("i",),
    "pmax": ("i",),
    "pmin": ("i",),
    "all_gather": ("i",),
    "all_to_all": ("i", 0, 0),
    "ppermute": ("i", RING),
    "pshuffle": ("i", [1, 2, 3, 4, 5, 6, 7, 0]),
    "pswapaxes": ("i", 0),
    "psum_scatter": ("i",),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_it_is_the_operation_of_lax(name):
    f = compat.pmap(lambda x: getattr(compat, name)(x, *ARGUMENTS[name]), "i")
    want = jax.vmap(lambda x: getattr(lax, name)(x, *ARGUMENTS[name]), axis_name="i")(X)
    np.testing.assert_allclose(f(X), want, rtol=1e-6)


def test_axis_index_axis_size_and_psum_of_one_know_the_axis():
    f = compat.pmap(
        lambda x: x[0] * 0 + compat.axis_index("i") + 100 * compat.axis_size("i"), "i"
    )
    np.testing.assert_array_equal(f(X), 800 + np.arange(8))
    assert compat.pmap(lambda x: x * int(compat.psum(1, "i")), "i")(X).shape == (8, 8)


def test_groups_and_tuples_of_axes_are_passed_on():
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    f = compat.pmap(lambda x: compat.psum(x, "i", axis_index_groups=groups), "i")
    np.testing.assert_allclose(f(X)[0], X[::2].sum(0), rtol=1e-5)
    g = compat.pmap(jax.vmap(lambda x: compat.pmean(x, ("i", "j")), axis_name="j"), "i")
    np.testing.assert_allclose(g(X), np.full((8, 8), X.mean()), rtol=1e-5)


def test_in_pmap_is_true_inside_a_map_of_that_name_only():
    seen = []
    ask = lambda x: (seen.append((compat.in_pmap("i"), compat.in_pmap("j"))), x)[1]
    ask(X)
    compat.pmap(ask, "i")(X)
    jax.vmap(ask, axis_name="j")(X)
    compat.pmap(ask, "i", devices=jax.devices()[:1])(X)
    assert seen == [(False, False), (True, False), (False, True), (True, False)]
