"""Host-local arrays to global ones and back, sharing the buffers: nothing is copied."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding


def _is_key(x: jax.Array) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _rewrap(x: jax.Array, sharding: NamedSharding, scale: tuple[int, int], name: Any):
    """The same shards under another sharding, its mapped dimensions `scale` times as long."""
    if _is_key(x):
        data = _rewrap(jax.random.key_data(x), sharding, scale, name)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    shape = list(x.shape)
    for i, entry in enumerate(sharding.spec):
        if entry == name or (isinstance(entry, tuple) and name in entry):
            shape[i] = shape[i] * scale[0] // scale[1]
    if x.is_fully_replicated:
        shards = [s.data for s in x.addressable_shards]
    else:  # a hundred times faster than `addressable_shards`
        shards = [x.addressable_data(i) for i in range(min(scale))]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)


class Border:
    """The crossing between this process's view (`local`) and that of all (`mesh`)."""

    def __init__(self, mesh: Mesh):
        (self.name,) = mesh.axis_names
        here = jax.process_index()
        devices = [d for d in mesh.devices.flat if d.process_index == here]
        self.mesh = mesh
        self.local = Mesh(np.array(devices), mesh.axis_names, axis_types=mesh.axis_types)
        self.sizes = (mesh.size, len(devices))

    def to_global(self, leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list:
        return [
            _rewrap(x, s, self.sizes, self.name)
            if isinstance(x, jax.Array) and x.is_fully_addressable
            else x
            for x, s in zip(leaves, shardings, strict=True)
        ]

    def to_local(self, tree: Any) -> Any:
        def one(x: Any) -> Any:
            if not isinstance(x, jax.Array):
                return x
            sharding = NamedSharding(self.local, x.sharding.spec)  # type: ignore[attr-defined]
            return _rewrap(x, sharding, (self.sizes[1], self.sizes[0]), self.name)

        return jax.tree.map(one, tree)

    def global_shape(self, shape: tuple[int, ...], spec: Any) -> tuple[int, ...]:
        factor = self.sizes[0] // self.sizes[1]
        axes = [*spec, *[None] * (len(shape) - len(spec))]
        return tuple(
            n * factor if a == self.name else n for n, a in zip(shape, axes, strict=True)
        )
