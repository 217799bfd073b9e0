"""The least traffic of a step that `make_train_step` made."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshdp import _spec, _tree
from meshdp.report._hlo import Collective, ring_bytes
from meshdp.report._least import Least, against
from meshdp.report._tensor_least import tensor_bytes
from meshdp.train import TrainState, TrainStep

_BATCH_AXES = ("data", "fsdp")


def train_least(step: Any, args: Sequence[Any], found: Sequence[Collective]) -> Least | None:
    """Sets a training step against the least that its mesh and layout allow.

    Returns `None` for any other step: what it must reduce is not known.

    - Over data and fsdp, of n devices, with b the bytes of one device's gradients: 2(n-1)/n·b
      to sum those that are whole, and for what fsdp splits (n-1)/n·b for the sum, once per
      microbatch and once more for each of the two gathers (forward, backward); what data
      adds on top acts on the share that is left.
    - Over tensor: what `tensor_bytes` finds in the traced loss.
    - Of other axes nothing is worked out.
    """
    if not isinstance(step, TrainStep) or len(args) < 2:
        return None
    state, batch = args[0], args[1]
    if not isinstance(state, TrainState):
        return None
    sizes = {str(a): int(n) for a, n in step.mesh.shape.items()}
    leaves, specs = _weights(step, state)
    least = {}
    if any(sizes[a] > 1 for a in _BATCH_AXES):
        number = sum(
            _weight_bytes(x, dims, sizes, step.options.accumulate, step.options.gather)
            for x, dims in zip(leaves, specs, strict=True)
        )
        n = sizes["data"] * sizes["fsdp"]
        number += ring_bytes("all-reduce", 8, n)  # the loss and its weight
        axes = tuple(a for a in _BATCH_AXES if sizes[a] > 1)
        least[axes] = number, "gradients summed, split weights gathered twice"
    if sizes["tensor"] > 1 and all(sizes[a] == 1 for a in ("stage", "expert", "seq")):
        operand = _tensor_operand(step, state, batch, specs, sizes)
        number = ring_bytes("all-reduce", operand, sizes["tensor"])
        least["tensor",] = number, "activations of each split block, forward and backward"
    return against(found, least)


def _weights(step: TrainStep, state: TrainState):
    """The arrays of the model and the axes that split each dimension."""
    leaves, structure = _tree.split(state.model, "model")
    # `flatten_up_to` keeps the `None` that stands for a leaf that is no array.
    shardings = structure.treedef.flatten_up_to(step.shardings(state).model)
    specs = [shardings[i].spec for i in structure.positions]
    return leaves, [_spec.entries(s, x.ndim) for s, x in zip(specs, leaves, strict=True)]


def _trains(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _weight_bytes(x: Any, dims, sizes, accumulate: int, gather: str) -> int:
    """Bytes that one device sends for one weight over data and fsdp."""
    axes = [a for d in dims for a in d]
    other = math.prod(sizes[a] for a in axes if a not in _BATCH_AXES)
    whole = x.size * x.dtype.itemsize // other
    split = math.prod(sizes[a] for a in axes if a in _BATCH_AXES)
    ways = math.prod(sizes[a] for a in _BATCH_AXES if a not in axes)
    if gather == "step" and accumulate > 1:
        gathers, scatters = 1, 1
    else:
        gathers, scatters = 2 * accumulate, accumulate
    each = ring_bytes("reduce-scatter", whole, split)
    if not _trains(x):
        return gathers * each
    return (gathers + scatters) * each + ring_bytes("all-reduce", whole // split, ways)


def _tensor_operand(step, state, batch, specs, sizes) -> int:
    """Operand bytes of the all-reduces over tensor in one call, from the loss itself."""
    leaves, structure = _tree.split(state.model, "model")
    parts = sizes["data"] * sizes["fsdp"] * step.options.accumulate
    local = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype), batch
    )
    rows = jax.tree.leaves(local)[0].shape[0]
    flat, tree = jax.tree.flatten(local)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    weights = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

    def loss(weights, flat, keys):
        model = structure.join(weights)
        return step.__wrapped__(model, jax.tree.unflatten(tree, flat), keys)

    closed = jax.make_jaxpr(loss)(weights, flat, keys)
    inputs = [
        (tuple("tensor" in d for d in dims), bool(_trains(x)))
        for x, dims in zip(leaves, specs, strict=True)
    ]
    inputs += [((False,) * x.ndim, False) for x in (*flat, keys)]
    return step.options.accumulate * tensor_bytes(closed, inputs)
