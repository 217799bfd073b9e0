"""Pins the communication of a step in a test: launches by kind and axis, or a golden file."""

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshdp.report._hlo import KINDS, Collective, by_axis, collectives, table
from meshdp.report._report import compile_step, mesh_of_step

WRITE = "MESHDP_GOLDEN"
"""Environment variable: set it to `write` to make or renew golden files."""

Expected = int | Mapping[str | tuple[str, ...], int]


def step_collectives(
    step: Any, args: Sequence[Any] = (), *, mesh: Any = None
) -> tuple[Collective, ...]:
    """Compiles a step for `args` (arrays or shapes; nothing runs) and lists its collectives.

    `step`: a step of ours, a jitted or plain function, or what is compiled already.
    """
    compiled = compile_step(step, args)
    return collectives(compiled, mesh_of_step(step, compiled) if mesh is None else mesh)


def assert_collectives(
    step: Any, args: Sequence[Any] = (), *, mesh: Any = None, **expected: Expected
) -> None:
    """Asserts how many collectives one call of a step launches; kinds not named: none.

    ```python
    assert_collectives(step, (state, batch), all_reduce={"data": 1}, all_gather=12)
    ```

    **Arguments:**

    - `step`, `args`: as for `meshdp.report`: nothing runs, and shapes will do for arrays.
    - `mesh`: needed only where the step does not know it.
    - `expected`: by kind (`all_reduce`, `reduce_scatter`, `all_gather`, `all_to_all`,
        `collective_permute`, `collective_broadcast`) a number of launches per call, loops
        multiplied out, a fused collective counting as one; or such numbers by mesh axis,
        `{"data": 1, ("data", "fsdp"): 2}`, axes not named having none.

    **Raises:**

    - `AssertionError`: if a number differs. All that differ are listed, with a table of
        what there is.
    - `TypeError`: if `expected` names no collective.
    """
    names = {kind.replace("-", "_"): kind for kind in KINDS}
    unknown = sorted(set(expected) - set(names))
    if unknown:
        raise TypeError(
            f"assert_collectives knows no {', '.join(unknown)}; it knows {', '.join(names)}."
        )
    found = step_collectives(step, args, mesh=mesh)
    problems = []
    for name, kind in names.items():
        mine = [c for c in found if c.kind == kind]
        wanted = expected.get(name, 0)
        if any(c.count is None for c in mine):
            problems.append(f"  {name}: some are in a loop of unknown length")
        elif isinstance(wanted, Mapping):
            problems += _by_axis_problems(name, mine, wanted)
        elif wanted != (have := sum(c.calls or 0 for c in mine)):
            problems.append(f"  {name}: expected {wanted}, found {have}")
    if problems:
        raise AssertionError(
            "The step does not communicate as expected:\n"
            + "\n".join(problems)
            + "\nThis is what it does, per device and call:\n"
            + table(found)
        )


def _by_axis_problems(name: str, found: Sequence[Collective], wanted: Mapping) -> list[str]:
    given = {(a,) if isinstance(a, str) else tuple(a): n for a, n in wanted.items()}
    have: dict[tuple[str, ...], int] = {}
    for c in found:
        have[c.axes] = have.get(c.axes, 0) + (c.calls or 0)
    return [
        f"  {name} over {'+'.join(axes)}: expected {given.get(axes, 0)}, "
        f"found {have.get(axes, 0)}"
        for axes in {**given, **have}
        if given.get(axes, 0) != have.get(axes, 0)
    ]


def golden_text(found: Sequence[Collective]) -> str:
    """One line for each axis and kind, sorted: launches and bytes per device and call."""
    lines = []
    for axes, kinds in by_axis(found).items():
        for kind, t in kinds.items():
            line = f"{'+'.join(axes)} {kind}: {t.count} launches, {t.bytes} bytes"
            unknown = f", {t.unknown} in loops of unknown length" if t.unknown else ""
            lines.append(line + unknown)
    return "".join(f"{line}\n" for line in sorted(lines))


def assert_golden(
    step: Any, args: Sequence[Any], path: str | os.PathLike, *, mesh: Any = None
) -> None:
    """Asserts that a step communicates as a golden file says, to the byte.

    The file is text, made to be read in review: one line for each axis and kind. Run the
    test once with `MESHDP_GOLDEN=write` in the environment to make or renew it.

    **Raises:**

    - `AssertionError`: if the file is missing or differs, with the lines that do.
    """
    text = golden_text(step_collectives(step, args, mesh=mesh))
    path = Path(path)
    if os.environ.get(WRITE) == "write":
        path.write_text(text, encoding="utf-8")
        return
    if not path.exists():
        raise AssertionError(
            f"There is no golden file {path.name}. Run this once with {WRITE}=write to make "
            f"it, and look at what it says:\n{text}"
        )
    golden = path.read_text(encoding="utf-8")
    if golden != text:
        lines = difflib.unified_diff(
            golden.splitlines(), text.splitlines(), path.name, "this step", lineterm="", n=0
        )
        raise AssertionError(
            "The step no longer communicates as its golden file says:\n"
            + "\n".join(lines)
            + f"\nIf that is meant, run once with {WRITE}=write and commit the file."
        )
