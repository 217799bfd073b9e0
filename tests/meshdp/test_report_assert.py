"""Pinning the communication of a step in a user's own tests."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshdp.report._assert import assert_collectives, assert_golden


@pytest.fixture(scope="module")
def compiled():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def body(x):
        turn = lambda c, _: (lax.psum(jnp.tanh(c), "tensor"), None)
        y = lax.scan(turn, x, length=3)[0]
        return lax.psum(y.sum(), ("data", "tensor")), lax.all_gather(y, "data", tiled=True)

    step = jax.shard_map(
        body, mesh=mesh, in_specs=P("data"), out_specs=(P(), P()), check_vma=False
    )
    return jax.jit(step).lower(jnp.ones((8, 4))).compile()


MESH = {"data": 4, "tensor": 2}


def test_launches_are_counted_with_loops_multiplied_out(compiled):
    assert_collectives(compiled, mesh=MESH, all_reduce=4, all_gather=1)


def test_launches_can_be_given_by_axis(compiled):
    assert_collectives(
        compiled,
        mesh=MESH,
        all_reduce={"tensor": 3, ("data", "tensor"): 1},
        all_gather={"data": 1},
    )


def test_a_plain_function_will_do_and_tells_its_mesh_by_its_arguments():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data", "tensor")))
    # The compiler sums over one axis after the other.
    assert_collectives(lambda x: x.sum(), (x,), all_reduce={"data": 1, "tensor": 1})


def test_every_number_that_differs_is_listed_with_what_there_is(compiled):
    with pytest.raises(AssertionError) as e:
        assert_collectives(
            compiled, mesh=MESH, all_reduce={"tensor": 3}, all_gather=2, all_to_all=1
        )
    assert str(e.value) == (
        "The step does not communicate as expected:\n"
        "  all_reduce over data+tensor: expected 0, found 1\n"
        "  all_gather: expected 2, found 1\n"
        "  all_to_all: expected 1, found 0\n"
        "This is what it does, per device and call:\n"
        "axis         collective  count  bytes  sent/device\n"
        + "".join(f"{line}\n" for line in TABLE).rstrip("\n")
    )


TABLE = [
    "data         all-gather      1   32 B         96 B",
    "data+tensor  all-reduce      1    4 B          7 B",
    "tensor       all-reduce      3   96 B         96 B",
    "total                        5  132 B        199 B",
]


def test_kinds_that_are_not_named_must_not_occur(compiled):
    with pytest.raises(AssertionError, match="all_gather: expected 0, found 1"):
        assert_collectives(compiled, mesh=MESH, all_reduce=4)


def test_a_step_that_equinox_compiles_will_do():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("fsdp")))
    assert_collectives(eqx.filter_jit(lambda x: x.sum()), (x,), all_reduce={"fsdp": 1})


def test_arguments_come_as_a_tuple():
    with pytest.raises(TypeError) as e:
        assert_collectives(jnp.tanh, jnp.ones(8))  # pyright: ignore
    assert str(e.value) == (
        "The arguments of the step come as a tuple, such as (state, batch); got ArrayImpl."
    )


def test_an_unknown_kind_is_refused(compiled):
    with pytest.raises(TypeError) as e:
        assert_collectives(compiled, mesh=MESH, allreduce=4)
    assert str(e.value) == (
        "assert_collectives knows no allreduce; it knows all_reduce, reduce_scatter, "
        "all_gather, all_to_all, collective_permute, collective_broadcast."
    )


GOLDEN = (
    "data all-gather: 1 launches, 32 bytes\n"
    "data+tensor all-reduce: 1 launches, 4 bytes\n"
    "tensor all-reduce: 3 launches, 96 bytes\n"
)


def test_a_golden_file_is_written_when_asked_and_then_holds(compiled, tmp_path, monkeypatch):
    path = tmp_path / "step.txt"
    monkeypatch.setenv("MESHDP_GOLDEN", "write")
    assert_golden(compiled, (), path, mesh=MESH)
    assert path.read_text() == GOLDEN
    monkeypatch.delenv("MESHDP_GOLDEN")
    assert_golden(compiled, (), path, mesh=MESH)


def test_a_missing_golden_file_is_not_made_up(compiled, tmp_path):
    with pytest.raises(AssertionError) as e:
        assert_golden(compiled, (), tmp_path / "step.txt", mesh=MESH)
    assert str(e.value) == (
        "There is no golden file step.txt. Run this once with MESHDP_GOLDEN=write to make it, "
        "and look at what it says:\n" + GOLDEN
    )
    assert not (tmp_path / "step.txt").exists()


def test_a_step_that_left_its_golden_file_shows_the_lines_that_differ(compiled, tmp_path):
    path = tmp_path / "step.txt"
    path.write_text(GOLDEN.replace("3 launches, 96", "1 launches, 32"))
    with pytest.raises(AssertionError) as e:
        assert_golden(compiled, (), path, mesh=MESH)
    assert str(e.value) == (
        "The step no longer communicates as its golden file says:\n"
        "--- step.txt\n"
        "+++ this step\n"
        "@@ -3 +3 @@\n"
        "-tensor all-reduce: 1 launches, 32 bytes\n"
        "+tensor all-reduce: 3 launches, 96 bytes\n"
        "If that is meant, run once with MESHDP_GOLDEN=write and commit the file."
    )
