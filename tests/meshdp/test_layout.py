from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshdp._layout import by_path, check_specs, fsdp, path_str, replicate, specs
from meshdp._mesh import AXES


def leaf(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mesh(**given):
    return dict.fromkeys(AXES, 1) | given


def message(shapes, layout, mesh_shape):
    with pytest.raises(ValueError) as e:
        specs(shapes, layout, mesh_shape)
    return str(e.value)


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
    layout = replicate() | by_path({"w": P("fsdp")})
    got = specs({"w": leaf(8, 8), "v": leaf(512, 512)}, layout, mesh(fsdp=8))
    assert got == {"w": P("fsdp"), "v": P()}


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


def test_fsdp_refuses_a_mesh_that_has_no_such_axis():
    assert message({"w": leaf(8)}, fsdp(), {"x": 8}) == (
        "1 fault in the layout on a mesh of x=8:\n"
        "  fsdp() splits over the axis 'fsdp', but the mesh has only x. "
        "Name an axis 'fsdp', or use by_path."
    )


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
    got = specs({"w": leaf(8, 8), "b": leaf(8)}, layout, mesh(tensor=2))
    assert got == {"w": P("tensor", None), "b": P()}


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


# Optimizer state

PARAMS = {"mlp": {"w": leaf(64, 32), "b": leaf(32)}, "emb": leaf(128, 64)}
LAYOUT = by_path({r"^\['model'\].*'w'": P(None, "tensor"), "emb": P()}) | fsdp(min_size=1024)
SPECS = {"mlp": {"w": P("fsdp", "tensor"), "b": P()}, "emb": P()}


def state_of(optimizer, params=PARAMS):
    return {"model": params, "optim": jax.eval_shape(optimizer.init, params)}


def labels(params):
    return {"mlp": {"w": "a", "b": "b"}, "emb": "b"}


class Velocity(NamedTuple):
    """A user's own state."""

    speed: object
    ticks: object


def velocity():
    def init(params):
        return Velocity(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    return optax.GradientTransformation(init, lambda g, s, p=None: (g, s))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
        optax.MultiSteps(optax.adam(1e-3), 4),
        optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda _: True, p)),
        optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(1e-2, 0.9)}, labels),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-3, 0.0, 10)),
        optax.apply_if_finite(optax.chain(velocity(), optax.lion(1e-3)), 3),
        optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2),
        optax.MultiSteps(
            optax.chain(optax.masked(optax.adam(1e-3), lambda p: labels(p)["emb"] == "b")), 2
        ),
    ],
    ids=[
        "adamw",
        "chain",
        "MultiSteps",
        "masked",
        "multi_transform",
        "inject_hyperparams",
        "inject_schedule",
        "users_own_state_inside",
        "schedule_free",
        "nested",
    ],
)
def test_optimizer_state_follows_its_parameter_wherever_it_lies(optimizer):
    state = state_of(optimizer)
    got = specs(state, LAYOUT, mesh(fsdp=8, tensor=2))
    assert got["model"] == SPECS
    seen = 0
    for (path, x), spec in zip(
        jax.tree_util.tree_leaves_with_path(state["optim"]),
        jax.tree.leaves(got["optim"]),
        strict=True,
    ):
        expected = {(64, 32): P("fsdp", "tensor"), (32,): P(), (128, 64): P(), (): P()}
        assert spec == expected[x.shape], path
        seen += x.shape == (64, 32)
    assert seen > 0


def test_muon_and_its_adam_follow():
    state = state_of(optax.contrib.muon(1e-3))
    got = specs(state, LAYOUT, mesh(fsdp=8, tensor=2))["optim"].inner_states
    assert got["muon"].inner_state[0].mu["mlp"]["w"] == P("fsdp", "tensor")
    assert got["muon"].inner_state[0].mu["emb"] == P()
    assert got["adam"].inner_state[0].nu["mlp"]["b"] == P()


def test_factored_state_keeps_the_entries_of_the_dimensions_it_has():
    state = state_of(optax.adafactor(1e-3, min_dim_size_to_factor=8))
    got = specs(state, LAYOUT, mesh(fsdp=8, tensor=2))["optim"][0]
    # w is [64.fsdp, 32.tensor], so rows and columns have 32 and 64.
    assert got.v_row["mlp"]["w"] == P("tensor")
    assert got.v_col["mlp"]["w"] == P("fsdp")
    assert got.v["mlp"]["w"] == P()
    assert got.v["mlp"]["b"] == P()
    assert got.v_col["emb"] == P()


