"""Plain text of a report, and the same for `rich`."""

from collections.abc import Iterator
from typing import Any, TextIO

from meshdp.report._diff import Diff
from meshdp.report._hlo import human_bytes
from meshdp.report._report import Report
from meshdp.report._sections import Section, human, sections


def table_text(s: Section) -> str:
    """Aligned columns: words to the left, numbers to the right."""
    everything = [s.header, *s.rows]
    widths = [max(len(row[k]) for row in everything) for k in range(len(s.header))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if s.is_word(k) else c.rjust(w)
            for k, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in everything
    )


def to_text(report: Report) -> str:
    """The whole report in plain text."""
    blocks = []
    for s in sections(report):
        parts = [s.title + "\n" + "-" * len(s.title), *s.lines]
        if s.rows:
            parts.append(table_text(s))
        parts += [f"{p.caption}\n{p.text}" for p in s.pictures]
        blocks.append("\n".join(parts))
    return "\n\n".join(blocks)


def to_rich(report: Report) -> Iterator[Any]:
    """The same as `rich` renderables; only `rich` itself calls this."""
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    for number, s in enumerate(sections(report)):
        if number == 0:
            yield Panel("\n".join(map(escape, s.lines)), title=escape(s.title), expand=False)
            continue
        yield f"\n[bold cyan]{escape(s.title)}[/]"
        yield from map(escape, s.lines)
        if s.rows:
            table = Table(header_style="bold")
            for k, name in enumerate(s.header):
                table.add_column(name, justify="left" if s.is_word(k) else "right")
            for row in s.rows:
                table.add_row(*map(escape, row))
            yield table
        for p in s.pictures:
            yield f"[dim]{escape(p.caption)}[/]"
            yield escape(p.text)


def show(report: Report, file: TextIO) -> None:
    """Writes the report to a terminal richly, to anything else plainly."""
    if file.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console(file=file).print(report)
            return
    file.write(to_text(report) + "\n")


def diff_text(diff: Diff) -> str:
    """One line for each figure that differs."""
    if not diff.changes:
        return "no difference"
    say = lambda v, unit: (
        "-" if v is None else human_bytes(v) if unit == "B" else human(v, unit)
    )
    rows = []
    for c in diff.changes:
        ratio = f"{c.after / c.before:.2f}x" if c.before and c.after is not None else ""
        rows.append((c.what, say(c.before, c.unit), say(c.after, c.unit), ratio))
    header = ("what", "before", "after", "ratio")
    return table_text(Section(title="", header=header, rows=tuple(rows)))
