"""Placement on one process: values, layout, and memory of its own."""

import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshdp import _blocks
from meshdp._mesh import make_mesh
from meshdp._place import place, reshard, shard_batch, to_host

VALUE = np.arange(96, dtype=np.float32).reshape(16, 6)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=4, fsdp=2)


@pytest.fixture(scope="module")
def half():
    return make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])


def aligned(value):
    """A NumPy array that `jax.device_put` to a CPU device does not copy by itself."""
    raw = np.empty(value.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    out[...] = value
    return out


def on_mesh(devices, axis_types, spec, value=VALUE):
    mesh = Mesh(np.array(devices).reshape(-1, 2), ("a", "b"), axis_types=(axis_types,) * 2)
    return jax.device_put(value, NamedSharding(mesh, spec), may_alias=False)


SOURCES = {
    "numpy": lambda: aligned(VALUE),
    "one_device": lambda: jnp.asarray(VALUE) + 0,
    "committed_elsewhere": lambda: jax.device_put(jnp.asarray(VALUE), jax.devices()[3]) + 0,
    "replicated": lambda: on_mesh(jax.devices(), AxisType.Auto, P()),
    "same_layout": lambda: on_mesh(jax.devices(), AxisType.Auto, P("a")),
    "other_layout": lambda: on_mesh(jax.devices(), AxisType.Auto, P(None, "b")),
    "other_device_order": lambda: on_mesh(jax.devices()[::-1], AxisType.Auto, P("a", "b")),
    "explicit_axes": lambda: on_mesh(jax.devices(), AxisType.Explicit, P(("a", "b"))),
    "fewer_devices": lambda: on_mesh(jax.devices()[2:6], AxisType.Auto, P("b")),
}
SPECS = {"split": P("data"), "two_ways": P("data", "fsdp"), "replicated": P()}
SHARD_SHAPES = {"split": (4, 6), "two_ways": (4, 3), "replicated": (16, 6)}
each_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
each_spec = pytest.mark.parametrize("spec", SPECS)


def assert_lies(x, sharding, shard_shape):
    assert x.committed
    assert x.sharding.is_equivalent_to(sharding, x.ndim)
    devices = {s.device for s in x.addressable_shards}
    assert devices == sharding.device_set
    for i in range(len(devices)):
        assert x.addressable_data(i).shape == shard_shape


def assert_each_shard_is(x, value):
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])


