"""Findings as text, JSON, SARIF and GitHub annotations."""

import dataclasses
import json
import pathlib
import urllib.parse
from collections.abc import Callable, Sequence

from compat.migrate._finding import Finding
from compat.migrate._rules import RULES, SEVERITIES

_SARIF_LEVELS = {"breaks": "error", "differs": "warning", "slow": "warning", "old": "note"}
_GITHUB_LEVELS = {"breaks": "error", "differs": "warning", "slow": "warning", "old": "notice"}


@dataclasses.dataclass(frozen=True)
class Placed:
    """A finding with the place that a person looks for."""

    path: str
    cell: int | None
    line: int
    column: int
    """Counted from 1."""
    code: str
    severity: str
    what: str
    do: str
    fixable: bool
    """Whether `fix` can do it, in its default mode."""

    @classmethod
    def of(cls, path: str, cell: int | None, line: int, finding: Finding) -> "Placed":
        rule = finding.rule
        return cls(
            path, cell, line, finding.span[1] + 1, rule.code, rule.severity,
            finding.what, finding.do, bool(finding.edits),
        )  # fmt: skip

    @property
    def where(self) -> str:
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}:{self.column}"


def as_text(findings: Sequence[Placed], files: int) -> str:
    """Three lines for each finding, and a count."""
    lines = []
    for f in findings:
        fix = "fix: python -m compat fix" if f.fixable else "fix: by hand"
        lines += [f"{f.where}: {f.code} {f.severity}: {f.what}", f"    {f.do} ({fix})"]
    counts = [
        f"{sum(f.severity == s for f in findings)} {s}"
        for s in SEVERITIES
        if any(f.severity == s for f in findings)
    ]
    read = f"{files} file{'' if files == 1 else 's'} read"
    if not findings:
        return f"Nothing found; {read}."
    fixable = sum(f.fixable for f in findings)
    noun = "finding" if len(findings) == 1 else "findings"
    lines.append(
        f"{len(findings)} {noun} ({', '.join(counts)}), {fixable} of them fixable; {read}."
    )
    return "\n".join(lines)


def as_json(findings: Sequence[Placed], files: int) -> str:
    """One object: `files` read and `findings`, each with the fields of `Placed`."""
    return json.dumps(
        {"files": files, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2
    )


def as_sarif(findings: Sequence[Placed], files: int) -> str:
    """SARIF 2.1.0, as code hosts read it."""
    del files
    rules = [
        {
            "id": rule.code,
            "shortDescription": {"text": rule.title},
            "defaultConfiguration": {"level": _SARIF_LEVELS[rule.severity]},
        }
        for rule in RULES.values()
    ]
    results = [
        {
            "ruleId": f.code,
            "level": _SARIF_LEVELS[f.severity],
            "message": {"text": _message(f)},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _uri(f.path)},
                        "region": {"startLine": f.line, "startColumn": f.column},
                    }
                }
            ],
        }
        for f in findings
    ]
    driver = {"name": "compat check", "rules": rules}
    return json.dumps(
        {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [
                {
                    "tool": {"driver": driver},
                    "columnKind": "unicodeCodePoints",
                    "results": results,
                }
            ],
        },
        indent=2,
    )


def as_github(findings: Sequence[Placed], files: int) -> str:
    """Workflow commands that GitHub shows beside the lines of a change."""
    del files
    return "\n".join(
        f"::{_GITHUB_LEVELS[f.severity]} file={_escape(f.path, True)},line={f.line},"
        f"col={f.column},title={f.code}::{_escape(_message(f), False)}"
        for f in findings
    )


def _message(finding: Placed) -> str:
    # Neither format has a place for the cell of a notebook, where the line is counted.
    cell = "" if finding.cell is None else f"Cell {finding.cell}: "
    return f"{cell}{finding.what} {finding.do}"


def _uri(path: str) -> str:
    pure = pathlib.PurePath(path)
    return pure.as_uri() if pure.is_absolute() else urllib.parse.quote(pure.as_posix())


def _escape(text: str, is_property: bool) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text


FORMATS: dict[str, Callable[[Sequence[Placed], int], str]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_github,
}
