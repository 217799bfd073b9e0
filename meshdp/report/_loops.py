"""How often each computation of a compiled program runs in one call of it."""

import dataclasses
import re
from typing import TypeAlias

from meshdp.report._hlo_text import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often something runs per call of the program.

    `count` is `None` where a loop around it has an unknown trip count. `conditional`: a
    branch encloses it, so `count` is the most there can be. `fused`: it is the inside of a
    fusion, whose intermediate values never reach memory.
    """

    count: int | None
    loop_depth: int
    conditional: bool
    fused: bool = False


@dataclasses.dataclass(frozen=True)
class _Var:
    """Element `index` of the loop's state, plus `offset`."""

    index: int
    offset: int = 0


_Value: TypeAlias = int | _Var | None
_SAME = ("copy", "convert", "bitcast", "reshape", "copy-start", "copy-done")


def runs(module: Module) -> dict[str, Runs]:
    """How often each computation runs, nested loops multiplied out.

    Computations that no instruction runs (the scalar ones of reductions) are left out.
    """
    callers: dict[str, list[tuple[str, Instruction]]] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            for name in instruction.called:
                callers.setdefault(name, []).append((computation.name, instruction))

    found: dict[str, Runs | None] = {module.entry: Runs(1, 0, False)}

    # XLA forbids recursion, and prints callees before their callers, so the walk from a
    # computation up to the entry is finite; it is as deep as the nesting.
    def visit(name: str) -> Runs | None:
        if name not in found:
            total = None
            for caller, instruction in callers.get(name, ()):
                around = visit(caller)
                if around is None:
                    continue
                total = _add(total, _enter(module, caller, instruction, name, around))
            found[name] = total
        return found[name]

    for name in module.computations:
        visit(name)
    return {name: r for name, r in found.items() if r is not None}


def _add(a: Runs | None, b: Runs) -> Runs:
    if a is None:
        return b
    return Runs(
        count=None if a.count is None or b.count is None else a.count + b.count,
        loop_depth=max(a.loop_depth, b.loop_depth),
        conditional=a.conditional or b.conditional,
        fused=a.fused and b.fused,
    )


def _enter(module: Module, caller: str, by: Instruction, name: str, around: Runs) -> Runs:
    count, depth, conditional = around.count, around.loop_depth, around.conditional
    if by.opcode == "while":
        trips = trip_count(module, module.computations[caller], by)
        if trips is not None and name == by.attribute("condition").lstrip("%"):
            trips += 1
        count = None if count is None or trips is None else count * trips
        depth += 1
    return Runs(
        count,
        depth,
        conditional or by.opcode == "conditional",
        around.fused or by.opcode == "fusion",
    )


def trip_count(module: Module, where: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs its body: what XLA says, else start, step and limit.

    Returns `None` where neither tells.
    """
    said = re.search(r'"known_trip_count":\s*\{"n":\s*"?(\d+)', loop.rest)
    if said:
        return int(said[1])
    called = {key: loop.attribute(key).lstrip("%") for key in ("condition", "body")}
    if not all(name in module.computations for name in called.values()):
        return None
    condition, body = (module.computations[called[k]] for k in ("condition", "body"))
    test = _compare(module, condition)
    if test is None:
        return None
    left, direction, right = test
    if isinstance(right, _Var) and isinstance(left, int):
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if not (isinstance(left, _Var) and isinstance(right, int)):
        return None
    step = _element(module, body, body.root, left.index)
    start = _element(module, where, where.by_name.get(loop.operands[0]), left.index)
    if not (isinstance(step, _Var) and step.index == left.index and isinstance(start, int)):
        return None
    return _trips(start + left.offset, step.offset, direction, right)


def _trips(start: int, step: int, direction: str, limit: int) -> int | None:
    if direction in ("LE", "GE"):
        limit += 1 if direction == "LE" else -1
        direction = "LT" if direction == "LE" else "GT"
    if direction == "NE" and step and (limit - start) % step == 0:
        return (limit - start) // step if (limit - start) // step >= 0 else None
    if direction == "LT" and step > 0:
        return max(0, -((start - limit) // step))
    if direction == "GT" and step < 0:
        return max(0, -((limit - start) // -step))
    return None


def _compare(module: Module, condition: Computation):
    """The two sides of the test that ends a loop, in terms of its state."""
    where, root, given = condition, condition.root, None
    while root.opcode in ("fusion", "call") and root.called[0] in module.computations:
        given = [_value(module, where, where.by_name.get(o), given) for o in root.operands]
        where = module.computations[root.called[0]]
        root = where.root
    if root.opcode != "compare":
        return None
    left, right = (_value(module, where, where.by_name.get(o), given) for o in root.operands)
    return left, root.attribute("direction"), right


def _element(module: Module, where: Computation, tuple_: Instruction | None, index: int):
    """One element of a tuple-valued instruction."""
    if tuple_ is None:
        return None
    if tuple_.opcode == "tuple" and index < len(tuple_.operands):
        return _value(module, where, where.by_name.get(tuple_.operands[index]))
    if tuple_.opcode == "copy":
        return _element(module, where, where.by_name.get(tuple_.operands[0]), index)
    if not tuple_.type.startswith("(") and index == 0:
        return _value(module, where, tuple_)
    return None


def _value(
    module: Module,
    where: Computation,
    i: Instruction | None,
    given: list[_Value] | None = None,
) -> _Value:
    """A scalar as a number, or as the loop's state plus a number; `None` if neither.

    `given`: the values of the parameters, inside a fusion or call; a loop's own parameter
    is its state.
    """
    if i is None:
        return None
    of = lambda k: _value(module, where, where.by_name.get(i.operands[k]), given)
    if i.opcode == "constant":
        return int(i.inside) if re.fullmatch(r"-?\d+", i.inside) else None
    if i.opcode == "parameter":
        if given is not None:
            return given[int(i.inside)]
        # A loop over one array has no tuple: its state is the parameter itself.
        return None if i.type.startswith("(") else _Var(0)
    if i.opcode == "get-tuple-element":
        source = where.by_name.get(i.operands[0])
        is_state = source is not None and source.opcode == "parameter" and given is None
        return _Var(int(i.attribute("index"))) if is_state else None
    if i.opcode in _SAME:
        return of(0)
    if i.opcode in ("add", "subtract"):
        return _sum(of(0), of(1), 1 if i.opcode == "add" else -1)
    if i.opcode in ("fusion", "call") and i.called[0] in module.computations:
        inner = module.computations[i.called[0]]
        inputs = [of(k) for k in range(len(i.operands))]
        return _value(module, inner, inner.root, inputs)
    return None


def _sum(a: _Value, b: _Value, sign: int) -> _Value:
    if isinstance(a, int) and isinstance(b, int):
        return a + sign * b
    if isinstance(a, _Var) and isinstance(b, int):
        return _Var(a.index, a.offset + sign * b)
    if isinstance(a, int) and isinstance(b, _Var) and sign == 1:
        return _Var(b.index, b.offset + a)
    return None