def memory(x):
    """The addresses at which an array begins, on each device."""
    if isinstance(x, np.ndarray):
        return {x.ctypes.data}
    return {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


@each_spec
@each_source
def test_an_array_from_anywhere_gets_the_layout_and_keeps_its_values(source, spec, mesh):
    sharding = NamedSharding(mesh, SPECS[spec])
    placed = place({"w": source()}, sharding)["w"]
    assert_lies(placed, sharding, SHARD_SHAPES[spec])
    assert_each_shard_is(placed, VALUE)


@each_spec
@each_source
def test_donating_the_result_leaves_the_original_alone(source, spec, mesh):
    original = source()
    placed = place(original, NamedSharding(mesh, SPECS[spec]))
    assert memory(placed).isdisjoint(memory(original))
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(placed)
    assert_each_shard_is(doubled, VALUE * 2)
    np.testing.assert_array_equal(np.asarray(original), VALUE)


@each_source
def test_donating_a_replica_on_one_device_leaves_the_original_alone(source):
    original = source()
    one = make_mesh(devices=jax.devices()[:1])
    placed = place(original, NamedSharding(one, P("data")))
    assert memory(placed).isdisjoint(memory(original))


@each_spec
def test_changing_a_numpy_array_afterwards_does_not_change_the_result(spec, mesh):
    mine = aligned(VALUE)
    placed = place(mine, NamedSharding(mesh, SPECS[spec]))
    mine[...] = -1
    assert_each_shard_is(placed, VALUE)


@each_source
def test_a_shared_array_keeps_its_values_too(source, mesh):
    sharding = NamedSharding(mesh, P("data", "fsdp"))
    placed = place(source(), sharding, share=True)
    assert_lies(placed, sharding, (4, 3))
    assert_each_shard_is(placed, VALUE)


def test_sharing_passes_arrays_in_place_through_as_they_are(mesh):
    sharding = NamedSharding(mesh, P("data"))
    tree = place({"w": VALUE, "keys": jr.split(jr.key(0), 8)}, sharding)
    again = place(tree, sharding, share=True)
    assert again["w"] is tree["w"] and again["keys"] is tree["keys"]
    mixed = place({"old": tree["w"], "new": VALUE}, sharding, share=True)
    assert mixed["old"] is tree["w"]
    assert_each_shard_is(mixed["new"], VALUE)


DTYPES = ["bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_travels_there_and_back(dtype, mesh):
    value = VALUE.astype(jnp.dtype(dtype))
    placed = place(value, NamedSharding(mesh, P("data")))
    assert placed.dtype == value.dtype
    back = to_host(place(placed, NamedSharding(mesh, P(None, "fsdp"))))
    assert back.dtype == value.dtype
    np.testing.assert_array_equal(back, value)


def test_numpy_float64_becomes_what_jax_makes_of_it(mesh):
    placed = place(VALUE.astype(np.float64), NamedSharding(mesh, P("data")))
    assert placed.dtype == jnp.asarray(np.float64(1)).dtype
    assert_each_shard_is(placed, VALUE)


def test_leaves_without_elements_and_empty_trees_are_placed(mesh):
    sharding = NamedSharding(mesh, P("data"))
    for empty in (np.ones((0, 4)), jnp.ones((0, 4)), place(np.ones((0, 4)), sharding)):
        placed = place({"none": {}, "x": empty}, sharding)
        assert placed["none"] == {}
        assert_lies(placed["x"], sharding, (0, 4))
        assert to_host(placed)["x"].shape == (0, 4)
    assert place(np.ones((8, 0)), sharding).shape == (8, 0)
    assert place([], sharding) == []


def test_python_numbers_stay_weakly_typed(mesh):
    placed = place({"n": 3, "x": 0.5}, NamedSharding(mesh, P()))
    assert (placed["n"].dtype, placed["n"].weak_type) == (jnp.int32, True)
    assert (placed["x"].dtype, placed["x"].weak_type) == (jnp.float32, True)
    assert_lies(placed["x"], NamedSharding(mesh, P()), ())


def test_a_weakly_typed_array_stays_so_and_has_its_own_memory(mesh):
    weak = jnp.full((8,), 0.5)
    placed = place(weak, NamedSharding(mesh, P()))
    assert weak.weak_type and placed.weak_type
    assert memory(placed).isdisjoint(memory(weak))


def test_flags_strings_and_functions_pass_through(mesh):
    tree = {"flag": True, "name": "w", "f": jnp.tanh, "none": None}
    assert place(tree, NamedSharding(mesh, P())) == tree


def test_configuration_inside_an_equinox_module_passes_through(mesh):
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(6, 4, key=jr.key(0)), eqx.nn.Dropout(0.25), eqx.nn.Lambda(jnp.tanh)]
    )
    placed = place({"model": model, "scale": 2.0}, NamedSharding(mesh, P()))
    dropout = placed["model"].layers[1]
    assert type(dropout.p) is float and dropout.inference is False
    assert placed["model"].layers[2].fn is jnp.tanh
    assert isinstance(placed["scale"], jax.Array)
    assert_lies(placed["model"].layers[0].weight, NamedSharding(mesh, P()), (4, 6))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_are_placed_and_come_back_as_the_same_keys(impl, mesh):
    keys = {"one": jr.key(7, impl=impl), "many": jr.split(jr.key(8, impl=impl), 8)}
    want = {"one": NamedSharding(mesh, P()), "many": NamedSharding(mesh, P("data"))}
    data = jax.tree.map(jr.key_data, keys)
    placed = place(keys, want)
    assert_lies(placed["many"], want["many"], (2,))
    assert_lies(placed["one"], want["one"], ())
    jax.jit(lambda k: jax.vmap(jr.normal)(k["many"]), donate_argnums=0)(placed)
    for held in (keys, to_host(place(keys, want))):
        assert jr.key_impl(held["one"]) == jr.key_impl(keys["one"])
        for name in data:
            np.testing.assert_array_equal(jr.key_data(held[name]), data[name])


