"""Reads the text of a compiled program (`compiled.as_text()`); needs no device and no JAX.

The grammar is XLA's `HloModule` text: a header line, tables of source positions, then
computations of one instruction a line. What is not understood is kept as text, never guessed.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import cached_property

_ASSIGN = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_PARENS = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_CALLED = {
    "while": ("condition", "body"),
    "conditional": ("true_computation", "false_computation", "branch_computations"),
    "call": ("to_apply", "calls"),
    "fusion": ("calls",),
    "async-start": ("calls",),
    "custom-call": ("calls", "called_computations"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """Element type in XLA's words (`f32`, `bf16`, `pred`) and the shape on one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def bytes(self) -> int:
        return (self.size * bits(self.dtype) + 7) // 8


def bits(dtype: str) -> int:
    """Bits of one element; 0 for `token` and what is not an array."""
    if dtype == "pred":
        return 8
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 0


def arrays(type_text: str) -> tuple[Array, ...]:
    """Every array of a type, tuples flattened: `(f32[2,8]{1,0}, s32[])` gives two."""
    return tuple(
        # A bounded dynamic dimension is written `<=8`.
        Array(dtype, tuple(int(n.lstrip("<= ")) for n in dims.split(",") if n.strip()))
        for dtype, dims in _ARRAY.findall(type_text)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation. `rest` is everything after the operands, unread."""

    name: str
    opcode: str
    type: str
    inside: str
    rest: str
    is_root: bool

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        text = re.sub(r"/\*.*?\*/", "", self.inside)
        return tuple(o.split()[-1].lstrip("%") for o in _split(text) if o.strip())

    @property
    def arrays(self) -> tuple[Array, ...]:
        return arrays(self.type)

    def attribute(self, key: str) -> str:
        """The text of one attribute, or "" where it is not given.

        Braces and brackets balance, so `{{0,1},{2,3}}` comes back whole.
        """
        start = re.search(rf"(?:^|[ ,]){key}=", self.rest)
        if start is None:
            return ""
        rest, depth = self.rest[start.end() :], 0
        for at, c in enumerate(rest):
            if c in "{[(":
                depth += 1
            elif c in "}])":
                depth -= 1
            elif c == "," and depth == 0:
                return rest[:at]
        return rest

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that this instruction runs (not the scalar ones of a reduction)."""
        text = ",".join(self.attribute(key) for key in _CALLED.get(self.opcode, ()))
        return tuple(re.findall(r"%?([\w.\-]+)", text))

    @property
    def op_name(self) -> str:
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""


class Computation:
    """Instructions in the order written; the last root is what it returns."""

    def __init__(self, name: str, instructions: Sequence[Instruction]):
        self.name = name
        self.instructions = tuple(instructions)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.inside): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def root(self) -> Instruction:
        return next(i for i in reversed(self.instructions) if i.is_root)


@dataclasses.dataclass(frozen=True)
class Frame:
    """One line of somebody's Python."""

    file: str
    line: int
    function: str
    parent: int


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole compiled program."""

    computations: dict[str, Computation]
    entry: str
    num_replicas: int
    num_partitions: int
    frames: dict[int, Frame]
    header: str

    @property
    def main(self) -> Computation:
        return self.computations[self.entry]

    def stack(self, instruction: Instruction) -> Iterator[Frame]:
        """The Python lines that made an instruction, innermost first."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        at = int(found[1]) if found else 0
        while at in self.frames:
            frame = self.frames[at]
            yield frame
            if frame.parent >= at:  # A parent is always written before its child.
                return
            at = frame.parent
        if not found:
            file = re.search(r'source_file="([^"]*)"', instruction.rest)
            line = re.search(r"source_line=(\d+)", instruction.rest)
            if file:
                yield Frame(file[1], int(line[1]) if line else 0, "", 0)


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`.

    **Raises:**

    - `ValueError`: if the text holds no `HloModule`, or no entry computation.
    """
    lines = text.splitlines()
    if not text.startswith("HloModule"):
        raise ValueError(
            "Expected the text of a compiled program, which begins with 'HloModule'; got "
            f"{text[:40]!r}. Pass `compiled.as_text()`, or the compiled step itself."
        )
    computations: dict[str, Computation] = {}
    entry, name, body = "", "", []
    for line in lines:
        if name:
            if line.startswith("}"):
                computations[name] = Computation(name, body)
                name = ""
            elif instruction := _instruction(line):
                body.append(instruction)
        elif line.endswith("{") and (header := _HEADER.match(line)):
            name, body = header[2], []
            entry = name if header[1] else entry
    if not entry:
        raise ValueError("The text names no ENTRY computation: is it cut short?")
    header = lines[0]
    return Module(
        computations=computations,
        entry=entry,
        num_replicas=_header_number(header, "replica_count"),
        num_partitions=_header_number(header, "num_partitions"),
        frames=_frames(lines),
        header=header,
    )


def _header_number(header: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", header)
    return int(found[1]) if found else 1


def _instruction(line: str) -> Instruction | None:
    assign = _ASSIGN.match(line)
    if assign is None:
        return None
    start = assign.end()
    if line[start] == "(":
        stop = _closing(line, start)
    else:
        stop = line.find(" ", start)
    opcode = _OPCODE.match(line, stop)
    if opcode is None:
        return None
    end = _closing(line, opcode.end() - 1)
    return Instruction(
        name=assign[2],
        opcode=opcode[1],
        type=line[start:stop],
        inside=line[opcode.end() : end - 1],
        rest=line[end:],
        is_root=assign[1] is not None,
    )


def _closing(line: str, start: int) -> int:
    """The position just after the bracket that closes the one at `start`."""
    depth = 0
    for found in _PARENS.finditer(line, start):
        if found[0] == "(":
            depth += 1
        elif found[0] == ")":
            depth -= 1
            if depth == 0:
                return found.end()
    return len(line)


def _split(text: str) -> list[str]:
    """Splits at the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for at, c in enumerate(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return parts


def _frames(lines: Sequence[str]) -> dict[int, Frame]:
    """The tables `FileNames`, `FunctionNames`, `FileLocations` and `StackFrames`."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    for line in lines[1:]:
        if line.endswith("{"):
            break
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif found := re.match(r"(\d+) (.*)", line):
            table[int(found[1])] = found[2].strip('"')
    number = lambda text, key: int(found[1]) if (found := re.search(key, text)) else 0
    frames = {
        i: (number(t, r"file_location_id=(\d+)"), number(t, r"parent_frame_id=(\d+)"))
        for i, t in tables.get("StackFrames", {}).items()
    }
    # XLA prints the parent one too high (a frame without parent says 1, itself in the case
    # of frame 1). Should it print 0 for "none" one day, the number is right as it stands.
    shift = 0 if any(parent == 0 for _, parent in frames.values()) else 1
    places = tables.get("FileLocations", {})
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    return {
        i: Frame(
            file=files.get(number(places.get(at, ""), r"file_name_id=(\d+)"), ""),
            line=number(places.get(at, ""), r"\bline=(\d+)"),
            function=functions.get(number(places.get(at, ""), r"function_name_id=(\d+)"), ""),
            parent=parent - shift,
        )
        for i, (at, parent) in frames.items()
    }
