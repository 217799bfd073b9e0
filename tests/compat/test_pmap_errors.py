"""Every error of `pmap`: what was given, what was expected, one way out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import compat

X = np.arange(8, dtype=np.float32)


def said(kind, f, *args, **kwargs):
    with pytest.raises(kind) as e:
        f(*args, **kwargs)
    return str(e.value)


def test_sizes_that_differ_are_named_with_both_paths_and_a_way_out():
    f = compat.pmap(lambda params, batch: batch)
    text = said(ValueError, f, {"w": np.ones((100, 100))}, np.ones((32, 100)))
    assert text == (
        "pmap maps over dimensions of different sizes: `params['w']` has 100, `batch` has 32; "
        "to broadcast an argument use in_axes=(None, 0)"
    )


def test_the_odd_one_out_is_the_one_to_broadcast():
    f = compat.pmap(lambda a, b, c: a)
    assert said(ValueError, f, X, X, X[:4]) == (
        "pmap maps over dimensions of different sizes: `a` has 8, `c` has 4; "
        "to broadcast an argument use in_axes=(0, 0, None)"
    )


def test_leaves_that_cannot_be_mapped_are_all_named():
    f = compat.pmap(lambda batch, lr, name: batch)
    assert said(ValueError, f, {"x": X}, 0.1, "adam") == (
        "2 leaves cannot be mapped by pmap:\n"
        "  `lr` has shape (), which has no dimension 0\n"
        "  `name` is a str, not an array\n"
        "To broadcast an argument use in_axes=(0, None, None); what is no array goes into "
        "static_broadcasted_argnums."
    )


def test_in_axes_out_of_range_names_the_shape():
    f = compat.pmap(lambda x: x, in_axes=2)
    assert said(ValueError, f, X) == (
        "1 leaves cannot be mapped by pmap:\n"
        "  `x` has shape (8,), which has no dimension 2\n"
        "To broadcast an argument use in_axes=(None,)."
    )


def test_in_axes_of_the_wrong_length():
    f = compat.pmap(lambda x, y: x, in_axes=(0,))
    assert said(ValueError, f, X, X) == (
        "pmap was given in_axes=(0,), one entry for each of 1 positional arguments, but was "
        "called with 2. Give in_axes one entry for each (arguments passed by keyword are "
        "always mapped over dimension 0)."
    )


def test_in_axes_of_the_wrong_tree_names_the_argument():
    f = compat.pmap(lambda x, t: x, in_axes=(0, {"a": 0, "b": None}))
    assert said(ValueError, f, X, {"a": X}) == (
        "in_axes of pmap does not fit 1 of the arguments:\n"
        "  `t`: in_axes {'a': 0, 'b': None} for a {'a': *}\n"
        "Write one entry for a whole argument, or a tree of the argument's own structure."
    )


def test_in_axes_and_out_axes_must_hold_ints_and_none():
    assert said(TypeError, compat.pmap, lambda x: x, in_axes=("batch",)) == (
        "in_axes of pmap holds 'batch'. Write an int (the dimension to map), None (do not "
        "map), or a tuple, list or dict of these, one entry for each argument."
    )
    assert said(TypeError, compat.pmap, lambda x: x, out_axes=True) == (
        "out_axes of pmap holds True. Write an int (the dimension to map), None (do not map), "
        "or a tuple, list or dict of these, one entry for each argument."
    )


def test_out_axes_out_of_range_and_results_that_are_no_arrays_are_all_named():
    f = compat.pmap(
        lambda x: {"a": x, "b": "no", "c": x[None]}, out_axes={"a": 1, "b": 0, "c": 1}
    )
    assert said(ValueError, f, X) == (
        "2 results of this pmap cannot be returned as asked:\n"
        "  result['a'] has shape () in each replica, so the mapped dimension can go to -1..0, "
        "not to 1\n"
        "  result['b'] is a str, not an array\n"
        "Return arrays only, and change out_axes."
    )


def test_out_axes_of_the_wrong_tree():
    f = compat.pmap(lambda x: (x, x), out_axes=(0, None, 0))
    assert said(ValueError, f, X) == (
        "out_axes=(0, None, 0) of pmap does not fit the result, a (*, *). Write one entry for "
        "the whole result, or a tree of the result's own structure."
    )


def test_negative_axes_count_from_the_end_as_in_vmap():
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    f = lambda x: x[None] * jnp.ones((2, 1))
    want = jax.vmap(f, in_axes=-1, out_axes=-1)(x)
    out = compat.pmap(f, in_axes=-1, out_axes=-1)(x)
    np.testing.assert_array_equal(out, want)
    assert [s.data.shape for s in out.addressable_shards] == [(2, 3, 1)] * 8


def test_no_mapped_argument():
    f = compat.pmap(lambda x: x, in_axes=None)
    assert said(ValueError, f, X) == (
        "No argument of this pmap is mapped, so the number of replicas is unknown. Map an "
        "argument (in_axes=0), or say how many: pmap(f, axis_size=8)."
    )
    many = compat.pmap(lambda x: x.sum(), in_axes=None, axis_size=4)
    np.testing.assert_array_equal(many(X), [28.0] * 4)


def test_axis_size_that_contradicts_the_arguments():
    assert said(ValueError, compat.pmap(lambda x: x, axis_size=4), X) == (
        "axis_size=4 of pmap says 4 replicas, but the mapped dimensions are 8 long. Leave "
        "axis_size out, or change the arguments."
    )


def test_no_rows():
    assert said(ValueError, compat.pmap(lambda x: x), X[:0]) == (
        "pmap was given arguments with no rows: the mapped dimension is 0."
    )


LIST = "Give a list of devices, such as jax.local_devices()."
CPU = jax.devices()[0]


@pytest.mark.parametrize(
    ("kind", "devices", "words"),
    [
        (ValueError, [], f"devices of pmap is an empty list. {LIST}"),
        (ValueError, [CPU, CPU], f"devices of pmap holds {CPU} more than once. {LIST}"),
        (TypeError, [0, 1], f"devices of pmap holds 0, which is no device. {LIST}"),
        (TypeError, CPU, f"devices of pmap is {CPU!r}. {LIST}"),
    ],
)
def test_devices_that_are_no_list_of_devices(kind, devices, words):
    assert said(kind, compat.pmap, lambda x: x, devices=devices) == words


def test_axis_size_must_be_a_number_of_replicas():
    assert said(TypeError, compat.pmap, lambda x: x, axis_size="8") == (
        "axis_size of pmap is '8'. Give the number of replicas, an int."
    )
    assert said(ValueError, compat.pmap, lambda x: x, axis_size=0) == (
        "axis_size of pmap is 0. Give at least 1 replica."
    )


def test_axis_name_must_be_hashable():
    assert said(TypeError, compat.pmap, lambda x: x, ["i"]) == (
        "axis_name of pmap is ['i'], which cannot be hashed. Give one string: a map has one "
        "axis."
    )


def test_positions_and_names_of_arguments_that_there_are_not():
    f = lambda x, y: x
    assert said(ValueError, compat.pmap, f, static_broadcasted_argnums=(1, 2, -3)) == (
        "static_broadcasted_argnums of pmap holds [2, -3], but the function takes 2 positional "
        "arguments. Count them from 0, or name them in static_broadcasted_argnames."
    )
    assert said(ValueError, compat.pmap, f, static_broadcasted_argnames="train") == (
        "static_broadcasted_argnames of pmap names ['train'], but the function's arguments are "
        "called ['x', 'y']. Use these names."
    )


@pytest.mark.parametrize("what", ["static_broadcasted_argnums", "donate_argnums"])
@pytest.mark.parametrize("nums", [1.5, "x"])
def test_positions_must_be_ints(what, nums):
    assert said(TypeError, compat.pmap, lambda x: x, **{what: nums}) == (
        f"{what} of pmap is {nums!r}. Give the position of an argument, an int, or a tuple of "
        "positions."
    )


def test_text_is_named_by_its_argument():
    assert said(ValueError, compat.pmap(lambda batch: batch), {"names": np.array(["a"])}) == (
        "1 leaves cannot be mapped by pmap:\n"
        "  `batch['names']` holds <U1, not numbers, so it is not an array of JAX\n"
        "To broadcast an argument use in_axes=(None,); what is no array goes into "
        "static_broadcasted_argnums."
    )


def test_arguments_that_an_earlier_call_was_given_are_named():
    # XLA would end the process with a segmentation fault.
    step = compat.pmap(lambda state, x: {"w": state["w"] + x}, donate_argnums=0)
    look = compat.pmap(lambda state: state["w"] + 1)
    new = compat.pmap(lambda state: state["w"] + 2)
    x = look({"w": X})
    state = step(step({"w": X}, x), x)
    look(state)
    step(state, x)
    words = (
        "1 arguments of this pmap have been deleted:\n"
        "  `state['w']`: float32[8]\n"
        "A call with donate_argnums takes its arguments' memory. Go on with what it returned "
        "(state = step(state, batch)), or leave donate_argnums out."
    )
    assert said(RuntimeError, step, state, x) == words
    assert said(RuntimeError, look, state) == words
    assert said(RuntimeError, new, state) == words


def test_what_was_compiled_for_other_shapes_names_the_argument():
    compiled = compat.pmap(lambda x, y: x).lower(X, X).compile()
    assert said(ValueError, compiled, X[:4], np.int32(X)) == (
        "This pmap was compiled for other arguments; 2 differ:\n"
        "  `argument 0` is float32[4], not float32[8]\n"
        "  `argument 1` is int32[8], not float32[8]\n"
        "Lower it again for these arguments."
    )


def test_not_a_function():
    assert (
        said(TypeError, compat.pmap, 3)
        == "pmap expects a function as its first argument, not 3."
    )


def test_static_arguments_that_cannot_be_hashed_are_named():
    f = compat.pmap(lambda params, batch: batch, static_broadcasted_argnums=(0,))
    assert said(ValueError, f, {"w": X}, X) == (
        "1 static arguments of pmap cannot be hashed:\n"
        "  `params` is a dict\n"
        "static_broadcasted_argnums is for constants such as functions, strings and flags. To "
        "give every replica the same arrays, take the argument out of "
        "static_broadcasted_argnums and write None for it in in_axes."
    )


def test_an_argument_cannot_be_both_static_and_donated():
    text = said(
        ValueError,
        compat.pmap,
        lambda x: x,
        static_broadcasted_argnums=0,
        donate_argnums=0,
    )
    assert text == (
        "Arguments [0] of pmap are in both static_broadcasted_argnums and donate_argnums. A "
        "constant has no memory to give away: take them out of one."
    )


def test_static_arguments_may_come_by_keyword_or_be_named():
    f = lambda x, k: x * k
    by_number = compat.pmap(f, static_broadcasted_argnums=1)
    by_name = compat.pmap(f, static_broadcasted_argnames="k")
    for call in (by_number, by_name):
        np.testing.assert_array_equal(call(X, 3), 3 * X)
        np.testing.assert_array_equal(call(X, k=4), 4 * X)


PMEAN = lambda x: lax.pmean(x, axis_name="batch")


def test_a_collective_without_axis_name_says_what_to_write():
    text = "no pmap in sight has an axis called 'batch'; this pmap was made without axis_name: "
    assert said(NameError, compat.pmap(PMEAN), X) == text + "write pmap(f, axis_name='batch')"


def test_a_collective_over_another_name_says_which_there_are():
    assert said(NameError, compat.pmap(PMEAN, "i"), X) == (
        "no pmap in sight has an axis called 'batch'; the axes in sight are called 'i': use "
        "one of these, or write pmap(f, axis_name='batch')"
    )


def test_our_own_collectives_say_the_same():
    f = lambda x: compat.pmean(x, "batch")
    assert said(NameError, compat.pmap(f, "i"), X) == said(
        NameError, compat.pmap(PMEAN, "i"), X
    )
    assert said(NameError, f, X) == (
        "no pmap in sight has an axis called 'batch'; collectives work only inside a function "
        "that is mapped: write pmap(f, axis_name='batch')"
    )


def test_other_name_errors_are_left_alone():
    assert said(NameError, compat.pmap(lambda x: undefined(x)), X) == (  # noqa: F821
        "name 'undefined' is not defined"
    )


def test_an_error_in_the_mapped_function_ends_in_the_users_line():
    def broken(x):
        return PMEAN(x)

    with pytest.raises(NameError) as e:
        compat.pmap(broken)(X)
    assert any(entry.name == "broken" for entry in e.traceback)
