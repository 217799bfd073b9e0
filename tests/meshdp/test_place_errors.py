"""The words of every error of placement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshdp._mesh import make_mesh
from meshdp._place import pad_batch, place, reshard, shard_batch, to_host

VALUE = np.arange(96, dtype=np.float32).reshape(16, 6)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=4, fsdp=2)


def deleted(mesh):
    tree = {"w": place(VALUE, NamedSharding(mesh, P())), "b": VALUE}
    tree["w"].delete()
    return tree


DELETED = """\
Deleted, or donated to a step: 1 leaf:
  ['w']: float32[16, 6]
Use what the step returned, or copy before: meshdp.place(tree, shardings)."""
ODD = {"x": np.ones((30, 4)), "y": np.ones(30)}
UNEVEN = {"x": np.ones((32, 4)), "y": np.ones(30)}
ERRORS = {
    "does_not_divide": (
        lambda mesh: place(
            {"a": np.ones(3), "b": np.ones((4, 5)), "c": VALUE},
            NamedSharding(mesh, P("data")),
        ),
        ValueError,
        """\
1 fault in the specs on a mesh of data=4, fsdp=2:
  ['a']: P('data') splits dimension 0 of shape (3,) over data=4, but 3 % 4 = 3. \
Pad it to 4, split another dimension, or replicate the leaf.""",
    ),
    "no_shardings": (
        lambda mesh: place({"a": VALUE, "b": VALUE}, {"a": P(), "b": None}),
        TypeError,
        """\
shardings must consist of NamedShardings and None:
  shardings['a']: P()
A spec becomes one with a mesh: NamedSharding(mesh, P(...)).""".replace("P()\n", f"{P()!r}\n"),
    ),
    "other_structure": (
        lambda mesh: place({"a": VALUE, "b": [VALUE]}, {"a": None, "c": None}),
        ValueError,
        """\
shardings must have the structure of the tree, or end earlier, with one for all that is below:
  tree['b'][0]: no sharding
  shardings['c']: no leaf""",
    ),
    "other_structure_everywhere": (
        lambda mesh: place([VALUE] * 12, {k: None for k in "abcdefghijklm"}),
        ValueError,
        "shardings must have the structure of the tree, or end earlier, with one for all that "
        "is below:\n"
        + "".join(f"  tree[{i}]: no sharding\n" for i in range(10))
        + "  ... and 2 more leaves\n"
        + "".join(f"  shardings[{k!r}]: no leaf\n" for k in "abcdefghij")
        + "  ... and 3 more shardings",
    ),
    "no_values": (
        lambda mesh: place(
            {
                "a": np.array(["x"]),
                "b": jax.ShapeDtypeStruct((3,), np.float32),
                "c": np.ma.ones(3),
                "d": np.ones(8),
            },
            NamedSharding(mesh, P("data")),
        ),
        TypeError,
        """\
3 leaves cannot be placed:
  ['a']: <U1 is not a dtype of JAX. Turn it into numbers, or take it out.
  ['b']: a shape without a value. Make the value: jax.jit(make, out_shardings=...)().
  ['c']: a masked array. Fill the gaps, x.filled(0), and pass the mask beside it.""",
    ),
    "traced": (
        lambda mesh: jax.jit(lambda x: place([x], NamedSharding(mesh, P())))(VALUE),
        TypeError,
        """\
1 leaf cannot be placed:
  [0]: traced by jit, grad or vmap. Use meshdp.constrain inside, and place outside.""",
    ),
    "deleted_before_place": (
        lambda mesh: place(deleted(mesh), NamedSharding(mesh, P("data"))),
        ValueError,
        DELETED,
    ),
    "deleted_before_to_host": (lambda mesh: to_host(deleted(mesh)), ValueError, DELETED),
    "deleted_before_shard_batch": (
        lambda mesh: shard_batch(deleted(mesh), mesh),
        ValueError,
        DELETED,
    ),
    "no_spec_to_keep": (
        lambda mesh: reshard({"x": VALUE, "y": jnp.ones(4), "n": 1}, mesh),
        ValueError,
        """\
