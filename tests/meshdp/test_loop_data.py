"""Batches: their order, padding, position, and what goes wrong with them."""

import itertools
import json
import logging

import jax
import numpy as np
import pytest

import meshdp
from meshdp.loop import Batches, Checkpoints, fit, prefetch

from . import fitting

MESH = meshdp.make_mesh(data=2, fsdp=4)


@pytest.fixture(scope="module")
def step():
    return fitting.make_step(MESH)


def ids(examples=20):
    return {"id": np.arange(examples, dtype=np.int32)}


# Batches.


def test_an_epoch_has_every_example_once_and_the_mask_says_which_are_real():
    batches = list(Batches(ids(), 8, seed=3, epochs=2))
    assert [b["mask"].tolist() for b in batches[:3]] == [[1] * 8, [1] * 8, [1] * 4 + [0] * 4]
    epochs = [
        np.concatenate([b["id"][b["mask"] == 1] for b in part])
        for part in (batches[:3], batches[3:])
    ]
    assert [sorted(e) for e in epochs] == [list(range(20))] * 2
    assert epochs[0].tolist() != epochs[1].tolist() != list(range(20))


def test_the_order_is_a_function_of_the_seed_alone():
    read = lambda seed: [b["id"].tolist() for b in Batches(ids(), 8, seed=seed, epochs=1)]
    assert read(3) == read(3) != read(4)


def test_without_a_seed_the_order_is_kept():
    assert [b["id"].tolist() for b in Batches(ids(10), 4, epochs=1)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 9, 9],
    ]


@pytest.mark.parametrize(
    "mesh",
    [MESH, meshdp.make_mesh(data=4, devices=jax.devices()[:4])],
    ids=["eight", "four"],
)
def test_the_order_is_the_same_on_any_number_of_devices(mesh):
    found = [b["id"] for b in prefetch(Batches(ids(), 8, seed=3, epochs=1), mesh)]
    want = [b["id"] for b in Batches(ids(), 8, seed=3, epochs=1)]
    np.testing.assert_array_equal(found, want)


def test_batches_that_are_no_dicts_come_with_their_mask():
    x = np.arange(6, dtype=np.float32)
    ((first, second), mask) = list(Batches((x, 2 * x), 4, epochs=1))[1]
    assert (first.tolist(), second.tolist()) == ([4, 5, 5, 5], [8, 10, 10, 10])
    assert mask.tolist() == [1, 1, 0, 0]


def test_examples_may_be_read_by_index():
    class Squares:
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return {"x": np.float32(i * i), "n": [i, -i]}

    last = list(Batches(Squares(), 4, epochs=1))[1]
    assert last["x"].tolist() == [16, 16, 16, 16]
    assert [n.tolist() for n in last["n"]] == [[4] * 4, [-4] * 4]


def test_the_position_survives_json():
    whole = iter(Batches(ids(), 8, seed=1))
    for _ in range(4):
        next(whole)
    saved = json.loads(json.dumps(whole.get_state()))
    again = iter(Batches(ids(), 8, seed=1))
    again.set_state(saved)
    assert next(again)["id"].tolist() == next(whole)["id"].tolist()


def test_a_position_of_other_batches_is_refused():
    saved = iter(Batches(ids(), 8, seed=1)).get_state()
    with pytest.raises(ValueError) as e:
        iter(Batches(ids(30), 4, seed=1)).set_state(saved)
    assert str(e.value) == (
        "The position was saved by batches that differ from these, so it would mean another "
        "place:\n"
        "  examples: 20 then, 30 now\n"
        "  size: 8 then, 4 now\n"
        "Use the same data, size and seed, or start a new run in another directory."
    )


def test_all_faults_of_the_arguments_are_told_at_once():
    data = {"x": np.ones((4, 2)), "y": np.ones(3), "mask": np.float32(1)}
    with pytest.raises(ValueError) as e:
        Batches(data, 0, epochs=-1)
    assert str(e.value) == (
        "Batches cannot use these arguments:\n"
        "  size=0: expected a whole number from 1\n"
        "  epochs=-1: expected a whole number from 1\n"
        "  data['mask']: None examples\n"
        "  data['x']: 4 examples\n"
        "  data['y']: 3 examples\n"
        "  mask='mask': the data has an entry of that name; rename one"
    )


