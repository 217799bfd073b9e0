"""Trees onto devices, replicas in front, and back; no device holds more than it keeps."""

import collections
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from compat._axes import device_list
from meshdp import _jaxapi


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _sharding(devices: Sequence[Any]) -> NamedSharding:
    mesh = _jaxapi.auto_mesh(np.array(devices, dtype=object), ("_pmap",))
    return NamedSharding(mesh, P("_pmap"))


def _stacked(rows: Sequence[Any], devices: Sequence[Any]) -> jax.Array:
    """One row on each device, without a stack of them anywhere."""
    if any(isinstance(x, Tracer) for x in rows):
        # Inside `jit`, where nothing has a place yet, the compiler puts each row on its device.
        return lax.with_sharding_constraint(jnp.stack(rows), _sharding(devices))
    if _is_key(rows[0]):
        data = _stacked([jax.random.key_data(x) for x in rows], devices)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(rows[0]))
    ready: dict[int, Any] = {}  # replicas of one array are lengthened once
    blocks = []
    for x in rows:
        if id(x) not in ready:
            single = isinstance(x, jax.Array) and len(x.sharding.device_set) == 1
            ready[id(x)] = (x if single else np.asarray(x, jnp.result_type(x)))[None]
        blocks.append(ready[id(x)])
    shards = jax.device_put(blocks, list(devices))
    shape = (len(rows), *np.shape(rows[0]))
    return jax.make_array_from_single_device_arrays(shape, _sharding(devices), shards)


def _refuse_strange(what: str, tree: Any) -> None:
    """Names every leaf that is no array and no number."""
    faults = []
    for path, x in jtu.tree_leaves_with_path(tree):
        try:
            jnp.result_type(x)
            np.shape(x)
            known = not isinstance(x, (str, bytes, type))
        except (TypeError, ValueError):
            known = False
        if not known:
            faults.append(f"  {jtu.keystr(path) or 'the argument'} is a {type(x).__name__}")
    if faults:
        raise ValueError(
            f"{what}: {len(faults)} leaves are no arrays:\n"
            + "\n".join(faults)
            + "\nTake them out of the tree."
        )


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Any]) -> Any:
    """Puts each shard on its device, as rows of one tree.

    **Arguments:**

    - `shards`: one pytree for each device, all alike; they may live on the host or on any
        device.
    - `devices`: as many devices.

    **Returns:**

    A pytree whose leaves have the shards in front: `[len(devices), ...]`, row i on device i.

    **Raises:**

    - `ValueError`: if the numbers, structures, shapes or dtypes differ; all are named.
    """
    devices = device_list(devices, "device_put_sharded")
    if not isinstance(shards, Iterable) or isinstance(shards, dict):
        raise TypeError(
            f"device_put_sharded was given a {type(shards).__name__} of shards. Give a list, "
            "one shard for each device."
        )
    shards = list(shards)
    if len(shards) != len(devices):
        raise ValueError(
            f"device_put_sharded was given {len(shards)} shards for {len(devices)} devices. "
            "Give one shard for each device."
        )
    _refuse_strange("device_put_sharded", shards)
    first, tree = jtu.tree_flatten(shards[0])
    flat = []
    for i, shard in enumerate(shards):
        leaves, other = jtu.tree_flatten(shard)
        if other != tree:
            raise ValueError(
                f"device_put_sharded: shard {i} is a {other}, but shard 0 is a {tree}. Give "
                "shards of one structure."
            )
        flat.append(leaves)
    faults = []
    for j, (path, x) in enumerate(jtu.tree_leaves_with_path(shards[0])):
        for i, leaves in enumerate(flat):
            y = leaves[j]
            if (np.shape(y), jnp.result_type(y)) != (np.shape(x), jnp.result_type(x)):
                faults.append(
                    f"  shard{jtu.keystr(path)}: {_kind(y)} in shard {i}, {_kind(x)} in shard 0"
                )
    if faults:
        raise ValueError(
            f"device_put_sharded: {len(faults)} leaves differ from shard to shard:\n"
            + "\n".join(faults)
            + "\nPad them to one shape and convert them to one dtype."
        )
    rows = [[leaves[j] for leaves in flat] for j in range(len(first))]
    return jtu.tree_unflatten(tree, [_stacked(r, devices) for r in rows])


def _kind(x: Any) -> str:
    return f"{jnp.result_type(x)}[{','.join(map(str, np.shape(x)))}]"


