"""Rows and columns of devices: a pmap inside a pmap, as the old cookbook had it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, pmap


@partial(pmap, axis_name="rows")
@partial(pmap, axis_name="cols")
def normalize(x):
    row_normed = x / lax.psum(x, "rows")
    col_normed = x / lax.psum(x, "cols")
    doubly_normed = x / lax.psum(x, ("rows", "cols"))
    return row_normed, col_normed, doubly_normed


def main():
    x = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    rows, cols, both = normalize(x)
    # The transposed product: every row of devices holds a block.
    a = np.arange(32, dtype=np.float32).reshape(2, 4, 2, 2)
    products = pmap(lambda block: pmap(lambda m: m @ m.T)(block))(a)
    total = jax.tree_map(jnp.sum, jax.device_get(products))
    return {"rows": rows, "cols": cols, "both": both, "total": total}
