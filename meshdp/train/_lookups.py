"""Which values of a batch a loss uses as indices, found in its traced program.

An index out of range is no error in JAX: it gives NaN, the nearest entry, one counted from the
end, or zeros from `one_hot`. So labels that do not fit the classes would train, on garbage.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _jaxapi
from ._sharded import VIEWS


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A use of a batch's values as indices from 0 to `size - 1`."""

    leaf: int
    """Which array of the batch."""
    size: int
    read: Callable = dataclasses.field(compare=False)
    """From the array to those of its values that are used..."""
    times: int = dataclasses.field(default=1, compare=False)
    """...each so many times."""

    def outside(self, x: Any) -> jax.Array:
        """How many of the values used are out of range, as float32."""
        i = self.read(x)
        if i.dtype.itemsize < 4:
            i = i.astype(jnp.int32)
        return ((i < 0) | (i >= self.size)).sum(dtype=jnp.float32) / self.times


# What runs the program inside it once, on the same arguments.
PLAIN = ("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2")
PLAIN += ("custom_jvp_call", "custom_vjp_call")


# What a variable of the program is known to be.


@dataclasses.dataclass(frozen=True, eq=False)
class _Index:
    """Values of one array of the batch, moved about only."""

    leaf: int
    read: Callable
    times: int = 1
    wraps: bool = False
    """Whether what is below 0 then counts from the end; `read` is before that."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Below:
    index: _Index


@dataclasses.dataclass(frozen=True, eq=False)
class _Shifted:
    index: _Index


@dataclasses.dataclass(frozen=True, eq=False)
class _Several:
    """One index for each of several dimensions, or `None` for what is none of ours."""

    indices: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Counting:
    """0, 1, 2, ... along a dimension of this size."""

    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class _IsEqual:
    index: _Index
    size: int


def lookups(closed: Any, first: int, count: int) -> list[Lookup]:
    """The lookups by any of the arguments `first` to `first + count - 1` of a program.

    Loops are entered where they scan over the batch; branches, `while` and `shard_map` are not.
    """
    given = [None] * first + [_Index(i, lambda x: x) for i in range(count)]
    found: dict[Any, Lookup] = {}
    rest = len(_jaxapi.program(closed)[0].invars) - len(given)
    _walk(closed, given + [None] * rest, found)
    return list(found.values())


def _walk(closed, given: Sequence[Any], found: dict[Any, Lookup]) -> list[Any]:
    """Follows a program's arguments, of which these are known, to its results."""
    jaxpr, _ = _jaxapi.program(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))
    known = lambda a: None if _jaxapi.is_literal(a) else env.get(a)
    for eqn in jaxpr.eqns:
        values = [known(a) for a in eqn.invars]
        name = eqn.primitive.name
        if name == "iota":
            outs = [_Counting(eqn.params["shape"][eqn.params["dimension"]])]
        elif not any(v is not None for v in values):
            continue
        elif name == "scan":
            outs = _scan(eqn, values, found)
        elif name in ("gather", "dynamic_slice"):
            _look(eqn, values, found)
            outs = [_view(eqn, values)]
        elif name in PLAIN and len(inner := _jaxapi.subprograms(eqn)) == 1:
            outs = _inside(inner[0], values, found)
        else:
            outs = [_result(eqn, values, found)]
        env.update(zip(eqn.outvars, outs, strict=False))
    return [known(a) for a in jaxpr.outvars]


def _inside(closed, values, found):
    if len(_jaxapi.program(closed)[0].invars) != len(values):
        return []
    return _walk(closed, values, found)


def _scan(eqn, values, found) -> list[Any]:
    consts, carry = _jaxapi.scan_sizes(eqn)
    before = consts + carry
    mine = [
        _Index(i, lambda x: x) if isinstance(v, _Index) and not consts <= i < before else None
        for i, v in enumerate(values)
    ]
    inner: dict[Any, Lookup] = {}
    _walk(eqn.params["jaxpr"], mine, inner)
    for key, lookup in inner.items():
        outer = values[lookup.leaf]
        read = jax.vmap(lookup.read) if lookup.leaf >= before else lookup.read
        index = _Index(outer.leaf, _then(outer.read, read), outer.times * lookup.times)
        _add(found, index, lookup.size, key)
    return []


