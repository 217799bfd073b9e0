"""Flops and memory traffic of a compiled program, with loop bodies as often as they run."""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from meshdp.report._hlo_text import Array, Computation, Instruction, Module
from meshdp.report._loops import trip_count

# One flop an element, as in XLA's own analysis; integers and comparisons are free.
_ELEMENTWISE = frozenset(
    "add subtract multiply divide maximum minimum negate abs power sqrt rsqrt cbrt exponential "
    "exponential-minus-one log log-plus-one logistic tanh tan sine cosine erf atan2 remainder "
    "floor ceil round-nearest-even round-nearest-afz".split()
)
# They move nothing: views, bookkeeping, and callers whose callees are counted.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all while conditional call "
    "opt-barrier partition-id replica-id domain add-dependency async-done async-update "
    "copy-done all-reduce-done all-gather-done collective-permute-done send-done recv-done "
    "optimization-barrier".split()
)
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does in one call of the program."""

    flops: int = 0
    """Floating-point operations; a multiply-add is two."""

    matmul_flops: int = 0
    """Those of matrix products and convolutions alone."""

    recomputed_flops: int = 0
    """Those of matrix products that `jax.checkpoint` does a second time."""

    memory_bytes: int = 0
    """Bytes read and written by every kernel, as if nothing stayed in a cache."""

    unknown_loops: int = 0
    """Loops of unknown length, counted as if they ran once."""

    def __add__(self, other: "Work") -> "Work":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(a + b for a, b in pairs))

    def times(self, n: int) -> "Work":
        return Work(*(n * a for a in dataclasses.astuple(self)))


def work(module: Module) -> Work:
    """Counts flops and bytes per device and call.

    XLA's `cost_analysis` counts a loop's body once; here it counts as often as it runs. Of
    a conditional's branches the one with the most flops counts.
    """
    known: dict[str, Work] = {}

    def cost(name: str, fused: bool) -> Work:
        if name not in module.computations:
            return Work()
        if name not in known:
            where = module.computations[name]
            result = Work()
            for i in where.instructions:
                result += _own(module, where, i, fused) + inside(where, i, fused)
            known[name] = result
        return known[name]

    def inside(where: Computation, i: Instruction, fused: bool) -> Work:
        if not i.called:
            return Work()
        parts = [cost(name, fused or i.opcode == "fusion") for name in i.called]
        if i.opcode == "conditional":
            return max(parts, key=lambda w: (w.flops, w.memory_bytes))
        each = Work()
        for part in parts:
            each += part
        if i.opcode == "while":
            trips = trip_count(module, where, i)
            if trips is None:
                return each + Work(unknown_loops=1)
            return each.times(trips)
        return each

    return cost(module.entry, False)


def _own(module: Module, where: Computation, i: Instruction, fused: bool) -> Work:
    matmul = matmul_flops(where, i)
    again = matmul if "rematted_computation" in i.rest else 0
    flops = matmul + _other_flops(where, i)
    return Work(flops, matmul, again, 0 if fused else _memory_bytes(module, where, i))


def _operands(where: Computation, i: Instruction) -> list[tuple[Array, ...]]:
    return [where.by_name[o].arrays if o in where.by_name else () for o in i.operands]


def matmul_flops(where: Computation, i: Instruction) -> int:
    """Flops of a matrix product or convolution; 0 for anything else."""
    if i.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    given = [a[0] for a in _operands(where, i) if a]
    if i.opcode == "dot":
        contracted = _dims(i.attribute("lhs_contracting_dims"))
        return 2 * i.arrays[0].size * math.prod(given[0].shape[d] for d in contracted)
    target = i.attribute("custom_call_target")
    if i.opcode == "convolution" or ("conv" in target and "dim_labels=" in i.rest):
        left, right, out = given[0], given[1], i.arrays[0]
        # cuDNN's calls for gradients keep the labels of the forward convolution.
        if "BackwardInput" in target:
            left, out = out, left
        elif "BackwardFilter" in target:
            right, out = out, right
        return _convolution_flops(i, left, right, out)
    if "gemm" in target or "matmul" in target:
        # GPU and oneDNN calls keep the dimension numbers of the dot in their configuration.
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.rest)
        contracted = _dims(found[1]) if found else (len(given[0].shape) - 1,)
        return 2 * i.arrays[0].size * math.prod(given[0].shape[d] for d in contracted)
    return 0


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _convolution_flops(i: Instruction, left: Array, right: Array, result: Array) -> int:
    """Two flops for each pair of a real input and a kernel element; padding is free."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", i.attribute("dim_labels"))
    if labels is None:
        return 0
    window = dict(re.findall(r"(\w+)=([\w\-]+)", i.attribute("window")))
    spatial = sorted(c for c in labels[1] if c.isdigit())
    per = lambda key, default: window.get(key, "x".join([default] * len(spatial))).split("x")
    pairs = 1
    for k, c in enumerate(spatial):
        size = right.shape[labels[2].index(c)]
        low = int(per("pad", "0_0")[k].split("_")[0])
        out = result.shape[labels[3].index(c)]
        stride, widen = int(per("stride", "1")[k]), int(per("lhs_dilate", "1")[k])
        at = np.arange(out)[:, None] * stride - low
        at = at + np.arange(size)[None, :] * int(per("rhs_dilate", "1")[k])
        length = left.shape[labels[1].index(c)]
        real = (at >= 0) & (at % widen == 0) & (at // widen < length)
        pairs *= int(real.sum())
    batch = result.shape[labels[3].index("b")]
    features = result.shape[labels[3].index("f")]
    return 2 * batch * features * right.shape[labels[2].index("i")] * pairs


def _other_flops(where: Computation, i: Instruction) -> int:
    if not i.type.startswith(("f", "bf", "c", "(f", "(bf")):
        return 0
    if i.opcode in _ELEMENTWISE:
        return i.arrays[0].size
    if i.opcode == "reduce":
        given = _operands(where, i)
        return max(0, given[0][0].size - i.arrays[0].size) if given and given[0] else 0
    if i.opcode == "reduce-window":
        window = re.search(r"size=([\dx]+)", i.attribute("window"))
        return i.arrays[0].size * math.prod(_dims(window[1])) if window else 0
    return 0


def _memory_bytes(module: Module, where: Computation, i: Instruction) -> int:
    if i.opcode in _FREE:
        return 0
    given = [sum(a.bytes for a in arrays) for arrays in _operands(where, i)]
    out = sum(a.bytes for a in i.arrays)
    if i.opcode in _SLICES:  # It reads what it returns, not the whole operand.
        return 2 * out
    if i.opcode == "dynamic-update-slice":  # In place: the update is read and written.
        return 2 * given[1]
    if i.opcode == "scatter":
        return 3 * given[-1]
    if i.opcode == "async-start":
        return 0
    if i.opcode == "fusion" and i.called and i.called[0] in module.computations:
        return _fusion_bytes(module.computations[i.called[0]], given, out)
    if i.opcode.endswith("-start"):  # Its type repeats the operands.
        return 2 * sum(given)
    return sum(given) + out


def _fusion_bytes(inner: Computation, given: Sequence[int], out: int) -> int:
    """A fusion that slices an operand reads the slice; one that updates it writes that."""
    users: dict[str, list[Instruction]] = {}
    for i in inner.instructions:
        for operand in i.operands:
            users.setdefault(operand, []).append(i)
    total = 0
    for number, parameter in inner.parameters.items():
        uses = users.get(parameter.name, [])
        if uses and all(u.opcode in _SLICES for u in uses):
            total += sum(a.bytes for u in uses for a in u.arrays)
        elif uses and all(
            u.opcode == "dynamic-update-slice" and u.operands[0] == parameter.name for u in uses
        ):
            continue
        elif number < len(given):
            total += given[number]
    root = inner.root
    if root.opcode == "dynamic-update-slice":
        return total + sum(a.bytes for a in inner.by_name[root.operands[1]].arrays)
    return total + out