def device_put_replicated(x: Any, devices: Sequence[Any]) -> Any:
    """Puts a copy of a tree on each device: leaves become `[len(devices), ...]`.

    The copies go from the source to each device; nothing is stacked, so a device holds no
    more than its own copy. Python numbers, NumPy arrays, arrays on any device and typed keys
    will do.

    **Raises:**

    - `ValueError`: if `devices` is empty.
    """
    devices = device_list(devices, "device_put_replicated")
    _refuse_strange("device_put_replicated", x)
    return jtu.tree_map(lambda leaf: _stacked([leaf] * len(devices), devices), x)


def replicate(tree: Any, devices: Sequence[Any] | None = None) -> Any:
    """Puts a copy of a tree on each device, by default on all of this process."""
    return device_put_replicated(tree, jax.local_devices() if devices is None else devices)


@jax.jit
def _row(block: jax.Array) -> jax.Array:
    return lax.index_in_dim(block, 0, keepdims=False)


def _first(x: Any) -> Any:
    if not np.ndim(x):
        return x
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return x[0]
    if isinstance(x.sharding, SingleDeviceSharding):
        return x[0]
    if _is_key(x):
        return jax.random.wrap_key_data(
            _first(jax.random.key_data(x)), impl=jax.random.key_impl(x)
        )
    block = x.addressable_data(0)
    if block.shape[1:] != x.shape[1:]:  # maps within maps: the row lies on several devices
        return _whole(x[0])
    return _jaxapi.untied(_row(block))


def unreplicate(tree: Any) -> Any:
    """Gives the first replica's values: row 0 of every leaf, read from one device.

    The results are ordinary arrays that are not tied to any device: they mix with arrays
    anywhere. Scalars are returned as they are.
    """
    return jtu.tree_map(_first, tree)


def first(tree: Any) -> Any:
    """What `tree_map(lambda x: x[0], tree)` was written for, at the price of reading one
    shard. Another name for `unreplicate`."""
    return unreplicate(tree)


def _whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return x
    if _is_key(x):
        return jax.random.wrap_key_data(
            _whole(jax.random.key_data(x)), impl=jax.random.key_impl(x)
        )
    if len(x.sharding.device_set) == 1:
        # A copy: the result must not die when `x` is donated.
        return _jaxapi.untied(jnp.copy(x.addressable_data(0)))
    if not x.is_fully_addressable:
        raise ValueError(
            f"compat.local was given an array of shape {x.shape} that lies on devices of other "
            "processes too. Results of compat.pmap do not; for others use "
            "jax.experimental.multihost_utils.process_allgather."
        )
    device = x.addressable_data(0).device
    return _jaxapi.untied(jax.device_put(x, SingleDeviceSharding(device)))


def local(tree: Any) -> Any:
    """Gathers mapped results into ordinary arrays, which mix with arrays anywhere.

    JAX ties an array that lies on several devices to just these: it refuses to add, stack or
    compare results of maps over different devices. `local` brings all rows (of this process)
    to one device and unties them.

    **Raises:**

    - `ValueError`: for an array that lies on devices of several processes.
    """
    return jtu.tree_map(_whole, tree)


def prefetch_to_device(
    iterator: Iterable[Any], size: int, devices: Sequence[Any] | None = None
) -> Iterator[Any]:
    """Yields the batches of an iterator, `size` of them ahead on the devices.

    **Arguments:**

    - `iterator`: gives pytrees of arrays with the replicas in front (see `shard`).
    - `size`: batches kept on the devices; 2 lets transfer and work overlap.
    - `devices`: one for each replica; by default all of this process.
    """
    if operator.index(size) < 1:
        raise ValueError(
            f"prefetch_to_device was given size={size}. Give the number of batches to keep on "
            "the devices, 1 or more; 2 lets transfer and work overlap."
        )
    devices = device_list(
        jax.local_devices() if devices is None else devices, "prefetch_to_device"
    )
    return _prefetched(iter(iterator), size, devices)


def _prefetched(batches: Iterator[Any], size: int, devices: Sequence[Any]) -> Iterator[Any]:
    def placed(x: Any) -> Any:
        shape = np.shape(x)
        if not shape or shape[0] != len(devices):
            raise ValueError(
                f"prefetch_to_device was given an array of shape {shape} for {len(devices)} "
                "devices, but wants a row for each. Use "
                "compat.shard(batch) first, or devices= to name fewer."
            )
        if isinstance(x, jax.Array):
            return _stacked([x[i] for i in range(len(x))], devices)
        return jax.device_put(np.asarray(x), _sharding(devices))

    ahead = collections.deque(jtu.tree_map(placed, b) for b in itertools.islice(batches, size))
    while ahead:
        yield ahead.popleft()
        ahead.extend(jtu.tree_map(placed, b) for b in itertools.islice(batches, 1))
