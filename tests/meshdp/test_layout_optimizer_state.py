from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshdp._layout import by_path, fsdp, replicate, specs
from meshdp._mesh import AXES


def leaf(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mesh(**given):
    return dict.fromkeys(AXES, 1) | given


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


@pytest.mark.parametrize(
    "shape, spec",
    [((8, 4), P("tensor")), ((4, 8), P(None, "tensor")), ((3, 4, 8), P(None, None, "tensor"))],
    ids=["shape of the first", "shape of the second", "neither"],
)
def test_of_parameters_with_the_same_end_one_of_the_same_shape_or_else_the_first_is_followed(
    shape, spec
):
    shapes = {"c": {"w": leaf(8, 4)}, "b": {"w": leaf(4, 8)}, "a": {"w": leaf(4, 8)}}
    layout = by_path({"a": P(None, "tensor"), "b|c": P("tensor")})
    state = {**shapes, "optim": optax.TraceState({"w": leaf(*shape)})}
    assert specs(state, layout, mesh(tensor=2))["optim"].trace["w"] == spec


def test_bare_arrays_that_are_laid_out_differently_are_not_followed():
    state = {"a": leaf(64, 64), "b": leaf(64, 64), "optim": optax.TraceState(leaf(64, 64))}
    layout = by_path({"a": P("tensor"), "b": P(None, "tensor")}) | fsdp(min_size=1)
    assert specs(state, layout, mesh(fsdp=2, tensor=2))["optim"].trace == P("fsdp")


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((64, 1), P("fsdp")),
        ((1, 32), P(None, "tensor")),
        ((1,), P()),
        ((3, 64, 32), P(None, "fsdp", "tensor")),
        ((3, 64, 16), P(None, "fsdp")),
        ((16, 32), P(None, "fsdp")),
    ],
    ids=["row", "column", "one", "in front", "unlike with more", "unlike with as many"],
)
def test_state_of_another_shape_keeps_the_entries_that_still_make_sense(shape, spec):
    state = {"model": PARAMS, "optim": optax.TraceState({"mlp": {"w": leaf(*shape)}})}
    layout = LAYOUT | fsdp(min_size=128)
    got = specs(state, layout, mesh(fsdp=8, tensor=2))
    assert got["optim"].trace["mlp"]["w"] == spec


def test_state_without_a_parameter_is_laid_out_by_its_own_shape():
    state = jax.eval_shape(optax.adam(1e-3).init, {"w": leaf(512, 512)})
    got = specs(state, fsdp(), mesh(fsdp=8))[0]
    assert (got.count, got.mu["w"]) == (P(), P("fsdp"))


def test_state_without_a_parameter_may_stay_whole_if_asked():
    state = optax.TraceState({"w": leaf(333, 333)})
    got = specs(state, fsdp() | replicate(), mesh(fsdp=8))
    assert got.trace["w"] == P()
