import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshdp._layout import by_path, fsdp, path_str, replicate, specs
from meshdp._mesh import AXES


def leaf(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mesh(**given):
    return dict.fromkeys(AXES, 1) | given


# replicate


def test_replicate_leaves_every_leaf_whole_however_large():
    shapes = {"w": leaf(4096, 4096), "b": leaf(8)}
    assert specs(shapes, replicate(), mesh(fsdp=8)) == {"w": P(), "b": P()}


def test_what_was_asked_to_be_whole_stays_whole():
    assert specs({"w": leaf(512, 512)}, replicate() | fsdp(), mesh(fsdp=8)) == {"w": P()}


def test_replicate_at_the_end_accepts_what_could_not_be_split():
    shapes = {"odd": leaf(333, 333), "w": leaf(512, 512)}
    got = specs(shapes, fsdp() | replicate(), mesh(fsdp=8))
    assert got == {"odd": P(), "w": P("fsdp")}


def test_a_path_is_more_exact_than_replicate():
    layout = replicate() | by_path({"w": P(None, "tensor")}) | fsdp()
    shapes = {"w": leaf(512, 512), "v": leaf(512, 512)}
    got = specs(shapes, layout, mesh(fsdp=8, tensor=2))
    assert got == {"w": P("fsdp", "tensor"), "v": P()}


def test_replicate_does_not_stop_what_is_split_from_being_split_further():
    layout = by_path({"w": P(None, "tensor")}) | replicate() | fsdp()
    shapes = {"w": leaf(512, 512), "v": leaf(512, 512)}
    got = specs(shapes, layout, mesh(fsdp=8, tensor=2))
    assert got == {"w": P("fsdp", "tensor"), "v": P()}


# fsdp


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((256, 512), P(None, "fsdp")),
        ((512, 256), P("fsdp")),
        ((512, 512), P("fsdp")),  # a tie
        ((256, 513), P("fsdp")),  # the largest does not divide
        ((3, 512, 1024), P(None, None, "fsdp")),
        ((65536,), P("fsdp")),
        ((65535,), P()),  # below min_size
        ((0, 512), P()),
        ((), P()),
    ],
    ids=str,
)
def test_fsdp_splits_the_largest_dimension_that_divides(shape, spec):
    assert specs({"w": leaf(*shape)}, fsdp(), mesh(fsdp=8)) == {"w": spec}


def test_min_size_counts_the_elements_of_the_whole_leaf():
    shapes = {"small": leaf(7, 8), "large": leaf(8, 8)}
    got = specs(shapes, fsdp(min_size=64), mesh(fsdp=8))
    assert got == {"small": P(), "large": P("fsdp")}


def test_fsdp_never_touches_leaves_of_one_element_or_none():
    shapes = {"scalar": leaf(), "one": leaf(1, 1), "none": leaf(0, 8)}
    got = specs(shapes, fsdp(min_size=0), mesh(fsdp=8))
    assert got == {"scalar": P(), "one": P(), "none": P()}


def test_on_a_mesh_without_fsdp_all_stays_whole():
    shapes = {"w": leaf(512, 512), "odd": leaf(333, 333)}
    assert specs(shapes, fsdp(), mesh(data=8)) == {"w": P(), "odd": P()}


def test_a_leaf_is_split_over_4096_devices_without_one_device():
    assert specs({"w": leaf(8192, 4096)}, fsdp(), mesh(fsdp=4096)) == {"w": P("fsdp")}


@pytest.mark.parametrize("min_size", [-1, 2.5, True, "big"])
def test_min_size_is_a_count(min_size):
    with pytest.raises(ValueError) as e:
        fsdp(min_size=min_size)
    assert str(e.value) == (
        f"fsdp(min_size={min_size!r}): expected a number of elements, an integer of at "
        "least 0. Use 0 to split every leaf that can be split."
    )


# by_path


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    act: object

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = eqx.nn.Linear(8, 16, key=up)
        self.down = eqx.nn.Linear(16, 8, key=down)
        self.act = jax.nn.gelu


def make_blocks():
    return {"layers": [Block(k) for k in jax.random.split(jax.random.key(0), 2)]}


def block_shapes():
    return eqx.filter_eval_shape(make_blocks)


def test_a_regex_applies_where_it_is_found_in_the_path():
    layout = by_path({r"layers'\]\[0\]\.up\.weight": P("tensor")}) | replicate()
    got = specs(block_shapes(), layout, mesh(tensor=2))
    assert got["layers"][0].up.weight == P("tensor")
    assert got["layers"][1].up.weight == P()


def test_what_the_user_wrote_comes_back_as_written():
    layout = by_path({"w": P("tensor", None), "b": P(None)})
    params = {"w": leaf(8, 8), "b": leaf(8)}
    got = specs(
        {"model": params, "optim": optax.EmaState(leaf(), params)}, layout, mesh(tensor=2)
    )
    assert got["model"] == got["optim"].ema == {"w": P("tensor", None), "b": P()}


def test_fsdp_refines_what_a_path_left_free():
    layout = by_path({"up": P(None, "tensor"), "down": P("tensor")}) | fsdp(min_size=1)
    got = specs({"up": leaf(8, 64), "down": leaf(64, 8)}, layout, mesh(fsdp=2, tensor=2))
    assert got == {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}