def test_an_incomplete_batch_without_mask_is_refused():
    with pytest.raises(ValueError) as e:
        Batches(ids(10), 4, mask=None)
    assert str(e.value) == (
        "Batches cannot use these arguments:\n"
        "  mask=None: the 10 examples do not divide by size=4, so the last batch of an epoch "
        "has 2; give mask a name and use it in the loss"
    )


def test_a_size_that_does_not_divide_over_the_mesh_is_refused():
    with pytest.raises(ValueError) as e:
        Batches(ids(), 12).on(MESH)
    assert str(e.value) == (
        "Batches of size=12 do not divide over the 8 devices along data*fsdp: 12 % 8 = 4. "
        "Choose size=8 or 16."
    )


# Prefetching.


def test_batches_are_on_the_devices_before_they_are_asked_for():
    taken = itertools.count()
    feed = prefetch(({"x": np.full(8, next(taken))} for _ in range(9)), MESH, 3)
    first = next(feed)
    assert first["x"].sharding.spec == jax.P(("data", "fsdp"))
    for _ in range(1000):
        if next(taken) > 6:  # as many again wait on the host
            break
        feed.ready(0.01)
    else:
        feed.close()
    assert len(list(feed)) == 8


def test_a_short_batch_is_filled_up_and_masked(step):
    batches = [fitting.batch(16), fitting.batch(11, seed=1)]
    losses = []
    fit(
        step,
        fitting.start(step),
        batches,
        steps=2,
        log=None,
        callbacks=[lambda n, m: losses.append(m["loss"])],
    )
    np.testing.assert_allclose(losses, fitting.oracle(batches)[1], rtol=1e-5)


def faulty(batches, error=None):
    yield from batches
    if error is not None:
        raise error


NO_CHECKPOINT = "This was the batch of step 2; there is no checkpoint."


def refused(step, second):
    with pytest.raises(ValueError) as e:
        fit(step, fitting.start(step), [fitting.batch(16), second], steps=2, log=None)
    assert e.value.__notes__ == [NO_CHECKPOINT]
    return str(e.value)


def test_a_short_batch_without_mask_is_refused():
    @meshdp.distributed(mesh=MESH)
    def step(w, batch):
        return w, batch.sum()

    rows = np.ones(16, np.float32)
    with pytest.raises(ValueError) as e:
        fit(step, np.float32(0), [rows, rows[:5]], steps=2, log=None)
    assert str(e.value) == (
        "The batch has 5 rows where the first had 16, and no mask to say that the 11 to be "
        "added do not count. Give every batch an entry 'mask' of ones, and the loss "
        "Mean.of(losses, batch['mask']); meshdp.Batches does so."
    )


def test_a_batch_of_another_structure_is_refused(step):
    second = fitting.batch(16)
    second["z"] = second.pop("x")
    assert refused(step, second) == (
        "The batch has another structure than the first one, which the step was compiled for.\n"
        "  first: PyTreeDef({'mask': *, 'x': *, 'y': *})\n"
        "  now:   PyTreeDef({'mask': *, 'y': *, 'z': *})\n"
        "Give every batch the same entries."
    )


def test_a_batch_of_other_shapes_or_dtypes_is_refused(step):
    second = fitting.batch(16)
    second["x"] = second["x"][:, :3]
    second["y"] = second["y"].astype(np.float16)
    assert refused(step, second) == (
        "The batch has other shapes or dtypes than the first one, which the step was compiled "
        "for:\n"
        "  ['x']: float32[16, 3], was float32[16, 8]\n"
        "  ['y']: float16[16, 4], was float32[16, 4]\n"
        "Only the number of rows may be less, in a batch with a mask."
    )


def test_a_batch_with_more_rows_is_refused(step):
    assert refused(step, fitting.batch(24)) == (
        "The batch has other shapes or dtypes than the first one, which the step was compiled "
        "for:\n"
        "  ['mask']: float32[24], was float32[16]\n"
        "  ['x']: float32[24, 8], was float32[16, 8]\n"
        "  ['y']: float32[24, 4], was float32[16, 4]\n"
        "Only the number of rows may be less, in a batch with a mask."
    )


