"""Which type numbers have: kept, computed with, handed to the loss, summed over devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

# Their scale and shift stay as they are kept: they are few, and rounding them moves every
# activation.
NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Types for mixed precision (Micikevicius et al. 2018).

    `Precision.named("bf16")` and `"f16"` compute in that type and keep the rest in float32.
    """

    params: Any = jnp.float32
    """Of the master weights, and so of the optimizer's state."""

    compute: Any = jnp.float32
    """Of the weights as the loss function gets them, and of the floating-point arrays that the
    model is given when it is called. A model that is no Equinox module, or one without
    `__call__`, cannot be asked: there the batch's floating-point arrays have this type, so
    hand over targets and weights that it cannot hold as integers, and scale them in the loss.
    Weights split over `"fsdp"` are gathered in this type."""

    output: Any = jnp.float32
    """Of what the model returns, if it is an Equinox module that is called; so the loss is
    computed in it. What another kind of model returns has the type it comes with."""

    reduce: Any = jnp.float32
    """In which gradients are added up over devices. That of `compute` halves the bytes."""

    norms: Any = jnp.float32
    """Of the weights of Equinox's normalisation layers and of what they compute; they give
    back the type that they are given."""

    def __post_init__(self):
        problems = []
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            try:
                dtype = jnp.dtype(given)
            except TypeError:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                problems.append(f"  {field.name}: {given!r}")
            else:
                object.__setattr__(self, field.name, dtype)
        if problems:
            raise ValueError(
                "Precision takes floating-point types, such as jnp.bfloat16, but got:\n"
                + "\n".join(problems)
            )

    @staticmethod
    def named(name: str) -> "Precision | None":
        """The policy of a short name; `None` for `"full"`, which leaves every type alone."""
        if name == "full":
            return None
        if name not in ("bf16", "f16"):
            raise ValueError(
                f'precision: {name!r}; it takes "full", "bf16", "f16" or a meshdp.Precision'
            )
        return Precision(compute={"bf16": jnp.bfloat16, "f16": jnp.float16}[name])

    @property
    def scales(self) -> bool:
        """Whether the loss must be scaled, for float16 gradients not to vanish."""
        return self.compute == jnp.float16 or self.reduce == jnp.float16


def is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def compute_types(model: Any, precision: Precision | None) -> list[np.dtype | None]:
    """For each leaf of a model the type to cast it to for the loss, or `None`."""
    if precision is None:
        return [None] * len(jtu.tree_leaves(model))

    def types(node):
        dtype = precision.norms if isinstance(node, NORMS) else precision.compute
        return [dtype if is_float(x) else None for x in jtu.tree_leaves(node)]

    nodes = jtu.tree_leaves(model, is_leaf=lambda x: isinstance(x, NORMS))
    return [t for node in nodes for t in types(node)]


def kept(model: Any, precision: Precision | None) -> Any:
    """The model with its floating-point arrays in the type that is kept."""
    if precision is None:
        return model
    return jax.tree.map(lambda x: x.astype(precision.params) if is_float(x) else x, model)


def _is_called(model: Any) -> bool:
    return isinstance(model, eqx.Module) and callable(model)


def batch_for(batch: Any, model: Any, precision: Precision | None) -> Any:
    """The batch, in the type to compute with where the model cannot see to that itself.

    Targets and masks are rounded with it, so only there.
    """
    if precision is None or _is_called(model):
        return batch
    return _cast(batch, precision.compute)


def as_called(model: Any, precision: Precision | None) -> Any:
    """The model such that its normalisation layers compute in the type of `norms`, and that,
    when it is called, it takes the type of `compute` and returns that of `output`.

    Only Equinox modules can be asked; each becomes one of a subclass that differs in
    `__call__` alone.
    """
    if precision is None:
        return model
    is_norm = lambda x: isinstance(x, NORMS)
    # Equinox itself computes most of these in float32, but not `BatchNorm`.
    norm = lambda x: _twin(x, _computing_in, precision.norms) if is_norm(x) else x
    model = jax.tree.map(norm, model, is_leaf=is_norm)
    if _is_called(model):
        return _twin(model, _taking_and_returning, (precision.compute, precision.output))
    return model


def _cast(tree: Any, dtype: Any) -> Any:
    """Its floating-point arrays in another type, but for the state of stateful layers."""
    is_state = lambda x: isinstance(x, eqx.nn.State)
    cast = lambda x: x.astype(dtype) if is_float(x) else x
    return jax.tree.map(cast, tree, is_leaf=is_state)


def _taking_and_returning(cls, dtypes):
    def call(self, *args, **kwargs):
        args, kwargs = _cast((args, kwargs), dtypes[0])
        return _cast(cls.__call__(self, *args, **kwargs), dtypes[1])

    return call


def _computing_in(cls, dtype):
    def call(self, x, *args, **kwargs):
        out = cls.__call__(self, x.astype(dtype), *args, **kwargs)
        if isinstance(out, tuple):  # and the state of a stateful layer
            return out[0].astype(x.dtype), *out[1:]
        return out.astype(x.dtype)

    return call


def _twin(module: Any, change: Callable, dtype: Any) -> Any:
    cls: Any = type(module)
    twin: Any = object.__new__(_twin_class(cls, change, dtype))
    for field in dataclasses.fields(cls):
        if hasattr(module, field.name):
            object.__setattr__(twin, field.name, getattr(module, field.name))
    return twin


# Kept, as every class of a module is one more pytree node for JAX, for good.
@functools.lru_cache(maxsize=256)
def _twin_class(cls: Any, change: Callable, dtype: Any) -> Any:
    names = {"__call__": change(cls, dtype), "__module__": cls.__module__}
    return type(cls)(cls.__name__, (cls,), names)
