"""The least that weights split over one axis make a loss send, read from its traced program.

Megatron's count (Shoeybi et al., 2019, section 3), for any program: where a product sums over
a split dimension, its result is all-reduced in the forward pass; where it makes one, the
gradient of its other operand is, once for all the products that share that operand. The
traced program is for one device's examples and whole weights; nothing is compiled.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from meshdp import _jaxapi

_SAME_SHAPE = ("convert_element_type", "copy", "reduce_precision", "stop_gradient")


@dataclasses.dataclass(frozen=True)
class _Var:
    """`split`: which dimensions lie over the axis. `grad`: whether a gradient reaches it.
    `base`: what it is a view of, so that two views of one array count once."""

    split: tuple[bool, ...]
    grad: bool
    base: Any

    @property
    def any(self) -> bool:
        return any(self.split)


def tensor_bytes(closed: Any, inputs: Sequence[tuple[tuple[bool, ...], bool]]) -> int:
    """Operand bytes of all the all-reduces that one forward and backward pass needs.

    **Arguments:**

    - `closed`: the jaxpr of the loss.
    - `inputs`: for each input which dimensions are split over the axis, and whether it is
        trained.
    """
    walk = _Walk()
    walk.run(closed, [_Var(split, grad, object()) for split, grad in inputs], 1)
    return walk.bytes


class _Walk:
    def __init__(self):
        self.bytes = 0

    def run(self, program: Any, args: Sequence[_Var], times: int) -> list[_Var]:
        jaxpr, _ = _jaxapi.program(program)
        env: dict[Any, _Var] = dict(zip(jaxpr.invars, args, strict=True))
        reduced: set[Any] = set()

        def read(atom: Any) -> _Var:
            if _jaxapi.is_literal(atom) or atom not in env:
                return _Var((False,) * len(atom.aval.shape), False, object())
            return env[atom]

        for eqn in jaxpr.eqns:
            outs = self.eqn(eqn, [read(a) for a in eqn.invars], times, reduced)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def eqn(self, eqn: Any, given: list[_Var], times: int, reduced: set) -> list[_Var]:
        name = eqn.primitive.name
        shapes = [v.aval.shape for v in eqn.outvars]
        grad = any(v.grad for v in given)
        inner = _jaxapi.subprograms(eqn)
        if name == "scan":
            return self._scan(eqn, given, inner[0], times)
        if name == "cond":
            return self._cond(inner, given[1:], times)
        if inner and name not in ("while", "shard_map", "custom_partitioning"):
            jaxpr, _ = _jaxapi.program(inner[0])
            if len(jaxpr.invars) == len(given):
                outs = self.run(inner[0], given, times)
                return outs[: len(shapes)]
        rule = getattr(self, f"_{name}", None)
        if rule is not None:
            return [rule(eqn, given, times, reduced, grad)]
        if name.startswith(("reduce_", "arg")) and "axes" in eqn.params:
            return [self._reduce(eqn, given, times, grad) for _ in shapes]
        return [self._elementwise(shape, given, grad, name) for shape in shapes]

    def _all_reduce(self, aval: Any, times: int) -> None:
        self.bytes += times * math.prod(aval.shape) * aval.dtype.itemsize

    def _scan(self, eqn, given, body, times):
        num_consts, num_carry = _jaxapi.scan_sizes(eqn)
        before = num_consts + num_carry
        xs = [_Var(v.split[1:], v.grad, object()) for v in given[before:]]
        outs = self.run(body, [*given[:before], *xs], times * eqn.params["length"])
        ys = [dataclasses.replace(v, split=(False, *v.split)) for v in outs[num_carry:]]
        return [*outs[:num_carry], *ys]

    def _cond(self, branches, given, times):
        """The branch that sends least: what the other needs is not always needed."""
        start, results = self.bytes, []
        for branch in branches:
            self.bytes = start
            outs = self.run(branch, given, times)
            results.append((self.bytes, outs))
        self.bytes, outs = min(results, key=lambda r: r[0])
        return outs

    def _elementwise(self, shape, given, grad, name) -> _Var:
        alike = [v for v in given if len(v.split) == len(shape)]
        split = tuple(any(v.split[d] for v in alike) for d in range(len(shape)))
        base = given[0].base if name in _SAME_SHAPE and given else object()
        return _Var(split, grad and name != "stop_gradient", base)

    def _dot_general(self, eqn, given, times, reduced, grad) -> _Var:
        a, b = given
        (a_sum, b_sum), (a_batch, b_batch) = eqn.params["dimension_numbers"]
        out = eqn.outvars[0].aval
        if any(a.split[d] for d in a_sum) or any(b.split[d] for d in b_sum):
            self._all_reduce(out, times)
            return _Var((False,) * len(out.shape), grad, object())
        batch = [a.split[i] or b.split[j] for i, j in zip(a_batch, b_batch, strict=True)]
        free = lambda v, taken: [s for d, s in enumerate(v.split) if d not in taken]
        a_free, b_free = free(a, {*a_sum, *a_batch}), free(b, {*b_sum, *b_batch})
        for atom, v, others in ((eqn.invars[0], a, b_free), (eqn.invars[1], b, a_free)):
            if any(others) and v.grad and not v.any and v.base not in reduced:
                reduced.add(v.base)
                self._all_reduce(atom.aval, times)
        return _Var((*batch, *a_free, *b_free), grad, object())

    def _reduce(self, eqn, given, times, grad) -> _Var:
        v, axes = given[0], set(eqn.params["axes"])
        if any(v.split[d] for d in axes):
            self._all_reduce(eqn.outvars[0].aval, times)
        return _Var(tuple(s for d, s in enumerate(v.split) if d not in axes), grad, object())

    def _gather(self, eqn, given, times, reduced, grad) -> _Var:
        v, numbers, out = given[0], eqn.params["dimension_numbers"], eqn.outvars[0].aval
        if any(v.split[d] for d in numbers.start_index_map):
            self._all_reduce(out, times)
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [s for d, s in enumerate(v.split) if d not in gone]
        kept_dims = [d for d in range(len(v.split)) if d not in gone]
        split = [False] * len(out.shape)
        for at, dim, s in zip(numbers.offset_dims, kept_dims, kept, strict=True):
            split[at] = s and dim not in numbers.start_index_map
        return _Var(tuple(split), grad, object())

    def _transpose(self, eqn, given, times, reduced, grad) -> _Var:
        v = given[0]
        return _Var(tuple(v.split[d] for d in eqn.params["permutation"]), grad, v.base)

    def _squeeze(self, eqn, given, times, reduced, grad) -> _Var:
        v, gone = given[0], eqn.params["dimensions"]
        return _Var(tuple(s for d, s in enumerate(v.split) if d not in gone), grad, v.base)

    def _broadcast_in_dim(self, eqn, given, times, reduced, grad) -> _Var:
        v, out = given[0], eqn.outvars[0].aval.shape
        split = [False] * len(out)
        for d, at in enumerate(eqn.params["broadcast_dimensions"]):
            split[at] = v.split[d]
        same = math.prod(out) == math.prod(eqn.invars[0].aval.shape)
        return _Var(tuple(split), grad, v.base if same else object())

    def _reshape(self, eqn, given, times, reduced, grad) -> _Var:
        v = given[0]
        split = reshaped(v.split, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)
        return _Var(split, grad, v.base)


def reshaped(
    split: Sequence[bool], before: Sequence[int], after: Sequence[int]
) -> tuple[bool, ...]:
    """Where a split dimension goes when dimensions are merged or divided.

    It stays split if it is the slowest of those it is merged with; else it is lost.
    """
    result = [False] * len(after)
    i = j = 0
    while i < len(before) and j < len(after):
        first_i, first_j, a, b = i, j, before[i], after[j]
        while a != b:
            if a < b:
                i += 1
                a *= before[i]
            else:
                j += 1
                b *= after[j]
        real = [d for d in range(first_i, i + 1) if before[d] > 1]
        to = [d for d in range(first_j, j + 1) if after[d] > 1]
        if real and to and split[real[0]]:
            result[to[0]] = True
        i, j = i + 1, j + 1
    return tuple(result)