def test_a_dimension_that_is_split_is_not_split_again():
    layout = by_path({"w": P("tensor")}) | fsdp(min_size=1)
    assert specs({"w": leaf(64, 3)}, layout, mesh(fsdp=2, tensor=2)) == {"w": P("tensor")}


def test_a_path_may_use_fsdp_itself():
    layout = by_path({"w": P(None, ("fsdp", "tensor"))}) | fsdp(min_size=1)
    got = specs({"w": leaf(64, 8)}, layout, mesh(fsdp=2, tensor=2))
    assert got == {"w": P(None, ("fsdp", "tensor"))}


def test_an_explicit_empty_spec_keeps_a_leaf_whole():
    layout = by_path({"emb": P()}) | fsdp()
    got = specs({"emb": leaf(512, 512), "w": leaf(512, 512)}, layout, mesh(fsdp=8))
    assert got == {"emb": P(), "w": P("fsdp")}


def test_a_spec_of_none_leaves_a_leaf_free():
    layout = by_path({"w": P(None)}) | fsdp()
    assert specs({"w": leaf(512, 512)}, layout, mesh(fsdp=8)) == {"w": P("fsdp")}


def test_an_axis_of_size_one_stays_in_the_spec():
    layout = by_path({"w": P("tensor")}) | fsdp(min_size=1)
    assert specs({"w": leaf(64, 8)}, layout, mesh(fsdp=2)) == {"w": P("tensor", "fsdp")}


def test_two_paths_may_each_split_another_dimension():
    layout = by_path({"w": P("tensor")}) | by_path({"w": P(None, "expert")})
    got = specs({"w": leaf(8, 8)}, layout, mesh(tensor=2, expert=2))
    assert got == {"w": P("tensor", "expert")}


def test_two_regexes_that_say_the_same_do_not_disagree():
    layout = by_path({"w": P("tensor"), ".": P("tensor", None)})
    assert specs({"w": leaf(8, 8)}, layout, mesh(tensor=2)) == {"w": P("tensor")}


def test_a_tree_of_one_array_has_the_empty_path():
    assert specs(leaf(8, 8), by_path({"^$": P("fsdp")}), mesh(fsdp=2)) == P("fsdp")


def test_layouts_are_values():
    layout = by_path({"w": P(None, "tensor"), "b": P()}) | fsdp(8) | replicate()
    same = by_path({"w": P(None, "tensor"), "b": P()}) | (fsdp(8) | replicate())
    assert (layout, hash(layout)) == (same, hash(same))
    assert layout != fsdp(8)
    assert repr(layout) == (
        "by_path({'w': P(None, 'tensor'), 'b': P()}) | fsdp(min_size=8) | replicate()"
    )


def test_every_wrong_rule_is_reported_at_once():
    with pytest.raises(ValueError) as e:
        by_path({"(": P(), "w": "tensor", "b": P(P.UNCONSTRAINED), "ok": P(("data", "fsdp"))})
    assert str(e.value) == (
        "3 faults in by_path:\n"
        "  '(' is not a regex: missing ), unterminated subpattern at position 0. "
        "Escape it with re.escape.\n"
        "  'w': 'tensor' is not a PartitionSpec. Write P(...) with axis names.\n"
        "  'b': P(UNCONSTRAINED,) holds more than axis names and None. Use only these: "
        "a layout says where arrays are stored."
    )


def test_by_path_takes_a_mapping():
    with pytest.raises(TypeError) as e:
        by_path(P("fsdp"))
    assert str(e.value) == (
        "by_path takes a mapping from regexes to PartitionSpecs, not P('fsdp',). "
        'Write by_path({"weight": P("tensor")}).'
    )


# Kinds of leaves


def test_every_kind_of_array_has_a_spec_and_nothing_else_has():
    tree = {
        "jax": jnp.zeros((64, 8)),
        "numpy": np.zeros((64, 8)),
        "keys": jax.random.split(jax.random.key(0), 64),
        "key": jax.random.key(0),
        "numpy scalar": np.float32(1),
        "int": 3,
        "name": "gelu",
        "function": jax.nn.gelu,
        "dtype": np.dtype("float32"),
        "none": None,
    }
    assert specs(tree, fsdp(min_size=8), mesh(fsdp=8)) == {
        "jax": P("fsdp"),
        "numpy": P("fsdp"),
        "keys": P("fsdp"),
        "key": P(),
        "numpy scalar": P(),
        "int": None,
        "name": None,
        "function": None,
        "dtype": None,
        "none": None,
    }


def test_specs_can_be_mapped_together_with_the_tree():
    tree = {"w": leaf(8, 8), "f": jax.nn.gelu, "none": None}
    got = specs(tree, fsdp(min_size=1), mesh(fsdp=8))
    pairs = jax.tree.map(lambda x, spec: (getattr(x, "shape", "-"), spec), tree, got)
    assert pairs == {"w": ((8, 8), P("fsdp")), "f": ("-", None), "none": None}


def test_specs_of_a_module_are_a_module():
    shapes = block_shapes()
    got = specs(shapes, fsdp(min_size=100), mesh(fsdp=8))
    assert isinstance(got["layers"][0], Block)
    assert got["layers"][0].up.weight == P("fsdp")
    assert got["layers"][0].down.weight == P(None, "fsdp")
    assert got["layers"][0].act is None


def test_a_path_reads_as_python_would():
    tree = {"layers": [Block(jax.random.key(0))]}
    paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths[0] == "['layers'][0].up.weight"