def test_shardings_may_end_early_and_none_leaves_things_where_they_are(mesh):
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    tree = {"a": {"x": VALUE, "y": VALUE}, "b": VALUE, "c": VALUE}
    placed = place(tree, {"a": split, "b": whole, "c": None})
    assert_lies(placed["a"]["y"], split, (4, 6))
    assert_lies(placed["b"], whole, (16, 6))
    assert placed["c"] is VALUE


def test_one_call_of_device_put_serves_all_leaves(mesh, monkeypatch):
    calls = []
    real = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *a, **k: calls.append(a) or real(*a, **k))
    place([VALUE + i for i in range(50)], NamedSharding(mesh, P("data")))
    assert len(calls) == 1


def test_nothing_is_compiled_for_arrays_of_one_device_or_another_layout(mesh, half, caplog):
    tree = [jax.device_put(np.ones((16, n), np.float32)) for n in range(1, 6)]
    with jax.log_compiles():
        placed = place(tree, NamedSharding(mesh, P("data")))
        placed = reshard(placed, NamedSharding(mesh, P("fsdp")))
        placed = reshard(placed, half)
        to_host(placed)
        assert "Compiling" not in caplog.text
        jnp.ones((16, 7)) + 1
        assert "Compiling" in caplog.text


LARGE = (1024, 256)  # 1 MiB, and 8 leaves of it
PEAKS = {
    "place_numpy": (lambda t, a, b: place(t, a), 1),
    "place_one_device": (lambda t, a, b: place(jax.tree.map(jnp.asarray, t), a), 1),
    # Rows are copied once more where the CPU backend needs each device's columns together.
    "reshard": (lambda t, a, b: reshard(t, b), 1),
    "to_host": (lambda t, a, b: to_host(t), 1),
    "to_host_replicated": (lambda t, a, b: to_host(t), 1),
}


@pytest.mark.parametrize("case", PEAKS)
def test_host_memory_peaks_at_one_copy_of_the_tree(case, mesh):
    move, copies = PEAKS[case]
    split, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))
    tree = [np.full(LARGE, i, np.float32) for i in range(8)]
    if case in ("reshard", "to_host"):
        tree = place(tree, split)
    if case == "to_host_replicated":
        tree = place(tree, NamedSharding(mesh, P()))
    tracemalloc.start()
    move(tree, split, columns)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (copies + 0.1) * 8 * 2**20


@pytest.fixture
def tiny_groups(monkeypatch):
    monkeypatch.setattr(_blocks, "GROUP", VALUE.nbytes)


def test_a_tree_is_moved_in_groups_of_limited_size(tiny_groups, mesh, monkeypatch):
    sizes = []
    real = jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda xs, *a, **k: sizes.append(len(xs)) or real(xs, *a, **k)
    )
    small = VALUE[:, :2]
    placed = place([VALUE, small, small, small, VALUE], NamedSharding(mesh, P("data")))
    assert sizes == [1, 3, 1]
    assert_each_shard_is(placed[3], small)
    assert_each_shard_is(placed[4], VALUE)


def test_groups_hold_consecutive_leaves_up_to_the_limit():
    found = [list(g) for g in _blocks.groups([5, 1, 2, 3, 4, 9, 0], limit=6)]
    assert found == [[0, 1], [2, 3], [4], [5], [6]]
    assert list(_blocks.groups([], limit=6)) == []


@pytest.fixture
def accelerators(monkeypatch):
    """The ways that arrays take where host memory is not device memory."""
    monkeypatch.setattr(_blocks, "on_cpu", lambda sharding: False)


@each_spec
@each_source
def test_the_ways_over_accelerators_give_the_same_arrays(source, spec, mesh, accelerators):
    sharding = NamedSharding(mesh, SPECS[spec])
    placed = place({"w": source()}, sharding)["w"]
    assert_lies(placed, sharding, SHARD_SHAPES[spec])
    assert_each_shard_is(placed, VALUE)
    np.testing.assert_array_equal(to_host(placed), VALUE)


