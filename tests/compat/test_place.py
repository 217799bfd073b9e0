"""Trees onto devices and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compat

D = jax.devices()


def rows(x):
    """(device, row) of each shard, in the order of the rows."""
    shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)
    return [(s.device, np.asarray(s.data)[0].tolist()) for s in shards]


def test_shards_land_on_their_devices_wherever_they_lived():
    shards = [np.float32([0, 1]), jax.device_put(np.float32([2, 3]), D[6]), jnp.float32([4, 5])]
    out = compat.device_put_sharded(shards, [D[5], D[0], D[2]])
    assert rows(out) == [(D[5], [0, 1]), (D[0], [2, 3]), (D[2], [4, 5])]


def test_shards_may_be_trees_with_scalars_and_typed_keys():
    keys = jax.random.split(jax.random.key(0), 2)
    out = compat.device_put_sharded(
        [{"k": k, "s": i, "n": None} for i, k in enumerate(keys)], D[:2]
    )
    np.testing.assert_array_equal(out["s"], [0, 1])
    assert out["n"] is None
    assert jnp.issubdtype(out["k"].dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(jax.random.key_data(out["k"]), jax.random.key_data(keys))


def said(f, *args, **kwargs):
    with pytest.raises(ValueError) as e:
        f(*args, **kwargs)
    return str(e.value)


def test_shards_must_be_as_many_as_devices():
    assert said(compat.device_put_sharded, [1, 2], D[:3]) == (
        "device_put_sharded was given 2 shards for 3 devices. Give one shard for each device."
    )


def test_shards_that_differ_are_all_named():
    shards = [{"a": np.ones(2), "b": 1}, {"a": np.ones(3), "b": 1.5}]
    assert said(compat.device_put_sharded, shards, D[:2]) == (
        "device_put_sharded: 2 leaves differ from shard to shard:\n"
        "  shard['a']: float32[3] in shard 1, float32[2] in shard 0\n"
        "  shard['b']: float32[] in shard 1, int32[] in shard 0\n"
        "Pad them to one shape and convert them to one dtype."
    )


def test_shards_of_other_structure_are_named():
    assert said(compat.device_put_sharded, [{"a": 1}, [1]], D[:2]) == (
        "device_put_sharded: shard 1 is a PyTreeDef([*]), but shard 0 is a "
        "PyTreeDef({'a': *}). Give shards of one structure."
    )


def test_copies_go_to_a_subset_of_the_devices():
    out = compat.device_put_replicated({"x": np.float32([1, 2]), "lr": 0.5}, D[3:5])
    assert rows(out["x"]) == [(D[3], [1, 2]), (D[4], [1, 2])]
    np.testing.assert_array_equal(out["lr"], [0.5, 0.5])


@pytest.mark.parametrize("where", [0, 6])
def test_arrays_on_a_device_and_typed_keys_are_replicated(where):
    x = jax.device_put(np.float32([1, 2]), D[where])
    key = jax.device_put(jax.random.key(3), D[where])
    out = compat.replicate({"x": x, "k": key})
    np.testing.assert_array_equal(out["x"], np.tile([1, 2], (8, 1)))
    np.testing.assert_array_equal(
        jax.random.key_data(out["k"]), np.tile(jax.random.key_data(key), (8, 1))
    )


def test_what_is_replicated_may_be_donated_without_harm():
    x = jnp.ones(4)
    compat.pmap(lambda x: x + 1, donate_argnums=0)(compat.replicate(x))
    np.testing.assert_array_equal(x, np.ones(4))


def test_replicating_over_no_devices():
    assert said(compat.device_put_replicated, 1, []) == (
        "devices of device_put_replicated is an empty list. Give a list of devices, such as "
        "jax.local_devices()."
    )


@pytest.mark.parametrize("read", [compat.unreplicate, compat.first])
def test_the_first_replica_is_read_from_one_shard(read):
    x = compat.pmap(lambda x: x)(np.arange(16, dtype=np.float32).reshape(8, 2))
    with jax.transfer_guard("disallow"):
        row = read({"x": x})["x"]
    np.testing.assert_array_equal(row, [0, 1])
    assert not row.committed and not x.is_deleted()


def test_the_first_replica_of_other_things():
    keys = compat.replicate(jax.random.key(1))
    nested = compat.pmap(lambda x: compat.pmap(lambda y: y)(x))(np.arange(8.0).reshape(4, 2))
    many = compat.pmap(lambda x: x)(np.arange(16.0))
    tree = {
        "host": np.arange(3),
        "scalar": 4,
        "one": jnp.arange(2),
        "nested": nested,
        "m": many,
    }
    out = compat.unreplicate(tree)
    assert (out["host"], out["scalar"], out["one"], out["m"]) == (0, 4, 0, 0)
    np.testing.assert_array_equal(out["nested"], [0, 1])
    assert jax.random.key_data(compat.unreplicate(keys)).tolist() == [0, 1]


def test_unreplicate_works_under_jit():
    np.testing.assert_array_equal(
        jax.jit(compat.unreplicate)(jnp.arange(6.0).reshape(2, 3)), [0, 1, 2]
    )


def test_local_gathers_every_row_and_unties_it():
    x = compat.pmap(lambda x: x, devices=D[4:])(np.arange(4, dtype=np.float32))
    y = compat.local({"x": x, "host": 3})
    assert not y["x"].committed and y["host"] == 3
    np.testing.assert_array_equal(
        y["x"] + compat.pmap(lambda x: x, devices=D[:4])(x), 2 * np.arange(4)
    )
    one = compat.pmap(lambda x: x, devices=D[:1])(np.ones((1, 2), np.float32))
    kept = compat.local(one)
    compat.pmap(lambda x: x + 1, devices=D[:1], donate_argnums=0)(one)
    np.testing.assert_array_equal(kept, [[1, 1]])
    key = compat.local(compat.replicate(jax.random.key(1)))
    np.testing.assert_array_equal(jax.random.key_data(key), [[0, 1]] * 8)


def test_prefetch_yields_every_batch_in_order_on_the_devices():
    batches = [{"x": np.full((8, 2), i, np.float32), "j": jnp.full((8,), i)} for i in range(5)]
    out = list(compat.prefetch_to_device(iter(batches), 2))
    assert [b["x"][0, 0].item() for b in out] == [0, 1, 2, 3, 4]
    assert all(len(leaf.sharding.device_set) == 8 for b in out for leaf in b.values())


def test_prefetch_stays_ahead_by_size():
    taken = []

    def source():
        for i in range(5):
            taken.append(i)
            yield np.zeros((2, 1), np.float32)

    ahead = compat.prefetch_to_device(source(), 2, devices=D[:2])
    next(ahead)
    assert taken == [0, 1]
    next(ahead)
    assert taken == [0, 1, 2]


def test_prefetch_of_a_batch_that_was_not_sharded():
    assert said(next, compat.prefetch_to_device([np.zeros((6, 2))], 1)) == (
        "prefetch_to_device was given an array of shape (6, 2) for 8 devices, but wants a row "
        "for each. Use compat.shard(batch) first, or devices= to name fewer."
    )


def test_prefetch_of_no_batches_ahead():
    # Flax yields nothing then: a training loop without a step.
    assert said(compat.prefetch_to_device, [np.zeros((8, 2))], 0) == (
        "prefetch_to_device was given size=0. Give the number of batches to keep on the "
        "devices, 1 or more; 2 lets transfer and work overlap."
    )


def test_leaves_that_are_no_arrays_are_named():
    tree = {"a": "text", "b": 1, "c": object}
    assert said(compat.device_put_replicated, tree, jax.devices()) == (
        "device_put_replicated: 2 leaves are no arrays:\n"
        "  ['a'] is a str\n"
        "  ['c'] is a type\n"
        "Take them out of the tree."
    )
    assert said(compat.device_put_sharded, ["x"], jax.devices()[:1]) == (
        "device_put_sharded: 1 leaves are no arrays:\n"
        "  [0] is a str\n"
        "Take them out of the tree."
    )


def test_shards_must_be_a_list():
    with pytest.raises(TypeError) as e:
        compat.device_put_sharded({"w": 1}, jax.devices()[:1])
    assert str(e.value) == (
        "device_put_sharded was given a dict of shards. Give a list, one shard for each device."
    )


def test_copies_and_shards_can_be_made_inside_jit():
    devices = jax.devices()[:2]
    x = np.arange(3, dtype=np.float32)
    copies = jax.jit(lambda x: compat.device_put_replicated(x, devices))(x)
    rows = jax.jit(lambda x: compat.device_put_sharded([x, 2 * x], devices))(x)
    np.testing.assert_array_equal(copies, [x, x])
    np.testing.assert_array_equal(rows, [x, 2 * x])
    assert [s.data.shape for s in rows.addressable_shards] == [(1, 3)] * 2
