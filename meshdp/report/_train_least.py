"""The least traffic of a step that `make_train_step` made."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshdp import _jaxapi, _spec, _tree
from meshdp.report._hlo import Collective, ring_bytes
from meshdp.report._least import Least, against
from meshdp.report._tensor_least import tensor_bytes
from meshdp.train import TrainState, TrainStep
from meshdp.train._precision import batch_for, compute_types
from meshdp.train._trains import which

_BATCH_AXES = ("data", "fsdp")


@_jaxapi.with_no_mesh_set
def train_least(step: Any, args: Sequence[Any], found: Sequence[Collective]) -> Least | None:
    """Sets a training step against the least that its mesh and layout allow.

    Returns `None` for any other step: what it must reduce is not known.

    - Over data and fsdp, of n devices, with b the bytes of one device's gradients: 2(n-1)/n·b
      to sum those that are whole, and for what fsdp splits (n-1)/n·b for the sum, once per
      microbatch and once more for each of the two gathers (forward, backward); what data
      adds on top acts on the share that is left.
    - Over tensor: what `tensor_bytes` finds in the traced loss. Rematerialised blocks repeat
      some of it; that is not counted, nor that CPUs sum bfloat16 in float32.
    - Of other axes nothing is worked out.
    """
    if not isinstance(step, TrainStep) or len(args) < 2:
        return None
    state, batch = args[0], args[1]
    if not isinstance(state, TrainState):
        return None
    sizes = {str(a): int(n) for a, n in step.mesh.shape.items()}
    o = step.options
    leaves, specs = _weights(step, state)
    trained = _trained(state.model, o.trains)
    types = compute_types(state.model, o.precision)
    positions = _tree.split(state.model, "model")[1].positions
    computed = [
        jax.ShapeDtypeStruct(x.shape, types[i] or x.dtype)
        for i, x in zip(positions, leaves, strict=True)
    ]
    reduced = None if o.precision is None else o.precision.reduce
    least = {}
    if any(sizes[a] > 1 for a in _BATCH_AXES):
        number = sum(
            _weight_bytes(
                x, dims, sizes, o.accumulate, o.gather, trains=i in trained, reduced=reduced
            )
            for i, (x, dims) in enumerate(zip(computed, specs, strict=True))
        )
        n = sizes["data"] * sizes["fsdp"]
        number += ring_bytes("all-reduce", 8, n)  # the loss and its weight
        axes = tuple(a for a in _BATCH_AXES if sizes[a] > 1)
        least[axes] = number, "gradients summed, split weights gathered twice"
    if sizes["tensor"] > 1 and all(sizes[a] == 1 for a in ("stage", "expert", "seq")):
        operand = _tensor_operand(step, state, batch, computed, specs, trained, sizes)
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


def _trained(model: Any, trains: Any) -> set[int]:
    """Which of the model's arrays train; filters want arrays, where there may be shapes."""
    arrays, structure = _tree.split(model, "model")
    found: list[int] = []
    jax.eval_shape(lambda a: found.extend(which(structure.join(a), trains)), arrays)
    return set(found)


def _weight_bytes(
    x: Any,
    dims: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
    accumulate: int,
    gather: str,
    *,
    trains: bool = True,
    reduced: Any = None,
) -> int:
    """Bytes that one device sends for one weight over data and fsdp.

    `x` has the type that is gathered; `reduced` is that in which gradients are summed over
    what fsdp does not split, by default the same.
    """
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
    if not trains:
        return gathers * each
    left = whole // split * jnp.dtype(reduced or x.dtype).itemsize // x.dtype.itemsize
    return (gathers + scatters) * each + ring_bytes("all-reduce", left, ways)


def _tensor_operand(step, state, batch, weights, specs, trained, sizes) -> int:
    """Operand bytes of the all-reduces over tensor in one call, from the loss itself."""
    o = step.options
    structure = _tree.split(state.model, "model")[1]
    rows, rest = _tree.split(batch, "batch", dynamic=_tree.is_array_or_number)
    parts = sizes["data"] * sizes["fsdp"] * o.accumulate
    flat = [jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype) for x in rows]
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), flat[0].shape[0]))
    carried, carried_structure = _tree.split(state.model_state, "model_state")
    carried = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carried]

    def loss(weights, flat, keys, carried):
        model = structure.join(weights)
        more = (carried_structure.join(carried),) if o.stateful else ()
        out = o.loss_fn(model, rest.join(batch_for(flat, model, o.precision)), keys, *more)
        return jax.tree.leaves(out)

    closed = jax.make_jaxpr(loss)(weights, flat, keys, carried)
    inputs = [
        (tuple("tensor" in d for d in dims), i in trained) for i, dims in enumerate(specs)
    ]
    inputs += [((False,) * x.ndim, False) for x in (*flat, keys, *carried)]
    return o.accumulate * tensor_bytes(closed, inputs)
