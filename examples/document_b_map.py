"""Document B, step 1 and 2: `pmap(my_function)`, and data put on the devices shard by shard.

Runs in a few seconds on eight forced CPU devices and prints that both styles agree. Nothing
had to be repaired, but `jax.device_put_sharded`, which JAX has removed: `compat` has it.
"""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import compat
import meshdp
from meshdp.testing import force_devices

force_devices(8)


def my_function(x):
    return x * 2


def main():
    devices = jax.devices()
    data = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)

    # Style 1: pmap. One row on each device; the function sees a row.
    parallel_function = compat.pmap(my_function)
    sharded = compat.device_put_sharded(list(data), devices)
    old = parallel_function(sharded)

    # Style 2: mesh. The array says where its rows lie; the function sees the array.
    mesh = meshdp.make_mesh(data=8)
    placed = jax.device_put(data, NamedSharding(mesh, P("data")))
    new = jax.jit(my_function)(placed)

    np.testing.assert_array_equal(old, new)
    assert [s.device for s in old.addressable_shards] == devices
    assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    print(f"{len(devices)} devices, one row each; both styles agree")


if __name__ == "__main__":
    main()
