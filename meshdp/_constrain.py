"""`constrain`: a layout hint inside a model that holds under every kind of step."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from . import _jaxapi, _spec


def constrain(x: Any, spec: P) -> Any:
    """Asks for `x` to be laid out as `spec`, wherever this runs.

    Under a mesh it is `jax.lax.with_sharding_constraint`. Without one it is the identity. The
    axes that are manual where it stands (`"data"` and `"fsdp"` inside `make_train_step`, any
    inside your own `shard_map`) are left out of the spec, since there the array is one
    device's piece already. So one model serves on one device and in both kinds of step.

    **Arguments:**

    - `x`: an array, or a pytree of arrays that all get the same spec.
    - `spec`: a `PartitionSpec` of mesh axes, with at most as many entries as `x` has
        dimensions.

    **Raises:**

    - `ValueError`: if the spec names an axis that the mesh does not have, or is longer than
        the shape.
    """
    if not isinstance(spec, P):
        raise TypeError(
            f"constrain takes a jax.sharding.PartitionSpec, not {spec!r}. "
            'Write meshdp.constrain(x, P(None, "tensor")).'
        )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    unknown = _spec.axes_of(spec) - set(mesh.axis_names)
    if unknown:
        raise ValueError(
            f"constrain(x, {spec}) names {', '.join(map(repr, sorted(unknown)))}, but the mesh "
            f"has the axes {', '.join(map(repr, mesh.axis_names))}."
        )
    spec = _spec.keep(spec, _jaxapi.automatic_axes())
    for leaf in jax.tree.leaves(x):
        if len(spec) > leaf.ndim:
            raise ValueError(
                f"constrain(x, {spec}) has {len(spec)} entries, but x has shape {leaf.shape}. "
                "Give one entry for each dimension; trailing None may be left out."
            )
    if not _jaxapi.automatic_axes():
        return x
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, spec), x)