def test_leaves_of_one_tree_may_go_to_different_meshes_over_accelerators(mesh, accelerators):
    back = Mesh(mesh.devices[::-1], mesh.axis_names)
    lie = lambda spec: {"a": NamedSharding(mesh, spec), "b": NamedSharding(back, spec)}
    moved = reshard(place({"a": VALUE, "b": VALUE}, lie(P("data"))), lie(P("fsdp")))
    assert_lies(moved["a"], NamedSharding(mesh, P("fsdp")), (8, 6))
    assert_lies(moved["b"], NamedSharding(back, P("fsdp")), (8, 6))
    assert_each_shard_is(moved["b"], VALUE)


def test_a_layout_that_would_be_made_through_a_whole_array_is_not_made_on_devices():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    sharding = lambda *spec: NamedSharding(mesh, P(*spec))
    value = np.arange(2**16, dtype=np.float32).reshape(256, 256)
    x = jax.device_put(value, sharding(("a", "b", "c")))
    # XLA says of the first "Involuntary full rematerialization".
    assert _blocks.on_devices([x], [sharding("c", "b")]) is None
    (moved,) = _blocks.on_devices([x], [sharding(None, ("a", "b", "c"))])
    assert_lies(moved, sharding(None, ("a", "b", "c")), (256, 32))
    assert_each_shard_is(moved, value)


def test_resharding_to_another_number_of_devices_keeps_specs_and_values(mesh, half):
    tree = {"w": VALUE, "keys": jr.split(jr.key(0), 8), "count": np.int32(3)}
    where = {"w": P("data", "fsdp"), "keys": P("fsdp"), "count": P()}
    placed = place(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), where))
    fewer = reshard(placed, half)
    assert_lies(fewer["w"], NamedSharding(half, P("data", "fsdp")), (8, 3))
    assert_lies(fewer["keys"], NamedSharding(half, P("fsdp")), (4,))
    more = reshard(fewer, mesh)
    assert_lies(more["w"], NamedSharding(mesh, P("data", "fsdp")), (4, 3))
    assert_each_shard_is(more["w"], VALUE)
    np.testing.assert_array_equal(jr.key_data(more["keys"]), jr.key_data(tree["keys"]))
    assert int(more["count"]) == 3


@each_source
def test_resharding_leaves_the_original_alone(source, mesh):
    original = source()
    moved = reshard(original, NamedSharding(mesh, P("fsdp")))
    assert memory(moved).isdisjoint(memory(original))


def test_resharding_with_donation_deletes_what_was_moved(tiny_groups, mesh, half):
    tree = place({"a": VALUE, "b": VALUE, "k": jr.key(1)}, NamedSharding(mesh, P()))
    moved = reshard(tree, half, donate=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(tree))
    assert_each_shard_is(moved["a"], VALUE)
    assert_each_shard_is(moved["b"], VALUE)


def test_what_comes_back_to_the_host_is_the_callers_own(mesh):
    for spec in (P(), P("data"), P("data", "fsdp")):
        placed = place({"w": VALUE, "name": "w"}, NamedSharding(mesh, spec))
        back = to_host(placed)
        np.testing.assert_array_equal(back["w"], VALUE)
        back["w"] += 1
        assert_each_shard_is(placed["w"], VALUE)
        assert back["name"] == "w"
    mine = VALUE.copy()
    to_host(mine)[...] = 0
    np.testing.assert_array_equal(mine, VALUE)


@each_source
def test_a_batch_from_anywhere_is_split_and_has_memory_of_its_own(source, mesh):
    original = source()
    placed = shard_batch({"x": original}, mesh)["x"]
    assert_lies(placed, NamedSharding(mesh, P(("data", "fsdp"))), (2, 6))
    assert_each_shard_is(placed, VALUE)
    assert memory(placed).isdisjoint(memory(original))


@each_source
def test_a_replicated_batch_has_memory_of_its_own(source, mesh):
    original = source()
    placed = shard_batch({"x": original}, mesh, P())["x"]
    assert memory(placed).isdisjoint(memory(original))
    assert_each_shard_is(placed, VALUE)
