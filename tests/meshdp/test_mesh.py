import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshdp._mesh import AXES, _arrange, make_mesh


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What JAX's mesh helpers read of a device."""

    id: int
    process_index: int = 0
    slice_index: int | None = None
    platform: str = "gpu"
    device_kind: str = "fake"
    coords: tuple[int, ...] = (0, 0, 0)
    core_on_chip: int = 0


def sizes(**given):
    return dict.fromkeys(AXES, 1) | given


def ids(array):
    return [d.id for d in array.flat]


def neighbours(array, axis):
    """The ids along one axis, with all other indices 0."""
    index = [0] * len(AXES)
    index[AXES.index(axis)] = slice(None)
    return [d.id for d in array[tuple(index)]]


def message(**kwargs):
    with pytest.raises(ValueError) as e:
        make_mesh(**kwargs)
    return str(e.value)


def test_every_mesh_has_the_six_axes_in_order_and_all_are_auto():
    mesh = make_mesh(data=2, tensor=4)
    assert mesh.axis_names == ("data", "fsdp", "stage", "expert", "seq", "tensor")
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == (2, 1, 1, 1, 1, 4)
    assert mesh.axis_types == (AxisType.Auto,) * 6


def test_without_sizes_all_devices_lie_along_data():
    assert dict(make_mesh().shape) == sizes(data=8)


def test_with_only_devices_all_of_them_lie_along_data():
    assert dict(make_mesh(devices=jax.devices()[:3]).shape) == sizes(data=3)


def test_minus_one_takes_the_devices_that_are_left():
    assert dict(make_mesh(fsdp=-1, tensor=2).shape) == sizes(fsdp=4, tensor=2)


def test_minus_one_may_be_one():
    assert dict(make_mesh(data=-1, fsdp=8).shape) == sizes(fsdp=8)


def test_a_numpy_integer_is_a_size():
    assert dict(make_mesh(data=np.int64(8)).shape) == sizes(data=8)


@pytest.mark.parametrize(
    "devices",
    [
        lambda: jax.devices()[:4],
        lambda: tuple(jax.devices()[:4]),
        lambda: np.array(jax.devices()[:4]),
        lambda: make_mesh().devices[:4],
        lambda: jax.devices()[3::-1],
    ],
    ids=["list", "tuple", "array", "six dimensions", "reversed"],
)
def test_any_sequence_of_devices_will_do_and_its_order_does_not_matter(devices):
    mesh = make_mesh(data=2, fsdp=2, devices=devices())
    assert list(mesh.devices.flat) == jax.devices()[:4]


