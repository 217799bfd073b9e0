"""Trees and batches onto a mesh and back, shard by shard.

An array that does not already lie as asked goes by way of host memory: no leaf is ever whole
on a device that does not keep it whole, and nothing is compiled. `jax.device_put` alone slices
on the source device (a program of about 0.1 s per shape), and resharding under `jit` may
replicate an array on its way ("involuntary full rematerialization").
"""

from functools import partial
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from . import _batch, _jaxapi, _move
from ._leaves import Leaves, match, same_specs

BATCH = P(("data", "fsdp"))


@_jaxapi.with_no_mesh_set
def place(tree: Any, shardings: Any, *, share: bool = False) -> Any:
    """Puts every array of a tree onto a mesh, shard by shard.

    With several processes all must call it together, with the same values; a global array
    is taken as what it is.

    **Arguments:**

    - `tree`: any pytree. Arrays (NumPy or JAX, on the host, on one device or on another mesh;
        typed PRNG keys too) are placed, and so are Python numbers, unless they are inside an
        Equinox module, where they are configuration. Every other leaf, flags included, passes
        through untouched.
    - `shardings`: one `NamedSharding` for all, or a pytree of them, which may be a prefix of
        `tree`. `None` leaves what is below it where it is.
    - `share`: by default the result has memory of its own, so donating it does not touch what
        the caller holds, and changing a NumPy array in place does not touch the result. With
        `share=True` arrays already in place are passed through as they are, and others may
        share memory with the argument: faster, for what will not be donated or changed.

    **Returns:**

    The tree with global arrays, committed to the devices of their shardings. It returns when
    NumPy arrays and arrays of other layouts have been read; `shard_batch` does not wait.

    **Raises:**

    - `ValueError`: `shardings` is no prefix of `tree`; a leaf cannot be split as asked; a leaf
        was deleted or donated; processes passed different values. Every such leaf is listed.
    - `TypeError`: a leaf has no value to place (a `jax.ShapeDtypeStruct`, a traced array, an
        array of strings or objects), or something in `shardings` is no sharding.
    """
    leaves = Leaves(tree)
    where = match(shardings, leaves)
    if share and leaves.all_lie(where):
        return tree
    leaves.check(where)
    return leaves.replaced(where, partial(_move.put, share=share))


@_jaxapi.with_no_mesh_set
def reshard(tree: Any, to: Any, *, donate: bool = False) -> Any:
    """Moves a tree of placed arrays to another layout or another mesh.

    The number of devices may change, as when a job goes on with more or fewer of them.

    **Arguments:**

    - `tree`: any pytree, as for `place`.
    - `to`: a pytree of `NamedSharding`s, as for `place`, or a `Mesh` that has the axes of the
        present one: every leaf keeps its spec.
    - `donate`: deletes each array of `tree` as soon as it has been moved, so that about
        1 GiB at a time is held twice, instead of all.

    **Returns:**

    The tree with arrays that share no memory with those it was given.

    **Raises:**

    - As `place`, and `ValueError` if `to` is a mesh and an array has no spec to keep.
    """
    leaves = Leaves(tree)
    where = same_specs(leaves, to) if isinstance(to, Mesh) else match(to, leaves)
    leaves.check(where)
    return leaves.replaced(where, partial(_move.put, donate=donate))


@_jaxapi.with_no_mesh_set
def to_host(tree: Any) -> Any:
    """Brings every array back whole: the inverse of `place`.

    With several processes all must call it together, and each gets all of every array. The
    values then travel in pieces of 8 MiB, so that no device holds an array whole.

    **Arguments:**

    - `tree`: any pytree. NumPy arrays are copied; leaves that are not arrays are kept.

    **Returns:**

    The tree with NumPy arrays that the caller may change. NumPy has no typed PRNG keys, so
    these come back as JAX arrays on the default device.

    **Raises:**

    - `ValueError`: a leaf was deleted or donated. Every such leaf is listed.
    """
    return Leaves(tree, numbers=False).replaced(None, lambda xs, *_: _move.read(xs))


@_jaxapi.with_no_mesh_set
def shard_batch(batch: Any, mesh: Mesh, spec: P = BATCH, *, share: bool = False) -> Any:
    """Splits the rows of a batch, the leading dimension of its leaves, over a mesh.

    NumPy arrays, and arrays on one device where there is one process, are placed without
    waiting for a device, so this can run while the step before is still under way. Arrays of
    other layouts are waited for.

    With several processes each passes its own rows, those for the devices it has, and gets
    the global batch: the rows in the order of the devices in the mesh. Processes whose
    devices hold the same rows (those that split them over `tensor`, say) pass the same rows.
    A call that changes the shapes waits for the other processes, which must change them too;
    no other call does. A leaf that is a global array already is laid out as asked.

    **Arguments:**

    - `batch`: any pytree; leaves are as for `place`. With one process the rows are those of
        the global batch, else those of this process. Scalars are replicated.
    - `mesh`: where to.
    - `spec`: of the leaf with the most dimensions; others are split as far as they have
        dimensions. The first entry splits the rows, further ones the dimensions that follow.
    - `share`: as for `place`.

    **Returns:**

    The batch with global arrays.

    **Raises:**

    - `ValueError`: the rows do not divide over the devices; leaves disagree about them; no
        leaf has any; `spec` names an axis that the mesh does not have, or splits another
        dimension that does not divide; processes disagree. Every such leaf is listed.
    """
    return _batch.shard(batch, mesh, spec, share)


@_jaxapi.with_no_mesh_set
def local_rows(tree: Any) -> Any:
    """Reads the rows that this process has of every array: the inverse of `shard_batch`.

    With one process these are all rows. No process waits for another.

    **Arguments:**

    - `tree`: any pytree of global arrays, such as predictions for a global batch.

    **Returns:**

    The tree with NumPy arrays that the caller may change: of each array the rows (the leading
    dimension) that the devices of this process hold, each once, in their global order.

    **Raises:**

    - `ValueError`: other dimensions are split over several processes, so that this one has no
        whole rows; a leaf was deleted or donated. Every such leaf is listed.
    """
    return Leaves(tree, numbers=False).replaced(None, _batch.local)


def pad_batch(batch: Any, multiple: int) -> tuple[Any, np.ndarray]:
    """Repeats the last row of a batch until the number of rows is a multiple of `multiple`.

    Rows that were really seen are safe to compute with: zeros can be no valid label, divide by
    a zero length or normalise to NaN, and 0 * NaN is NaN, so that a mask would not help.

    ```python
    batch, mask = meshdp.pad_batch(batch, 8)
    meshdp.Mean.of(per_example_loss, mask)
    ```

    **Arguments:**

    - `batch`: any pytree. The leading dimension of its leaves are the rows; scalars and leaves
        that are not arrays stay as they are. With several processes, the rows of this one.
    - `multiple`: the number of devices over which the rows will be split, on this process.

    **Returns:**

    The padded batch, NumPy arrays as NumPy arrays and JAX arrays on their devices, and the
    mask, float32 of shape `[rows]`: 1 for the rows that were there, 0 for the others.

    **Raises:**

    - `ValueError`: there are no rows to repeat; leaves disagree about their number; `multiple`
        is less than 1.
    """
    return _batch.pad(batch, multiple)
