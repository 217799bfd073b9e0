"""Checkpoints: what is saved, kept, found damaged, and refused."""

import json
import logging
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshdp
from meshdp._place import place
from meshdp.loop import Checkpoints, shapes

from . import fitting

MESH = meshdp.make_mesh(data=2, fsdp=4)
ON = NamedSharding(MESH, P("fsdp"))
WHOLE = NamedSharding(MESH, P())


class Model(eqx.Module):
    layers: list
    activation: object
    bias: bool = True


def state(scale=1.0):
    """One leaf of each kind that a state may have."""
    x = np.arange(64, dtype=np.float32).reshape(8, 8) * scale
    arrays = {
        "float32": x,
        "bfloat16": x.astype(jnp.bfloat16),
        "complex": (x + 1j * x.T).astype(np.complex64),
        "bool": x % 3 == 0,
        "int8": x.astype(np.int8),
        "keys": jax.random.split(jax.random.key(int(scale)), 8),
        "raw key": jax.random.PRNGKey(3),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(scale),
        # Too large to lie with the others, and random, so that each byte counts.
        "large": np.random.default_rng(int(scale)).normal(size=(64, 64)),
    }
    on = {k: ON if k not in ("raw key", "empty", "scalar") else WHOLE for k in arrays}
    return {"arrays": place(arrays, on), "model": Model([place(x, ON)], jnp.tanh)}


def values(tree):
    plain = lambda x: jax.random.key_data(x) if "key<" in str(x.dtype) else x
    return [np.asarray(plain(x)) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def assert_same(a, b):
    for x, y in zip(values(a), values(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1 to 3, whose states are `state(step)`."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(directory)
    for n in (1, 2, 3):
        checkpoints.save(n, state(n), data={"at": n}, evaluation={"loss": 1 / n})
    checkpoints.close()
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def test_every_kind_of_leaf_comes_back_bit_by_bit(saved):
    found = Checkpoints(saved).restore(state(0))
    assert_same(found.state, state(3))
    assert found.state["model"].activation is jnp.tanh
    assert (found.step, found.data, found.evaluation, found.left) == (
        3,
        {"at": 3},
        {"loss": 1 / 3},
        (),
    )


def test_a_state_comes_back_in_another_layout_on_another_mesh(saved):
    like = state(0)
    mesh = meshdp.make_mesh(tensor=2, fsdp=2, devices=jax.devices()[:4])
    where = lambda x: NamedSharding(mesh, P("tensor", "fsdp") if x.shape == (8, 8) else P())
    target = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x)) if eqx.is_array(x) else x
        ),
        like,
    )
    found = Checkpoints(saved).restore(target).state
    assert_same(found, state(3))
    x = found["arrays"]["bfloat16"]
    assert x.sharding.spec == P("tensor", "fsdp")
    assert x.addressable_data(0).shape == (4, 4)


def test_the_target_can_be_shapes(tmp_path):
    step = fitting.make_step(MESH)
    trained = fitting.start(step)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, trained)
    checkpoints.close()
    asked = jax.eval_shape(lambda: jax.tree.map(jnp.zeros_like, trained))
    found = checkpoints.restore(shapes(step, asked)).state
    assert_same(found, trained)
    assert found.model["w"].sharding.is_equivalent_to(trained.model["w"].sharding, 2)


def test_a_state_can_be_asked_for_by_number_and_the_best_by_name(saved, copy):
    assert_same(Checkpoints(saved).restore(state(0), step=2).state, state(2))
    assert Checkpoints(copy, lower_is_better=False).restore(state(0), step="best").step == 1


def test_a_number_that_is_not_there_is_refused(saved):
    with pytest.raises(ValueError) as e:
        Checkpoints(saved).restore(state(0), step=7)
    assert str(e.value) == f"{saved} has no checkpoint of step 7. There are: 1, 2, 3."
    with pytest.raises(ValueError) as e:
        Checkpoints(saved).restore(state(0), step="last")
    assert str(e.value) == 'step=\'last\': it takes "newest", "best" or a number of steps.'


def test_an_empty_directory_has_nothing(tmp_path):
    assert Checkpoints(tmp_path / "none").restore(state(0)) is None


def test_the_description_of_the_tree_can_be_read(saved):
    tree = json.loads((saved / "00000003" / "meta" / "metadata").read_text())["tree"]
    assert {
        "path": "['arrays']['bfloat16']",
        "shape": [8, 8],
        "dtype": "bfloat16",
        "spec": "P('fsdp',)",
    } in [{**x, "spec": x["spec"].replace("PartitionSpec", "P")} for x in tree]


# What is kept.


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, best=1)
    x = {"x": place(np.ones(8, np.float32), WHOLE)}
    for n, loss in enumerate([3.0, 1.0, float("nan"), 2.0, 4.0, None], 1):
        checkpoints.save(n, x, evaluation=None if loss is None else {"loss": loss})
    checkpoints.close()
    assert checkpoints.steps() == [2, 5, 6]
    assert (checkpoints.best_step(), checkpoints.best_score()) == (2, 1.0)
    assert sorted(p.name for p in tmp_path.glob("0*")) == ["00000002", "00000005", "00000006"]


def test_arguments_that_cannot_be_are_named():
    with pytest.raises(ValueError) as e:
        Checkpoints("x", every=0, keep=0, best=-1)
    assert str(e.value) == (
        "Checkpoints cannot use these arguments:\n"
        "  every=0: expected a whole number from 1\n"
        "  keep=0: expected a whole number from 1\n"
        "  best=-1: expected a whole number from 0"
    )


# Damage.