def test_one_spec_is_valid_on_every_mesh():
    spec = P("fsdp", "tensor")
    for shape in [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]:
        mesh = make_mesh(**shape)
        x = jax.device_put(np.zeros((8, 8)), jax.NamedSharding(mesh, spec))
        expected = (8 // shape.get("fsdp", 1), 8 // shape.get("tensor", 1))
        assert x.addressable_data(0).shape == expected


# Where the devices go


def test_tensor_neighbours_are_closest_and_stages_furthest_whatever_the_names_order():
    mesh = make_mesh(data=2, stage=2, tensor=2).devices
    assert neighbours(mesh, "tensor") == [0, 1]
    assert neighbours(mesh, "data") == [0, 2]
    assert neighbours(mesh, "stage") == [0, 4]


def test_the_links_get_faster_from_stage_over_data_fsdp_expert_and_seq_to_tensor():
    devices = [FakeDevice(i) for i in range(64)]
    array = _arrange(dict.fromkeys(AXES, 2), devices, None)
    stride = {axis: neighbours(array, axis)[1] for axis in AXES}
    assert stride == {"stage": 32, "data": 16, "fsdp": 8, "expert": 4, "seq": 2, "tensor": 1}


def test_devices_go_in_the_order_of_process_and_id():
    devices = [FakeDevice(i, process_index=p) for i, p in [(0, 1), (1, 1), (2, 0), (3, 0)]]
    cpus = [dataclasses.replace(d, platform="cpu") for d in devices]
    assert ids(_arrange(sizes(data=4), cpus, None)) == [2, 3, 0, 1]


def test_on_a_tpu_the_tensor_axis_gets_a_ring_of_real_neighbours():
    devices = [
        FakeDevice(i, platform="tpu", device_kind="TPU v4", coords=(x, y, z))
        for i, (z, y, x) in enumerate(itertools.product(range(4), range(2), range(2)))
    ]
    array = _arrange(sizes(data=4, tensor=4), devices, None)
    planes = array.reshape(4, 4)
    assert [{d.coords[2] for d in plane} for plane in planes] == [{0}, {1}, {2}, {3}]


def test_on_a_tpu_one_physical_dimension_may_serve_two_axes():
    devices = [
        FakeDevice(i, platform="tpu", device_kind="TPU v4", coords=(x, y, 0))
        for i, (y, x) in enumerate(itertools.product(range(4), range(4)))
    ]
    array = _arrange(sizes(data=2, fsdp=2, tensor=4), devices, None)
    assert array.shape == (2, 2, 1, 1, 1, 4)
    assert sorted(ids(array)) == list(range(16))


def test_devices_of_a_tpu_that_leave_a_hole_are_refused():
    devices = [
        FakeDevice(i, platform="tpu", device_kind="TPU v4", coords=(x, 0, 0))
        for i, x in enumerate([0, 1, 3])
    ]
    with pytest.raises(ValueError) as e:
        _arrange(sizes(data=3), devices, None)
    assert str(e.value).startswith(
        "The 3 TPU devices are not a box of the slice without holes, so they have no order in "
        "which neighbours are close. Choose a box with `devices=`, or leave it out to use them "
        "all. JAX says: "
    )


# Slices


def spread(count, per_slice):
    return [
        FakeDevice(i, process_index=i, slice_index=i // per_slice)
        for i in range(count * per_slice)
    ]


def slices_along(array, axis):
    index = [0] * len(AXES)
    index[AXES.index(axis)] = slice(None)
    return [d.slice_index for d in array[tuple(index)]]


def test_one_name_puts_every_slice_along_that_axis():
    array = _arrange(sizes(data=8, tensor=2), spread(4, 4), "data")
    assert slices_along(array, "data") == [0, 0, 1, 1, 2, 2, 3, 3]
    assert slices_along(array, "tensor") == [0, 0]


def test_of_several_names_the_first_takes_as_many_slices_as_it_can():
    array = _arrange(sizes(stage=2, data=8), spread(4, 4), ("stage", "data"))
    assert slices_along(array, "stage") == [0, 2]
    assert slices_along(array, "data") == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_mapping_says_how_many_slices_lie_along_each_axis():
    array = _arrange(sizes(stage=4, data=4), spread(4, 4), {"stage": 1, "data": 4})
    assert slices_along(array, "stage") == [0, 0, 0, 0]
    assert slices_along(array, "data") == [0, 1, 2, 3]


def test_an_axis_that_spans_slices_need_not_be_a_slow_one():
    array = _arrange(sizes(data=4, tensor=4), spread(2, 8), "tensor")
    assert slices_along(array, "tensor") == [0, 0, 1, 1]
    assert slices_along(array, "data") == [0, 0, 0, 0]


def test_devices_that_belong_to_several_slices_are_spread_over_the_slowest_axes_unasked():
    devices = [FakeDevice(i, slice_index=i % 4) for i in range(16)]
    array = _arrange(sizes(data=2, fsdp=4, tensor=2), devices, None)
    assert slices_along(array, "data") == [0, 2]
    assert slices_along(array, "fsdp") == [0, 0, 1, 1]
    assert slices_along(array, "tensor") == [0, 0]


def test_processes_are_the_slices_where_devices_do_not_say():
    devices = [FakeDevice(i, process_index=i // 4) for i in range(8)]
    array = _arrange(sizes(data=4, tensor=2), devices, "tensor")
    assert neighbours(array, "tensor") == [0, 4]


def test_one_slice_lies_along_any_axis():
    mesh = make_mesh(data=4, tensor=2, slices="data")
    assert list(mesh.devices.flat) == jax.devices()


# Errors


def test_a_wrong_product_is_shown_with_the_nearest_sizes_that_work():
    assert message(data=4, tensor=3) == (
        "data=4 * tensor=3 = 12, but there are 8 devices; "
        "nearest that work: data=4, tensor=2 or data=2, tensor=4"
    )


def test_a_product_that_is_too_small_offers_to_use_fewer_devices():
    assert message(fsdp=2) == (
        "fsdp=2, but there are 8 devices; nearest that work: data=4, fsdp=2 or "
        "data=2, fsdp=4; or use fewer devices: devices=jax.devices()[:2]"
    )


def test_the_nearest_sizes_are_those_that_change_least_what_was_given():
    assert message(fsdp=3) == (
        "fsdp=3, but there are 8 devices; nearest that work: data=2, fsdp=4 or "
        "data=4, fsdp=2; or use fewer devices: devices=jax.devices()[:3]"
    )


def test_fewer_devices_are_not_offered_to_one_who_chose_the_devices():
    assert message(data=2, devices=jax.devices()[:4]) == (
        "data=2, but there are 4 devices; nearest that works: data=4"
    )


def test_data_equal_to_one_is_not_the_same_as_no_sizes():
    assert message(data=1) == (
        "data=1, but there are 8 devices; nearest that works: data=8; "
        "or use fewer devices: devices=jax.devices()[:1]"
    )


def test_the_devices_that_were_given_are_those_counted():
    assert message(data=3, devices=jax.devices()[:1]) == (
        "data=3, but there is 1 device; nearest that works: data=1"
    )


def test_what_is_left_must_be_a_whole_number():
    assert message(data=-1, tensor=3) == (
        "data=-1 * tensor=3: there are 8 devices, and 8 does not divide by 3; "
        "nearest that work: data=2, tensor=4 or data=4, tensor=2"
    )


def test_only_one_axis_can_take_what_is_left():
    assert message(data=-1, fsdp=-1, tensor=2) == (
        "data=-1, fsdp=-1: only one axis can take all the devices that are left. "
        "Give the other a size."
    )


def test_every_size_that_is_not_a_positive_integer_is_reported_at_once():
    assert message(data=0, fsdp=-2, stage=2.0, expert="2", seq=True, tensor=2) == (
        "data=0, fsdp=-2, stage=2.0, expert='2', seq=True: the size of a mesh axis is a "
        "positive integer, or -1 for all the devices that are left. "
        "Leave an axis out to switch it off."
    )


def test_no_devices_make_no_mesh():
    assert message(devices=[]) == (
        "devices is empty; a mesh needs at least one device. Leave it out to use jax.devices()."
    )


def test_a_device_cannot_be_in_a_mesh_twice():
    first = jax.devices()[0]
    assert message(devices=[first, first]) == (
        f"devices holds {first} more than once. Give each device once."
    )


def test_what_is_not_a_device_is_named():
    with pytest.raises(TypeError) as e:
        make_mesh(devices=[0, "cpu"])
    assert str(e.value) == (
        "devices holds 0, 'cpu', which is not a device. "
        "Give a sequence of devices, such as jax.devices()[:4]."
    )


def test_slices_along_an_unknown_axis_are_an_error():
    assert message(slices=("data", "model")) == (
        "slices=('data', 'model') names 'model', but the axes are "
        "data, fsdp, stage, expert, seq, tensor."
    )


def test_a_number_of_slices_without_an_axis_is_an_error():
    with pytest.raises(TypeError) as e:
        make_mesh(slices=2)
    assert str(e.value) == (
        "slices=2: expected the name of an axis, several names, or a mapping from names to "
        'numbers of slices. Write slices={"data": 2}.'
    )


def test_more_slices_than_there_are_is_an_error():
    assert message(slices={"data": 2}) == (
        "slices={'data': 2} does not fit: there is 1 process, so the numbers of slices along "
        "the axes must have the product 1, and each must divide the size of its axis "
        "(data=8); leave `slices` out."
    )


@pytest.mark.parametrize(
    "given, offer",
    [
        (sizes(tensor=2, data=8), "slices={'data': 4} would fit"),
        (
            sizes(tensor=2, stage=2, expert=3, data=1),
            "slices={'stage': 2, 'tensor': 2} would fit",
        ),
        (
            sizes(tensor=3, data=5),
            "none fit these sizes: give an axis a size that divides by 4",
        ),
    ],
)
def test_slices_that_do_not_fit_come_with_some_that_do(given, offer):
    with pytest.raises(ValueError) as e:
        _arrange(given, spread(4, 1), "tensor")
    assert str(e.value) == (
        "slices='tensor' does not fit: there are 4 slices, so the numbers of slices along "
        "the axes must have the product 4, and each must divide the size of its axis "
        f"(tensor={given['tensor']}); {offer}."
    )


def test_slices_must_be_equally_large():
    devices = [FakeDevice(i, slice_index=s) for i, s in enumerate([0, 0, 1])]
    with pytest.raises(ValueError) as e:
        _arrange(sizes(data=3), devices, "data")
    assert str(e.value) == (
        "slices='data' needs as many devices in each slice, but there are slice 0: 2, "
        "slice 1: 1. Choose the devices with `devices=`."
    )
