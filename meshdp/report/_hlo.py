"""Every collective of a compiled program: axes, bytes, how often, and whose line it is."""

import dataclasses
import os
import sysconfig
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding

from meshdp.report._groups import axes_of, groups, pairs
from meshdp.report._hlo_text import Array, Frame, Instruction, Module, parse
from meshdp.report._loops import Runs, runs
from meshdp.report._trace import Tracer

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class HasText(Protocol):
    """A compiled step: `jax.stages.Compiled`, or anything else with its text."""

    def as_text(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, or one part of a fused one.

    Bytes are per device and for one execution; `count` executions make one call.
    """

    kind: str
    """One of `KINDS`."""

    axes: tuple[str, ...]
    """Mesh axes that it spans, in mesh order. Axes of size 1 are never named."""

    dtype: str
    """Element type in XLA's words: `f32`, `bf16`, `pred`."""

    shape: tuple[int, ...]
    """Shape of the operand on one device; an `all-to-all` given in n pieces is
    `(n, *piece)`."""

    bytes: int
    """Bytes of the operand on one device."""

    sent_bytes: int
    """Bytes that one device sends by the ring formula (for a permute, a device that sends)."""

    count: int | None
    """Executions per call; `None` inside a loop whose trip count is not known. In a branch
    of a conditional it is the most there can be."""

    loop_depth: int
    """How many loops are around it."""

    source: str
    """`file:line` of the caller's own code, or "" where the program does not say."""

    op_name: str
    """What JAX calls the operation: `jit(step)/transpose(jvp())/dot_general`."""

    part: int | None = None
    """Number of the part within a fused collective; `None` if it is alone."""

    group_size: int = 0
    """Devices that take part together; for a permute, 2. Less than the product of the
    axes' sizes where only a part of an axis is spanned."""

    conditional: bool = False
    """Whether it is in a branch that may not run."""

    argument: str = ""
    """The argument of the program that it moves (`params['w']`), "" for what is computed."""

    name: str = ""
    """Name of the instruction in the compiled text. Parts of one collective share it."""

    @property
    def calls(self) -> int | None:
        """Launches per call: as `count`, but a fused collective is launched once."""
        return 0 if self.part else self.count


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Sums over collectives, per device and per call of the program."""

    count: int = 0
    """Launches. A fused collective is one."""

    bytes: int = 0
    """Bytes of the operands."""

    sent_bytes: int = 0
    """Bytes that one device sends by the ring formula."""

    unknown: int = 0
    """Collectives in loops of unknown length; the other three leave them out."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.count + other.count,
            self.bytes + other.bytes,
            self.sent_bytes + other.sent_bytes,
            self.unknown + other.unknown,
        )


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Axis sizes in order, of a `Mesh`, an `AbstractMesh` or a plain mapping."""
    shape = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(shape, Mapping):
        raise TypeError(
            "`mesh` must be a jax.sharding.Mesh, or a mapping such as {'data': 8}; got "
            f"{mesh!r}."
        )
    return {str(name): int(size) for name, size in shape.items()}


def program_text(compiled: HasText | str) -> str:
    """The compiled text of either form."""
    if isinstance(compiled, str):
        return compiled
    if not hasattr(compiled, "as_text"):
        raise TypeError(
            "Expected a compiled step (jax.jit(f).lower(*args).compile()) or its text; got "
            f"{type(compiled).__name__}."
        )
    text = compiled.as_text()
    if text is None:
        raise ValueError("This backend does not give the text of its compiled programs.")
    return text


def collectives(compiled: HasText | str, mesh: Any) -> tuple[Collective, ...]:
    """Lists every collective of a compiled program, in the order of its text.

    Asynchronous pairs count once, fused collectives are split into their parts, and those
    that join no two devices are left out.

    **Arguments:**

    - `compiled`: `jax.jit(f).lower(*args).compile()`, or its `.as_text()`.
    - `mesh`: the mesh it was compiled for. For text alone a mapping such as
        `{"data": 4, "tensor": 2}` will do: positions in the program's device assignment
        are positions in `mesh.devices.flat`, whichever devices these are.

    **Raises:**

    - `ValueError`: if the mesh has not as many devices as the program.
    - `TypeError`: if `compiled` is neither.

    Bytes sent are those of a ring (Thakur, Rabenseifner and Gropp, 2005): of n devices with
    b operand bytes each sends 2(n-1)/n·b for an all-reduce, (n-1)/n·b for a reduce-scatter
    or all-to-all, (n-1)·b for an all-gather, b for a permute or a broadcast.
    """
    module = parse(program_text(compiled))
    return module_collectives(module, mesh_sizes(mesh), positions(compiled, mesh))


def positions(compiled: Any, mesh: Any) -> dict[int, int] | None:
    """Where each device of the program's assignment is in `mesh.devices.flat`.

    Returns `None` where the two agree, or where the program does not say: text knows only
    positions, and a program compiled without named shardings has no mesh to compare with.
    """
    if isinstance(compiled, str) or not isinstance(mesh, Mesh):
        return None
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    if not meshes or not isinstance(meshes[0], Mesh):
        return None
    where = {device: i for i, device in enumerate(mesh.devices.flat)}
    devices = list(meshes[0].devices.flat)
    if devices == list(where):
        return None
    if set(devices) != set(where):
        raise ValueError(
            f"The program runs on devices {sorted(d.id for d in devices)}, the mesh is of "
            f"devices {sorted(d.id for d in where)}. Pass the mesh that the step was "
            "compiled for."
        )
    return {i: where[device] for i, device in enumerate(devices)}


def module_collectives(
    module: Module, sizes: Mapping[str, int], where: Mapping[int, int] | None = None
) -> tuple[Collective, ...]:
    """As `collectives`, for a program that is already parsed; `where` as of `positions`."""
    devices = module.num_replicas * module.num_partitions
    total = 1
    for size in sizes.values():
        total *= size
    found: list[Collective] = []
    tracer = Tracer(module)
    for name, run in runs(module).items():
        computation = module.computations[name]
        for op in computation.instructions:
            kind = _kind(op)
            if kind is None:
                continue
            if devices != total:
                raise ValueError(
                    f"The program runs on {devices} devices, but the mesh {dict(sizes)} has "
                    f"{total}. Pass the mesh that the step was compiled for."
                )
            operands = [
                (array, tracer.argument(computation, o))
                for o in op.operands
                for array in computation.by_name[o].arrays
            ]
            found += _read(module, op, kind, operands, run, sizes, where)
    return tuple(found)


def _kind(op: Instruction) -> str | None:
    # The `-done` half of a pair, and `async-start` itself (whose computation is walked),
    # are not named here: each collective counts once.
    name = op.opcode.removesuffix("-start").removeprefix("ragged-")
    return name if name in KINDS else None


def _read(
    module: Module,
    op: Instruction,
    kind: str,
    operands: list[tuple[Array, str]],
    run: Runs,
    sizes: Mapping[str, int],
    where: Mapping[int, int] | None,
) -> Iterable[Collective]:
    if kind == "collective-permute":
        together = pairs(module, op)
        # The tail of the operands of an in-place permute are offsets, not data.
        operands = operands[:1] if len(op.operands) == 4 else operands
    else:
        together = groups(module, op)
    n = max((len(g) for g in together), default=0)
    if n < 2:
        return
    if where is not None:
        together = [[where[i] for i in group] for group in together]
    if kind == "all-to-all" and not op.opcode.startswith("ragged-") and len(operands) > 1:
        piece, argument = operands[0]
        operands = [(Array(piece.dtype, (len(operands), *piece.shape)), argument)]
    elif op.opcode.startswith("ragged-"):
        operands = operands[:1]
    source = source_line(module, op)
    for number, (array, argument) in enumerate(operands):
        yield Collective(
            kind=kind,
            axes=axes_of(together, sizes),
            dtype=array.dtype,
            shape=array.shape,
            bytes=array.bytes,
            sent_bytes=ring_bytes(kind, array.bytes, n),
            count=run.count,
            loop_depth=run.loop_depth,
            source=source,
            op_name=op.op_name,
            part=number if len(operands) > 1 else None,
            group_size=n,
            conditional=run.conditional,
            argument=argument,
            name=op.name,
        )


def ring_bytes(kind: str, operand_bytes: int, devices: int) -> int:
    """Bytes that each of `devices` sends, rounded up; `operand_bytes` is per device."""
    n, b = devices, operand_bytes
    if kind == "all-reduce":
        return -(-2 * (n - 1) * b // n)
    if kind in ("reduce-scatter", "all-to-all"):
        return -(-(n - 1) * b // n)
    return (n - 1) * b if kind == "all-gather" else b


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_USER = (
    _HERE + os.sep,
    os.path.join(os.path.dirname(_HERE), "compat") + os.sep,
    sysconfig.get_paths()["purelib"] + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
)


def source_line(module: Module, op: Instruction) -> str:
    """The innermost line that is neither ours nor an installed package's, if there is one."""
    stack: list[Frame] = list(module.stack(op))
    theirs = [f for f in stack if not f.file.startswith(_NOT_THE_USER)]
    best = (theirs or stack or [None])[0]
    return f"{best.file}:{best.line}" if best else ""