def test_batches_that_end_early_are_an_error_and_the_checkpoint_is_safe(step, tmp_path):
    batches = [fitting.batch(16, seed=i) for i in range(5)]
    with pytest.raises(ValueError) as e:
        fit(
            step,
            fitting.start(step),
            iter(batches),
            steps=9,
            log=None,
            checkpoint=Checkpoints(tmp_path, every=2),
        )
    assert str(e.value) == (
        f"The batches ended after 5, at step 6 of 9; the last checkpoint is of step 4, in "
        f"{tmp_path}. Give more, or batches that repeat, such as meshdp.Batches(data, size, "
        "seed=0), or fewer steps."
    )
    found = Checkpoints(tmp_path).restore(fitting.start(step))
    model, _ = fitting.oracle(batches[:4])
    np.testing.assert_allclose(found.state.model["w"], model["w"], rtol=1e-4, atol=1e-6)


def test_what_the_batches_raise_is_raised_with_the_step(step):
    with pytest.raises(OSError) as e:
        batches = faulty([fitting.batch(16)], OSError("the disk is gone"))
        fit(step, fitting.start(step), batches, steps=2, log=None)
    assert (str(e.value), e.value.__notes__) == ("the disk is gone", [NO_CHECKPOINT])


def test_data_in_place_of_batches_is_refused(step):
    with pytest.raises(TypeError) as e:
        fit(step, fitting.start(step), fitting.batch(), steps=1, log=None)
    assert str(e.value) == (
        "The batches are a dict, which is one thing, not many. Give meshdp.Batches(data, "
        "size), or a list or generator of batches."
    )


def test_a_place_that_is_none_is_refused():
    with pytest.raises(TypeError) as e:
        prefetch([fitting.batch()], print)
    assert str(e.value) == (
        "prefetch puts batches where a step or a mesh wants them, not a "
        "builtin_function_or_method."
    )


def test_what_is_not_iterable_is_refused(step):
    with pytest.raises(TypeError) as e:
        prefetch(3, step)
    assert str(e.value) == (
        "The batches, of type int, cannot be iterated over. Give a list, a generator, "
        "meshdp.Batches or any other iterable."
    )


# Positions.


class Grain:
    """An iterator with grain's protocol, whose position is bytes."""

    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return fitting.batch(16, seed=self.n - 1)

    def get_state(self):
        return b"at %d \xff" % self.n

    def set_state(self, state):
        self.n = int(state.split()[1])


@pytest.mark.parametrize("kind", ["grain", "plain"])
def test_a_resumed_run_goes_on_with_the_next_batch(step, tmp_path, caplog, kind):
    caplog.set_level(logging.INFO, "meshdp")
    plain = lambda: (fitting.batch(16, seed=i) for i in itertools.count())
    make = {"grain": Grain, "plain": plain}[kind]
    losses, records = [], []
    for steps in (3, 5):
        fit(
            step,
            fitting.start(step),
            make(),
            steps=steps,
            checkpoint=tmp_path,
            log=records.append,
            callbacks=[lambda n, m: losses.append(m["loss"])],
        )
    _, want = fitting.oracle([fitting.batch(16, seed=i) for i in range(5)])
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    said = [r.getMessage() for r in caplog.records if "position" in r.getMessage()]
    dropping = (
        "The batches cannot save their position (get_state, set_state): reading and dropping "
        "the first 3."
    )
    assert said == {"grain": [], "plain": [dropping]}[kind]
    (resumed,) = [r["text"] for r in records if r["event"] == "note"]
    dropped = "; the batches cannot save their position, so the first 3 are read and dropped"
    where = f"resumed from the checkpoint of step 3 in {tmp_path}"
    assert resumed == where + {"grain": "", "plain": dropped}[kind]


def test_fewer_batches_than_were_taken_are_an_error(step, tmp_path):
    batches = [fitting.batch(16)] * 3
    fit(step, fitting.start(step), batches, steps=3, checkpoint=tmp_path, log=None)
    with pytest.raises(ValueError) as e:
        fit(step, fitting.start(step), batches[:2], steps=4, checkpoint=tmp_path, log=None)
    assert str(e.value) == (
        "The batches ended after 2, but the run had taken 3 when it was saved. Give the same "
        "batches again, from their start."
    )


def test_a_position_that_json_cannot_say_is_refused():
    class Odd(Grain):
        def get_state(self):
            return {1, 2}

    with pytest.raises(TypeError) as e:
        next(prefetch(Odd(), MESH))
    assert str(e.value) == (
        "get_state() of the batches returned what cannot be saved (Object of type set is not "
        "JSON serializable). Return bytes, or numbers, strings, lists and dicts of these."
    )
