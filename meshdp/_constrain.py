"""`constrain`: a layout hint inside a model that holds under every kind of step."""

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
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
        dimensions; `P.UNCONSTRAINED` leaves a dimension to the compiler.

    **Raises:**

    - `TypeError`: if `spec` is no `PartitionSpec`.
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
    automatic = _jaxapi.automatic_axes()
    here, unknown = _over(spec, automatic, set(mesh.axis_names))
    if unknown:
        raise ValueError(
            f"constrain(x, {spec}) names {', '.join(map(repr, unknown))}, but the mesh has the "
            f"axes {', '.join(map(repr, mesh.axis_names))}."
        )
    for leaf in jax.tree.leaves(x):
        if len(spec) > np.ndim(leaf):
            raise ValueError(
                f"constrain(x, {spec}) has {len(spec)} entries, but x has shape "
                f"{np.shape(leaf)}. Give one entry for each dimension; trailing None may be "
                "left out."
            )
    if not automatic:
        return x
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, here), x)


def _over(spec: P, axes: Collection[str], known: Collection[str]) -> tuple[P, list[str]]:
    """The spec over some of the axes, and the axes it names that are not known."""
    free = [entry is P.UNCONSTRAINED for entry in spec]
    plain = P(*(None if f else entry for f, entry in zip(free, spec, strict=True)))
    kept = [tuple(a for a in entry if a in axes) for entry in _spec.entries(plain, len(spec))]
    entries = [P.UNCONSTRAINED if f else k or None for f, k in zip(free, kept, strict=True)]
    return P(*entries), sorted(_spec.axes_of(plain) - set(known))
