"""What `distributed` refuses before it has seen any data."""

import inspect
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from . import _spec, _tree
from ._layout import Layout


def check_step(step: Any) -> None:
    """Refuses what cannot be a step: `step(state, batch, ...)`."""
    if not callable(step) or isinstance(step, Mesh):  # which JAX lets decorate
        raise TypeError(
            f"distributed takes a function step(state, batch, ...), not {describe(step)}. "
            "Options go by name: @meshdp.distributed(mesh=mesh)."
        )
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        raise TypeError(
            f"{step.__qualname__} must be a plain function, so that JAX can trace it."
        )
    if (
        inspect.isfunction(step)
        and next(iter(inspect.signature(step).parameters), "") == "self"
    ):
        raise TypeError(
            f"{step.__qualname__} is a method, and a step has the state as its first argument. "
            "Decorate the bound method, in __init__: "
            f"self.{step.__name__} = meshdp.distributed(self.{step.__name__})."
        )


def check_options(mesh: Any, layout: Any, batch: Any) -> None:
    """Refuses arguments of the wrong type, all at once."""
    problems = []
    if mesh is not None and not isinstance(mesh, Mesh):
        problems.append(f"  mesh: {mesh!r}; it takes a Mesh: meshdp.make_mesh(data=4, fsdp=2)")
    if layout is not None and not isinstance(layout, Layout):
        problems.append(f"  layout: {layout!r}; it takes a Layout: meshdp.fsdp()")
    if not isinstance(batch, P):
        problems.append(f'  batch: {batch!r}; it takes a PartitionSpec: P(("data", "fsdp"))')
    if problems:
        raise TypeError("These options have the wrong type:\n" + "\n".join(problems))
    unknown = set() if mesh is None else _spec.axes_of(batch) - set(mesh.axis_names)
    if mesh is not None and unknown:
        raise ValueError(
            f"batch={batch} names {', '.join(map(repr, sorted(unknown)))}, but the mesh has "
            f"{', '.join(map(repr, mesh.axis_names))}. Take a mesh of meshdp.make_mesh, which "
            f"has every axis, or give batch=P({mesh.axis_names[0]!r})."
        )


def describe(x: Any) -> str:
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    if _tree.is_array(x):
        return f"an array of shape {x.shape}"
    return f"a {type(x).__name__}"