def by_axis(found: Iterable[Collective]) -> dict[tuple[str, ...], dict[str, Traffic]]:
    """Sums by mesh axes, then by kind; per device and per call of the program."""
    sums: dict[tuple[str, ...], dict[str, Traffic]] = {}
    for c in found:
        kinds = sums.setdefault(c.axes, {})
        kinds[c.kind] = kinds.get(c.kind, Traffic()) + _traffic(c)
    return sums


def total(found: Iterable[Collective]) -> Traffic:
    """The sum over all of them; per device and per call of the program."""
    result = Traffic()
    for c in found:
        result += _traffic(c)
    return result


def _traffic(c: Collective) -> Traffic:
    if c.count is None:
        return Traffic(unknown=0 if c.part else 1)
    return Traffic(c.calls or 0, c.bytes * c.count, c.sent_bytes * c.count)


def human_bytes(n: float) -> str:
    """Three figures and a unit of thousands: `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 999.5 or unit == "TB":
            break
        n /= 1000
    return f"{n:.3g} {unit}"


def table(found: Iterable[Collective]) -> str:
    """A plain-text table of launches and bytes by axis and kind; ends without a newline."""
    found = tuple(found)
    rows = [("axis", "collective", "count", "bytes", "sent/device")]
    lines = [
        ("+".join(axes), kind, t)
        for axes, kinds in by_axis(found).items()
        for kind, t in kinds.items()
    ]
    for axis, kind, t in [*lines, ("total", "", total(found))]:
        count = f"{t.count}" + (f" + {t.unknown}?" if t.unknown else "")
        rows.append((axis, kind, count, human_bytes(t.bytes), human_bytes(t.sent_bytes)))
    widths = [max(len(row[k]) for row in rows) for k in range(5)]
    text = "\n".join(
        "  ".join(
            [c.ljust(w) for c, w in zip(row[:2], widths[:2], strict=True)]
            + [c.rjust(w) for c, w in zip(row[2:], widths[2:], strict=True)]
        )
        for row in rows
    )
    if any(c.count is None for c in found):
        text += "\n?: in a loop of unknown length; its bytes are not in the sums"
    return text