def _add(found, index: _Index, size: int, key: Any = None) -> None:
    key = (index.leaf, size, key or index.read)
    found.setdefault(key, Lookup(index.leaf, size, index.read, index.times))


def _then(first: Callable, second: Callable) -> Callable:
    return lambda x: second(first(x))


def _look(eqn, values, found) -> None:
    """Notes the dimensions that are looked up by values of the batch."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    if eqn.primitive.name == "dynamic_slice":
        dims, indices = range(len(shape)), values[1:]
    else:
        dims = eqn.params["dimension_numbers"].start_index_map
        indices = values[1].indices if isinstance(values[1], _Several) else values[1:]
        if len(dims) != len(indices) or _fills(eqn):
            return
    for d, index in zip(dims, indices, strict=True):
        if not isinstance(index, _Index) or (_clips(eqn) and not index.wraps):
            continue
        _add(found, index, shape[d] - sizes[d] + 1)


def _clips(eqn) -> bool:
    """Whether it was asked for the nearest entry: `mode="clip"` does not count from the end."""
    return eqn.params.get("mode") in (lax.GatherScatterMode.CLIP, None)


def _fills(eqn) -> bool:
    """Whether it was asked for another number in place of what is out of range."""
    value = eqn.params["fill_value"]
    filled = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP and value is not None
    return filled and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact) and value == value


def _result(eqn, values, found) -> Any:
    name, first = eqn.primitive.name, values[0]
    last = values[-1]
    if name == "lt" and isinstance(first, _Index) and _literal(eqn.invars[1]) == 0:
        return _Below(first)
    if name == "add" and isinstance(first, _Index) and _literal(eqn.invars[1]) is not None:
        return _Shifted(first)
    if name == "select_n" and len(values) == 3 and isinstance(first, _Below):
        index = first.index
        if values[1] is index and isinstance(last, _Shifted) and last.index is index:
            return dataclasses.replace(index, wraps=True)
    if name == "concatenate" and eqn.params["dimension"] == eqn.outvars[0].aval.ndim - 1:
        if all(a.aval.shape[-1] == 1 for a in eqn.invars):
            return _Several(tuple(values))
    if name == "eq" and len(values) == 2:
        for a, b in (values, values[::-1]):
            if isinstance(a, _Index) and isinstance(b, _Counting):
                return _IsEqual(a, b.size)
    if name == "convert_element_type" and isinstance(first, _IsEqual):
        if jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact):
            _add(found, first.index, first.size)
        return None
    return _view(eqn, values)


def _view(eqn, values) -> Any:
    """What only moves an index about gives an index."""
    first, rest = values[0], eqn.invars[1:]
    if eqn.primitive.name not in VIEWS or not all(map(_jaxapi.is_literal, rest)):
        return None
    shape = eqn.outvars[0].aval.shape
    if isinstance(first, _Counting):
        return first if first.size in shape else None
    if not isinstance(first, _Index):
        return None
    literals = [a.val for a in rest]
    apply = lambda x: _jaxapi.bind(eqn, [x, *literals])[0]
    times = first.times
    if eqn.primitive.name == "broadcast_in_dim":
        times *= max(1, math.prod(shape)) // max(1, math.prod(eqn.invars[0].aval.shape))
    return dataclasses.replace(first, read=_then(first.read, apply), times=times)


def _literal(atom) -> Any:
    return atom.val if _jaxapi.is_literal(atom) else None


def outside(found: Sequence[Lookup], rows: Sequence[Any]) -> Any:
    """How many values of each lookup are out of range; `None` if there is no lookup."""
    if not found:
        return None
    return jnp.stack([lookup.outside(rows[lookup.leaf]) for lookup in found])
