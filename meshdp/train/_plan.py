"""How the gradients of one step are computed on a mesh. Pure."""

import dataclasses
from typing import Any

from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How the gradients of one step are computed on a mesh."""

    sizes: tuple[tuple[str, int], ...]
    """Devices along each mesh axis."""
    weights: tuple[P, ...]
    """The spec of each array of the model."""
    trains: tuple[bool, ...]
    """Which arrays of the model get a gradient."""
    grads: tuple[P, ...]
    """The spec that each gradient comes out with: the weight's, or split further."""
    batch: P
    accumulate: int
    types: tuple[Any, ...]
    """The type that each array of the model is computed with, or `None` for its own."""
    layers: tuple[Any, ...]
    """Which layer each array belongs to, where layers are rematerialised."""
    remat: Any
    reduce: Any
    """The type that gradients are summed over devices in, or `None` for their own."""
    stateful: bool
    """Whether the model carries something on from batch to batch."""
    gather: str
    """`"microbatch"` or `"step"`: how often fsdp weights are gathered."""

    @property
    def manual(self) -> frozenset[str]:
        # Axes of one device are manual too: where nothing is left to the compiler's
        # partitioner, it does not run. Not so where another axis is: jax 0.12 aborts when that
        # is then made manual inside (axes in mesh order, see `_jaxapi`). And not for stateful
        # models: `eqx.nn.State` compares the types of old and new values, and with every axis
        # manual those of constants differ from those of results (their sharding).
        batch = ("data", "fsdp")
        alone = not self.stateful and all(n == 1 for a, n in self.sizes if a not in batch)
        return frozenset(a for a, n in self.sizes if a in batch or alone)

    @property
    def trained(self) -> list[P]:
        """The spec of each gradient."""
        return [s for s, t in zip(self.grads, self.trains, strict=True) if t]

    @property
    def reduced(self) -> tuple[str, ...]:
        """The axes over which the batch is split, and so the sums are taken."""
        return tuple(a for a, n in self.sizes if a in ("data", "fsdp") and n > 1)