def test_factored_state_of_a_square_matrix_is_laid_out_by_its_own_shape():
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    square = state_of(optimizer, {"w": leaf(64, 64)})
    by_hand = by_path({"w": P("tensor")})
    assert specs(square, by_hand, mesh(tensor=2))["optim"][0].v_row["w"] == P()
    layout = by_hand | fsdp(min_size=64)
    got = specs(square, layout, mesh(fsdp=4, tensor=2))
    assert got["model"]["w"] == P("tensor", "fsdp")
    assert got["optim"][0].v_row["w"] == P("fsdp")


@pytest.mark.parametrize(
    "param, spec",
    [(leaf(8, 81, 81), P("fsdp")), (leaf(81, 81), P("tensor"))],
    ids=["unambiguous", "ambiguous"],
)
def test_state_of_another_shape_than_its_parameter_may_stay_whole(param, spec):
    state = {"w": param, "optim": optax.TraceState({"w": leaf(81)})}
    layout = by_path({"^": spec}) | fsdp(min_size=81)
    got = specs(state, layout, mesh(fsdp=8, tensor=3))
    assert got == {"w": spec, "optim": optax.TraceState({"w": P()})}


def test_the_memory_of_lbfgs_has_a_dimension_in_front():
    state = state_of(optax.scale_by_lbfgs(memory_size=5))
    got = specs(state, LAYOUT, mesh(fsdp=8, tensor=2))["optim"]
    assert got.diff_params_memory["mlp"]["w"] == P(None, "fsdp", "tensor")
    assert got.diff_params_memory["emb"] == P()
    assert got.weights_memory == P()


def test_the_parameters_of_lookahead_are_parameters():
    params = optax.LookaheadParams.init_synced(PARAMS)
    optimizer = optax.lookahead(optax.adam(1e-3), 5, 0.5)
    state = {"model": params, "optim": jax.eval_shape(optimizer.init, params)}
    got = specs(state, LAYOUT, mesh(fsdp=8, tensor=2))
    assert got["model"].slow == got["model"].fast == SPECS
    assert got["optim"].fast_state[0].mu == SPECS


@pytest.mark.parametrize("wrap", [lambda s: {"opt_state": s}, lambda s: Train(s)])
def test_a_state_of_the_users_own_is_known_by_the_name_opt_state(wrap):
    own = jax.eval_shape(velocity().init, PARAMS)
    got = specs({"model": PARAMS, "rest": wrap(own)}, LAYOUT, mesh(fsdp=8, tensor=2))
    assert got == {"model": SPECS, "rest": wrap(Velocity(SPECS, P()))}


class Train(NamedTuple):
    opt_state: object


def test_a_parameter_that_is_one_bare_array_is_followed_by_its_shape():
    state = (leaf(8, 8), jax.eval_shape(optax.adam(1e-3).init, leaf(8, 8)))
    got = specs(state, by_path({r"\[0\]": P(None, "tensor")}), mesh(tensor=2))
    assert got[1][0].mu == P(None, "tensor")


def test_of_two_parameters_with_the_same_end_the_one_of_the_same_shape_is_followed():
    shapes = {"head": {"w": leaf(8, 4)}, "body": {"w": leaf(4, 8)}}
    state = {**shapes, "optim": optax.TraceState({"w": leaf(4, 8)})}
    layout = by_path({"head": P("tensor"), "body": P(None, "tensor")})
    assert specs(state, layout, mesh(tensor=2))["optim"].trace["w"] == P(None, "tensor")


def test_state_without_a_parameter_is_laid_out_by_its_own_shape():
    state = jax.eval_shape(optax.adam(1e-3).init, {"w": leaf(512, 512)})
    got = specs(state, fsdp(), mesh(fsdp=8))[0]
    assert (got.count, got.mu["w"]) == (P(), P("fsdp"))


def test_state_without_a_parameter_may_stay_whole_if_asked():
    state = optax.TraceState({"w": leaf(333, 333)})
    got = specs(state, fsdp() | replicate(), mesh(fsdp=8))
    assert got.trace["w"] == P()


# Faults


def test_a_regex_that_matches_no_parameter_is_a_fault():
    shapes = {"w": leaf(8, 8), "opt_state": {"m": leaf(8, 8)}}
    assert message(shapes, by_path({"m": P("fsdp"), "z": P()}), mesh(fsdp=2)) == (
        "2 faults in the layout on a mesh of fsdp=2:\n"
        "  'm' matches none of the 1 parameters. "
        "Correct or remove it; the first paths are ['w'].\n"
        "  'z' matches none of the 1 parameters. "
        "Correct or remove it; the first paths are ['w']."
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


def test_a_fault_of_a_parameter_is_not_repeated_for_its_optimizer_state():
    state = state_of(optax.adam(1e-3), {"w": leaf(333, 333)})
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
        "  'z' matches none of the",
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


def test_a_path_reads_as_python_would():
    tree = {"layers": [Block(jax.random.key(0))]}
    paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths[0] == "['layers'][0].up.weight"
