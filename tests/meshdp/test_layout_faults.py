import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshdp._layout import by_path, check_specs, fsdp, specs
from meshdp._mesh import AXES


def leaf(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mesh(**given):
    return dict.fromkeys(AXES, 1) | given


def message(shapes, layout, mesh_shape):
    with pytest.raises(ValueError) as e:
        specs(shapes, layout, mesh_shape)
    return str(e.value)


def test_fsdp_refuses_a_mesh_that_has_no_such_axis():
    assert message({"w": leaf(8)}, fsdp(), {"x": 8}) == (
        "1 fault in the layout on a mesh of x=8:\n"
        "  fsdp() splits over the axis 'fsdp', but the mesh has only x. "
        "Name an axis 'fsdp', or use by_path."
    )


def test_a_regex_that_matches_no_parameter_is_a_fault():
    shapes = {"w": leaf(8, 8), "opt_state": {"m": leaf(8, 8)}}
    assert message(shapes, by_path({"m": P("fsdp"), "z": P()}), mesh(fsdp=2)) == (
        "2 faults in the layout on a mesh of fsdp=2:\n"
        "  'm' matches no parameter. "
        "Correct or remove it; paths are like ['w'].\n"
        "  'z' matches no parameter. "
        "Correct or remove it; paths are like ['w']."
    )


def test_a_regex_for_a_tree_of_optimizer_state_alone_is_a_fault():
    state = optax.TraceState({"w": leaf(8, 8)})
    assert message(state, by_path({"w": P("fsdp")}), mesh(fsdp=2)) == (
        "1 fault in the layout on a mesh of fsdp=2:\n"
        "  'w' matches no parameter. Correct or remove it; "
        "the tree has no array outside of optimizer state."
    )


def test_regexes_that_disagree_on_a_leaf_are_a_fault():
    layout = by_path({"w": P("tensor"), "a": P(), r"\['a'\]": P(None)})
    shapes = {"a": {"w": leaf(8, 8)}, "b": {"w": leaf(8, 8)}}
    assert message(shapes, layout, mesh(tensor=2)) == (
        "1 fault in the layout on a mesh of tensor=2:\n"
        "  ['a']['w']: 'w' gives P('tensor') and 'a' gives P() and "
        "\"\\\\['a'\\\\]\" gives P(None). "
        "Make the regexes exclude each other."
    )


def test_to_ask_for_a_leaf_to_be_whole_is_not_to_leave_it_free():
    layout = by_path({"w": P(), "$": P(None)})
    assert message({"w": leaf(8)}, layout, mesh()) == (
        "1 fault in the layout on a mesh of one device:\n"
        "  ['w']: 'w' gives P() and '$' gives P(None). Make the regexes exclude each other."
    )


def test_an_unknown_axis_is_reported_once_with_the_likely_one():
    layout = by_path({"w": P("tenser"), "b": P("model")})
    assert message({"w": leaf(8), "w2": leaf(8), "b": leaf(8)}, layout, mesh()) == (
        "2 faults in the layout on a mesh of one device:\n"
        "  'w': P('tenser') names the axis 'tenser', but the mesh has "
        "data, fsdp, stage, expert, seq, tensor. Did you mean 'tensor'?\n"
        "  'b': P('model') names the axis 'model', but the mesh has "
        "data, fsdp, stage, expert, seq, tensor. Use one of these."
    )


def test_an_axis_used_twice_in_a_spec_is_a_fault():
    layout = by_path({"w": P("tensor", ("data", "tensor"))})
    assert message({"w": leaf(8, 8)}, layout, mesh(tensor=2)) == (
        "1 fault in the layout on a mesh of tensor=2:\n"
        "  'w': P('tensor', ('data', 'tensor')) uses the axis 'tensor' twice. "
        "Split one dimension with it."
    )


def test_more_entries_than_dimensions_are_a_fault():
    shapes = {"w": leaf(8, 8), "b": leaf(8), "s": leaf()}
    layout = by_path({".": P(None, "tensor")})
    assert message(shapes, layout, mesh(tensor=2)) == (
        "2 faults in the layout on a mesh of tensor=2:\n"
        "  ['b']: P(None, 'tensor') has 2 entries, but shape (8,) has 1 dimension. "
        "Remove 1 entry.\n"
        "  ['s']: P(None, 'tensor') has 2 entries, but shape () has 0 dimensions. "
        "Remove 2 entries."
    )


def test_a_dimension_that_does_not_divide_is_a_fault():
    layout = by_path({"w": P(("data", "fsdp"), "tensor")})
    assert message({"w": leaf(10, 9)}, layout, mesh(data=2, fsdp=2, tensor=2)) == (
        "2 faults in the layout on a mesh of data=2, fsdp=2, tensor=2:\n"
        "  ['w']: P(('data', 'fsdp'), 'tensor') splits dimension 0 of shape (10, 9) over "
        "data*fsdp=4, but 10 % 4 = 2. Pad it to 12, split another dimension, or replicate "
        "the leaf.\n"
        "  ['w']: P(('data', 'fsdp'), 'tensor') splits dimension 1 of shape (10, 9) over "
        "tensor=2, but 9 % 2 = 1. Pad it to 10, split another dimension, or replicate "
        "the leaf."
    )


@pytest.mark.parametrize(
    "first, second, was",
    [
        (by_path({"w": P("tensor")}), P("expert"), "P('tensor')"),
        (by_path({"w": P("tensor")}), P(None, "tensor"), "P('tensor')"),
        (by_path({"w": P("tensor")}), P(), "P('tensor')"),
        (by_path({"w": P()}), P("tensor"), "P()"),
        (fsdp(min_size=1), P(None, "fsdp"), "P('fsdp')"),
    ],
    ids=["same dimension", "same axis", "whole after split", "split after whole", "fsdp first"],
)
def test_a_later_part_cannot_contradict_an_earlier_one(first, second, was):
    layout = first | by_path({"w$|w'": second})
    given = ", ".join(map(repr, second))
    assert message({"w": leaf(64, 64)}, layout, mesh(fsdp=2, expert=2, tensor=2)) == (
        "1 fault in the layout on a mesh of fsdp=2, expert=2, tensor=2:\n"
        f"  ['w']: \"w$|w'\" gives P({given}), but an earlier part of the layout gave {was}. "
        "Put by_path before fsdp; say each thing once."
    )


def test_a_large_leaf_that_cannot_be_split_is_a_fault():
    assert message({"emb": leaf(333, 333)}, fsdp(), mesh(fsdp=8)) == (
        "1 fault in the layout on a mesh of fsdp=8:\n"
        "  ['emb']: shape (333, 333) would be whole on every device: no dimension divides by "
        "fsdp=8. Pad a dimension, or ask for it to be whole with "
        "by_path({r\"\\['emb'\\]$\": P()}) or `| replicate()`."
    )


def test_the_offer_in_that_fault_works():
    layout = by_path({r"\['emb'\]$": P()}) | fsdp()
    assert specs({"emb": leaf(333, 333)}, layout, mesh(fsdp=8)) == {"emb": P()}


def test_a_large_leaf_that_no_part_splits_is_a_fault():
    shapes = {"w": leaf(256, 256), "x": leaf(255, 257), "v": leaf(256, 256)}
    assert message(shapes, by_path({"v": P("tensor")}), mesh(fsdp=8, tensor=2)) == (
        "1 fault in the layout on a mesh of fsdp=8, tensor=2:\n"
        "  ['w']: shape (256, 256) would be whole on every device: no part of the layout "
        "splits it. Add `| fsdp()`, or ask for it to be whole with "
        "by_path({r\"\\['w'\\]$\": P()}) or `| replicate()`."
    )


def test_a_large_leaf_split_over_axes_of_size_one_only_is_a_fault():
    layout = by_path({"w": P("tensor")}) | fsdp(min_size=8)
    assert message({"w": leaf(16)}, layout, mesh(fsdp=8)) == (
        "1 fault in the layout on a mesh of fsdp=8:\n"
        "  ['w']: shape (16,) would be whole on every device: P('tensor') splits it over axes "
        "of size 1 only, and no other dimension divides by fsdp=8. Add 'fsdp' to the spec, or "
        "ask for it to be whole with by_path({r\"\\['w'\\]$\": P()}) or `| replicate()`."
    )


def test_large_state_without_a_parameter_that_stays_whole_is_a_fault():
    state = {"optim": optax.TraceState({"w": leaf(333, 333)})}
    assert message(state, fsdp(), mesh(fsdp=8)) == (
        "1 fault in the layout on a mesh of fsdp=8:\n"
        "  ['optim'].trace['w']: shape (333, 333) would be whole on every device: no dimension "
        "divides by fsdp=8. Pad a dimension, or ask for it to be whole with `| replicate()`."
    )


def test_a_leaf_with_a_fault_is_not_reported_as_replicated_too():
    layout = by_path({"w": P("fsdp"), "v": P("model")}) | fsdp()
    shapes = {"w": leaf(333, 333), "v": leaf(333, 333)}
    assert message(shapes, layout, mesh(fsdp=8)).startswith("2 faults")


def test_a_fault_of_a_parameter_is_not_repeated_for_its_optimizer_state():
    state = {"w": leaf(333, 333), "optim": optax.TraceState({"w": leaf(333, 333)})}
    assert message(state, fsdp(), mesh(fsdp=8)).count("\n") == 1


def test_faults_of_every_kind_are_reported_in_one_error():
    shapes = {"a": leaf(10), "b": leaf(8), "c": leaf(333, 333)}
    layout = by_path({"a": P("fsdp"), "b": P("fsdp", "tensor"), "z": P("x")}) | fsdp()
    lines = message(shapes, layout, mesh(fsdp=8)).split("\n")
    assert [line[:25] for line in lines] == [
        "5 faults in the layout on",
        "  'z': P('x') names the a",
        "  ['a']: P('fsdp') splits",
        "  ['b']: P('fsdp', 'tenso",
        "  'z' matches no paramete",
        "  ['c']: shape (333, 333)",
    ]


def test_what_is_not_a_layout_is_refused():
    with pytest.raises(TypeError) as e:
        specs({"w": leaf(8)}, P("fsdp"), mesh(fsdp=8))
    assert str(e.value) == (
        "layout is P('fsdp',), expected a Layout. "
        'Use fsdp(), replicate() or by_path({"regex": P(...)}), composed with `|`.'
    )


def test_a_mesh_is_refused_where_its_sizes_are_expected():
    with pytest.raises(TypeError) as e:
        specs({"w": leaf(8)}, fsdp(), jax.sharding.Mesh(jax.devices(), ("fsdp",)))
    assert str(e.value) == "mesh_shape is a Mesh, expected axis sizes. Pass mesh.shape."


def test_mesh_shape_is_a_mapping():
    with pytest.raises(TypeError) as e:
        specs({"w": leaf(8)}, fsdp(), (8, 1))
    assert str(e.value) == (
        "mesh_shape is (8, 1), expected a mapping from axis names to sizes. "
        'Pass mesh.shape, or {"data": 2, "fsdp": 4}.'
    )


def test_the_sizes_of_the_axes_must_be_known():
    with pytest.raises(ValueError) as e:
        specs({"w": leaf(8)}, fsdp(), {"data": -1, "fsdp": 8, "tensor": 2.0})
    assert str(e.value) == (
        "mesh_shape holds data=-1, tensor=2.0; the size of an axis is a positive integer. "
        "make_mesh fills in -1: pass mesh.shape."
    )


# check_specs


def test_specs_that_fit_pass():
    shapes = {"w": leaf(8, 8), "f": jax.nn.gelu, "none": None, "k": jax.random.key(0)}
    check_specs(shapes, specs(shapes, fsdp(min_size=1), mesh(fsdp=8)), mesh(fsdp=8))


def test_one_spec_may_stand_for_a_whole_tree():
    batch = {"x": leaf(16, 3), "y": leaf(16), "name": "train"}
    check_specs(batch, P(("data", "fsdp")), mesh(data=2, fsdp=4))


def test_a_prefix_is_checked_for_every_leaf_below_it():
    shapes = {"batch": {"x": leaf(8), "y": leaf(9)}, "w": leaf(9)}
    with pytest.raises(ValueError) as e:
        check_specs(shapes, {"batch": P("data"), "w": P()}, mesh(data=2))
    assert str(e.value) == (
        "1 fault in the specs on a mesh of data=2:\n"
        "  ['batch']['y']: P('data') splits dimension 0 of shape (9,) over data=2, but "
        "9 % 2 = 1. Pad it to 10, split another dimension, or replicate the leaf."
    )


def test_every_fault_of_every_spec_is_reported_at_once():
    shapes = {k: leaf(10, 4) for k in "abcdef"}
    wrong = {
        "a": P(None, "tensor"),
        "b": P(("data", "fsdp")),
        "c": P("tensor", "tensor"),
        "d": P("model", "tensor"),
        "e": None,
        "f": "data",
    }
    with pytest.raises(ValueError) as e:
        check_specs(shapes, wrong, {"data": 2, "fsdp": 2, "tensor": 3})
    pad = "split another dimension, or replicate the leaf."
    assert str(e.value) == (
        "9 faults in the specs on a mesh of data=2, fsdp=2, tensor=3:\n"
        "  ['a']: P(None, 'tensor') splits dimension 1 of shape (10, 4) over tensor=3, "
        f"but 4 % 3 = 1. Pad it to 6, {pad}\n"
        "  ['b']: P(('data', 'fsdp')) splits dimension 0 of shape (10, 4) over data*fsdp=4, "
        f"but 10 % 4 = 2. Pad it to 12, {pad}\n"
        "  ['c']: P('tensor', 'tensor') uses the axis 'tensor' twice. "
        "Split one dimension with it.\n"
        "  ['c']: P('tensor', 'tensor') splits dimension 0 of shape (10, 4) over tensor=3, "
        f"but 10 % 3 = 1. Pad it to 12, {pad}\n"
        "  ['c']: P('tensor', 'tensor') splits dimension 1 of shape (10, 4) over tensor=3, "
        f"but 4 % 3 = 1. Pad it to 6, {pad}\n"
        "  ['d']: P('model', 'tensor') names the axis 'model', but the mesh has "
        "data, fsdp, tensor. Use one of these.\n"
        "  ['d']: P('model', 'tensor') splits dimension 1 of shape (10, 4) over tensor=3, "
        f"but 4 % 3 = 1. Pad it to 6, {pad}\n"
        "  ['e']: shape (10, 4) has no spec. Give P() to replicate it.\n"
        "  ['f']: 'data' is not a P of axis names and None. Give P(...)."
    )


def test_specs_of_another_structure_are_refused():
    with pytest.raises(ValueError) as e:
        check_specs({"w": leaf(8)}, {"v": P()}, mesh())
    assert str(e.value).startswith(
        "The specs do not have the structure of the shapes. Give a P for each leaf, or one "
        "for a whole subtree. JAX says: "
    )
