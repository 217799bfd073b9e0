"""Which argument of the program a collective moves."""

from meshdp.report._hlo_text import Computation, Instruction, Module

# What only moves or reads data: behind these it is still the same argument, or a part of it.
_MOVES = frozenset(
    "copy convert bitcast reshape transpose slice dynamic-slice copy-start copy-done "
    "optimization-barrier all-gather all-gather-start all-gather-done".split()
)


class Tracer:
    """Follows values back to the arguments of a program."""

    def __init__(self, module: Module):
        self.module = module
        self._callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions:
                for name in instruction.called:
                    self._callers.setdefault(name, []).append((computation, instruction))

    def argument(self, where: Computation, name: str) -> str:
        """JAX's name of the argument that a value is a part of, or "" if it is computed."""
        found = self._parameter(where, where.by_name.get(name))
        while found is not None:
            where, parameter, index = found
            if where.name == self.module.entry:
                return parameter.op_name
            callers = self._callers.get(where.name, [])
            if len(callers) != 1:
                return ""
            caller, by = callers[0]
            operand = caller.by_name.get(self._operand(by, where, parameter))
            if by.opcode == "while" and index is None and where.root is not parameter:
                return ""
            if index is not None:
                if operand is None or operand.opcode != "tuple":
                    return ""
                # What a loop changes as it runs is no longer the argument.
                if by.opcode == "while" and not self._kept(where, parameter, index):
                    return ""
                operand = caller.by_name.get(operand.operands[index])
            found = self._parameter(caller, operand)
        return ""

    @staticmethod
    def _operand(by: Instruction, inner: Computation, parameter: Instruction) -> str:
        number = int(parameter.inside)
        if by.opcode == "conditional":
            number = by.called.index(inner.name) + 1
        return by.operands[number] if number < len(by.operands) else ""

    @staticmethod
    def _kept(body: Computation, parameter: Instruction, index: int) -> bool:
        root = body.root
        if root.opcode != "tuple":
            return False
        last = body.by_name.get(root.operands[index])
        return (
            last is not None
            and last.opcode == "get-tuple-element"
            and last.operands[0] == parameter.name
            and last.attribute("index") == str(index)
        )

    def _parameter(
        self, where: Computation, i: Instruction | None
    ) -> tuple[Computation, Instruction, int | None] | None:
        """The parameter of its computation that a value is read from, and its element."""
        while i is not None:
            if i.opcode == "parameter":
                return where, i, None
            source = where.by_name.get(i.operands[0]) if i.operands else None
            if i.opcode == "get-tuple-element":
                if source is None or source.opcode != "parameter":
                    return None
                return where, source, int(i.attribute("index"))
            if i.opcode in _MOVES:
                i = source
            elif i.opcode in ("fusion", "call") and i.called:
                inner = self.module.computations.get(i.called[0])
                found = self._parameter(inner, inner.root) if inner else None
                if found is None or found[2] is not None or found[0] is not inner:
                    return None
                number = int(found[1].inside)
                i = where.by_name.get(i.operands[number])
            else:
                return None
        return None
