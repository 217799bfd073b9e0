"""Batches on one process: rows over devices, padding, and rows read back."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshdp._mesh import make_mesh
from meshdp._place import local_rows, pad_batch, place, shard_batch, to_host

VALUE = np.arange(96, dtype=np.float32).reshape(16, 6)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=4, fsdp=2)


def assert_lies(x, sharding, shard_shape):
    assert x.committed and x.sharding.is_equivalent_to(sharding, x.ndim)
    assert {s.data.shape for s in x.addressable_shards} == {shard_shape}


def assert_each_shard_is(x, value):
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])


def test_a_batch_is_split_over_data_and_fsdp_in_order(mesh):
    batch = {"x": VALUE, "label": np.arange(16), "scale": np.float32(2), "n": 3, "flag": True}
    placed = shard_batch(batch, mesh)
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    assert_lies(placed["x"], rows, (2, 6))
    assert_lies(placed["label"], rows, (2,))
    assert_lies(placed["scale"], NamedSharding(mesh, P()), ())
    assert_lies(placed["n"], NamedSharding(mesh, P()), ())
    assert placed["flag"] is True
    assert_each_shard_is(placed["x"], VALUE)
    np.testing.assert_array_equal(placed["x"].addressable_data(3), VALUE[6:8])


def test_changing_a_numpy_batch_afterwards_does_not_change_the_result(mesh):
    raw = np.empty(VALUE.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64  # where `jax.device_put` would not copy
    mine = raw[start : start + VALUE.nbytes].view(np.float32).reshape(VALUE.shape)
    mine[...] = VALUE
    placed = shard_batch(mine, mesh)
    mine[...] = -1
    assert_each_shard_is(placed, VALUE)


def test_a_batch_that_is_still_being_computed_is_not_waited_for(mesh):
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 10_000, lambda _, x: jnp.sin(x) + 1e-3, x))
    x = jnp.zeros((16, 1024))
    shard_batch({"x": x, "host": VALUE}, mesh)  # compiles the slices
    late = slow(x)
    placed = shard_batch({"x": late, "host": VALUE}, mesh)
    assert not late.is_ready()
    assert_each_shard_is(placed["x"], np.asarray(late))


def test_further_dimensions_are_split_where_a_leaf_has_them(mesh):
    placed = shard_batch({"x": VALUE, "label": np.arange(16)}, mesh, P("data", "fsdp"))
    assert_lies(placed["x"], NamedSharding(mesh, P("data", "fsdp")), (4, 3))
    assert_lies(placed["label"], NamedSharding(mesh, P("data")), (4,))


def test_keys_of_a_batch_are_split_like_its_rows(mesh):
    keys = jr.split(jr.key(0), 16)
    placed = shard_batch({"x": VALUE, "keys": keys}, mesh)["keys"]
    assert_lies(placed, NamedSharding(mesh, P(("data", "fsdp"))), (2,))
    np.testing.assert_array_equal(jr.key_data(placed), jr.key_data(keys))


def test_a_batch_is_placed_where_implicit_transfers_are_forbidden(mesh):
    batch = {"x": VALUE, "n": 3, "on_device": jnp.asarray(VALUE)}
    with jax.transfer_guard("disallow"):
        placed = shard_batch(batch, mesh)
        back = to_host(placed)
    np.testing.assert_array_equal(back["on_device"], VALUE)


def test_the_rows_of_one_process_are_all_rows(mesh):
    placed = shard_batch({"x": VALUE, "n": np.int32(3)}, mesh, P("fsdp"))
    back = local_rows({**placed, "host": VALUE})
    np.testing.assert_array_equal(back["host"], VALUE)
    assert back["host"] is not VALUE
    np.testing.assert_array_equal(back["x"], VALUE)
    assert back["n"] == 3
    back["x"][...] = 0
    assert_each_shard_is(placed["x"], VALUE)
    columns = place(VALUE, NamedSharding(mesh, P("data", "fsdp")))
    np.testing.assert_array_equal(local_rows(columns), VALUE)


def test_padding_repeats_the_last_row_and_says_which_rows_are_real():
    batch = {"x": VALUE[:6], "label": np.arange(6), "scale": np.float32(2), "name": "n"}
    padded, mask = pad_batch(batch, 4)
    np.testing.assert_array_equal(padded["x"], VALUE[[0, 1, 2, 3, 4, 5, 5, 5]])
    np.testing.assert_array_equal(padded["label"], [0, 1, 2, 3, 4, 5, 5, 5])
    assert padded["scale"] is batch["scale"] and padded["name"] == "n"
    np.testing.assert_array_equal(mask, [1, 1, 1, 1, 1, 1, 0, 0])
    assert mask.dtype == np.float32 and isinstance(padded["x"], np.ndarray)


def test_padding_device_arrays_and_keys_keeps_them_on_their_device():
    device = jax.devices()[3]
    x = jax.device_put(VALUE[:3], device)
    keys = jr.split(jr.key(0), 3)
    padded, mask = pad_batch({"x": x, "keys": keys}, 2)
    assert padded["x"].devices() == {device}
    np.testing.assert_array_equal(padded["x"], VALUE[[0, 1, 2, 2]])
    np.testing.assert_array_equal(jr.key_data(padded["keys"][3]), jr.key_data(keys[2]))
    np.testing.assert_array_equal(mask, [1, 1, 1, 0])


def test_a_batch_that_divides_is_not_copied_by_padding():
    batch = {"x": VALUE}
    padded, mask = pad_batch(batch, 8)
    assert padded is batch
    np.testing.assert_array_equal(mask, np.ones(16))