def largest(folder):
    files = [p for p in (folder / "state").rglob("*") if p.is_file() and p.parent.name == "d"]
    return max(files, key=lambda p: p.stat().st_size)


def truncate(folder):
    path = largest(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(folder):
    data = bytearray(largest(folder).read_bytes())
    data[len(data) // 2] ^= 1
    largest(folder).write_bytes(data)


def lose(folder):
    shutil.rmtree(folder / "state")


def describe_wrongly(folder):
    (folder / "meta" / "metadata").write_text('{"step": 3')


@pytest.mark.parametrize("harm", [truncate, flip, lose, describe_wrongly])
def test_a_damaged_newest_is_reported_and_the_one_before_is_used(copy, harm, caplog):
    harm(copy / "00000003")
    before = sorted(p for p in (copy / "00000003").rglob("*"))
    found = Checkpoints(copy).restore(state(0))
    assert_same(found.state, state(2))
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith(
        f"The checkpoint of step 3 in {copy} is not used, since it is damaged: "
    )
    assert said.endswith("; kept as 00000003.damaged.")
    kept = sorted(p for p in (copy / "00000003.damaged").rglob("*"))
    assert [p.name for p in kept] == [p.name for p in before]


def test_a_truncated_file_is_named_with_its_sizes(copy):
    size = largest(copy / "00000003").stat().st_size
    truncate(copy / "00000003")
    name = largest(copy / "00000003").parent.parent.name  # of the process that wrote it
    with pytest.raises(ValueError) as e:
        Checkpoints(copy).restore(state(0), step=3)
    assert f"is damaged: the file state/{name}/d/" in str(e.value)
    assert str(e.value).endswith(f" has {size // 2} bytes, of {size}")


def test_a_flipped_bit_is_named_by_its_leaf(copy, caplog):
    flip(copy / "00000003")
    with pytest.raises(ValueError, match="is damaged: wrong checksum of "):
        Checkpoints(copy).restore(state(0), step=3)
    assert (copy / "00000003").exists()


def test_a_checkpoint_that_was_not_written_to_its_end_is_reported_and_not_used(copy, caplog):
    (copy / "00000003").rename(copy / "00000003.orbax-checkpoint-tmp")
    assert Checkpoints(copy).restore(state(0)).step == 2
    assert [r.getMessage() for r in caplog.records] == [
        f"00000003.orbax-checkpoint-tmp in {copy} was not written to its end; left where it is."
    ]
    again = Checkpoints(copy)
    again.save(3, state(3))
    again.close()
    assert again.restore(state(0)).step == 3


def test_a_step_that_is_there_already_is_kept_aside(copy):
    checkpoints = Checkpoints(copy)
    checkpoints.save(3, state(5))
    checkpoints.close()
    assert_same(checkpoints.restore(state(0)).state, state(5))
    assert (copy / "00000003.replaced").exists()


def test_all_damaged_is_nothing_found(copy, caplog):
    for n in (1, 2, 3):
        lose(copy / f"{n:08d}")
    assert Checkpoints(copy).restore(state(0)) is None
    assert len(caplog.records) == 3


# Trees that differ.


def other():
    like = state(0)
    like["arrays"]["more"] = like["arrays"].pop("int8")
    like["arrays"]["bool"] = place(np.ones(4, np.float32), WHOLE)
    like["arrays"]["float32"] = place(np.ones((8, 4), np.float32), ON)
    like["arrays"]["scalar"] = place(np.int32(1), WHOLE)
    return like


DIFFERENCES = (
    "  ['arrays']['bool']: bool[8, 8] in the checkpoint, float32[4] wanted (other shape and "
    "dtype)\n"
    "  ['arrays']['float32']: float32[8, 8] in the checkpoint, float32[8, 4] wanted (other "
    "shape)\n"
    "  ['arrays']['more']: int8[8, 8] is missing from the checkpoint\n"
    "  ['arrays']['scalar']: float32[] in the checkpoint, int32[] wanted (other dtype)\n"
    "  ['arrays']['int8']: int8[8, 8] is only in the checkpoint"
)


def test_leaves_that_do_not_match_are_named_one_by_one(saved):
    with pytest.raises(ValueError) as e:
        Checkpoints(saved).restore(other())
    assert str(e.value) == (
        f"The checkpoint of step 3 in {saved} does not fit the state; 5 leaves differ:\n"
        f"{DIFFERENCES}\n"
        "Restore into the model and optimizer that were saved, or load what fits with "
        "Checkpoints(..., strict=False)."
    )


def test_what_fits_is_loaded_when_not_strict_and_the_rest_listed(saved, caplog):
    found = Checkpoints(saved, strict=False).restore(other())
    assert_same(found.state["model"], state(3)["model"])
    assert_same(found.state["arrays"]["bfloat16"], state(3)["arrays"]["bfloat16"])
    assert_same(found.state["arrays"]["float32"], other()["arrays"]["float32"])
    assert "\n".join(found.left) == DIFFERENCES
    assert [r.getMessage() for r in caplog.records] == [
        f"The checkpoint of step 3 was loaded in part (strict=False); left out:\n{DIFFERENCES}"
    ]


def test_shapes_have_nothing_to_keep_when_not_strict(saved):
    like = {"x": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=WHOLE)}
    with pytest.raises(ValueError) as e:
        Checkpoints(saved).restore(like, strict=False)
    assert str(e.value) == (
        "These leaves do not fit the checkpoint, and have no value to keep:\n"
        "  ['x']\n"
        "Restore into a state, not into shapes."
    )


def test_saving_logs_nothing(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": place(np.ones(8, np.float32), WHOLE)})
    checkpoints.close()
    assert caplog.records == []
