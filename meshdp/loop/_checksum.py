"""A number for each array that changes when any bit of it does, however it is laid out."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .. import _jaxapi


@_jaxapi.with_no_mesh_set
def checksums(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """For each array a uint32 scalar: the sum modulo 2^32 of its words times odd weights.

    The weight of a word is 2 * (its place in row-major order) + 1, so that a flipped bit and
    two blocks that changed places show. Integers add up alike in any order, so that the
    numbers are the same on any mesh. The arrays must lie on the same devices.
    """
    return _compiled(list(arrays))


@jax.jit
def _compiled(arrays):
    return [_checksum(x) for x in arrays]


def _checksum(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        return _checksum(x.real) + 3 * _checksum(x.imag)
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    for d, n in enumerate(words.shape):
        place = place * jnp.uint32(n) + lax.broadcasted_iota(jnp.uint32, words.shape, d)
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits as uint32, perhaps with one more dimension."""
    if x.dtype == jnp.bool_ or x.dtype.name in ("int2", "uint2", "int4", "uint4"):
        return x.astype(jnp.int32).astype(jnp.uint32)
    size = x.dtype.itemsize
    kind = {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)
    return lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