Not on a mesh, so without a spec to keep: 2 leaves:
  ['x']: shape (16, 6), ndarray
  ['y']: shape (4,), SingleDeviceSharding
Give a sharding for each leaf instead of a mesh.""",
    ),
    "rows_do_not_divide": (
        lambda mesh: shard_batch(ODD, mesh),
        ValueError,
        """\
The batch has 30 rows, which do not divide over data*fsdp=8: 30 % 8 = 6.
  ['x']: shape (30, 4)
  ['y']: shape (30,)
Add 2, leave out 6, or pad and mask: batch, mask = meshdp.pad_batch(batch, 8)""",
    ),
    "rows_disagree": (
        lambda mesh: shard_batch(UNEVEN, mesh),
        ValueError,
        """\
The leaves of the batch disagree about the number of rows, their leading dimension:
  ['x']: shape (32, 4)
  ['y']: shape (30,)
Give all the same number; what is not one per example can be a scalar, or be replicated with \
meshdp.place.""",
    ),
    "no_rows": (
        lambda mesh: shard_batch({"x": np.ones(()), "n": 3}, mesh),
        ValueError,
        """\
The batch has no leaf with rows, so there is nothing to split:
  ['n']: shape ()
  ['x']: shape ()
Give leaves a leading dimension, one row for each example, or replicate them with \
meshdp.place.""",
    ),
    "no_leaves": (
        lambda mesh: shard_batch({}, mesh),
        ValueError,
        """\
The batch has no leaf with rows, so there is nothing to split:
  it has no arrays
Give leaves a leading dimension, one row for each example, or replicate them with \
meshdp.place.""",
    ),
    "columns_do_not_divide": (
        lambda mesh: shard_batch(
            {"x": np.ones((32, 3)), "y": np.ones(32)}, mesh, P("data", "fsdp")
        ),
        ValueError,
        """\
1 fault in the specs on a mesh of data=4, fsdp=2:
  ['x']: P('data', 'fsdp') splits dimension 1 of shape (32, 3) over fsdp=2, but 3 % 2 = 1. \
Pad it to 4, split another dimension, or replicate the leaf.""",
    ),
    "other_axes": (
        lambda mesh: shard_batch(VALUE, Mesh(np.array(jax.devices()), ("x",))),
        ValueError,
        f"""\
spec {P(("data", "fsdp"))} names 'data', 'fsdp', but the axes of the mesh are 'x'. \
Name those that split the rows: shard_batch(batch, mesh, P('x')).""",
    ),
    "no_spec": (
        lambda mesh: shard_batch(VALUE, mesh, "data"),
        TypeError,
        (
            "spec is 'data', expected a PartitionSpec whose first entry splits the rows, such "
            'as P(("data", "fsdp")).'
        ),
    ),
    "nothing_to_repeat": (
        lambda mesh: pad_batch({"x": np.ones((0, 3)), "n": 1}, 8),
        ValueError,
        """\
The batch has no rows, so there is none to repeat:
  ['x']: shape (0, 3)
Leave the empty batch out.""",
    ),
    "padding_uneven_leaves": (
        lambda mesh: pad_batch(UNEVEN, 8),
        ValueError,
        """\
The leaves of the batch disagree about the number of rows, their leading dimension:
  ['x']: shape (32, 4)
  ['y']: shape (30,)
Give all the same number; what is not one per example can be a scalar, or be replicated with \
meshdp.place.""",
    ),
    **{
        f"multiple_{m}": (
            lambda mesh, m=m: pad_batch(VALUE, m),
            ValueError,
            (
                f"multiple is {m}, expected the number of devices over which the rows are "
                "split, an integer of at least 1."
            ),
        )
        for m in (0, -8, 2.5, True)
    },
}


@pytest.mark.parametrize("case", ERRORS)
def test_every_error_names_the_leaves_the_sizes_and_a_fix(case, mesh):
    call, kind, words = ERRORS[case]
    with pytest.raises(kind) as e:
        call(mesh)
    assert type(e.value) is kind
    assert str(e.value) == words
