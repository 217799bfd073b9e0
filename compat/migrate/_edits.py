"""Changes to a source file, as data. `_rewrite` applies them.

Every edit names the node it changes by its place in the source, so that whoever decides (with
`ast`) and whoever writes (with libcst) need share nothing else.
"""

import dataclasses

Span = tuple[int, int, int, int]
"""First line, first column, last line, column after the last; lines from 1, columns from 0, in
characters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    span: Span
    needs: tuple[str, ...] = ()
    """Imports that the new source relies on, `"jax"` or `"compat"` or `"x as y"`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetExpression(Edit):
    """Replaces an expression by `source`."""

    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep(Edit):
    """Replaces an expression by a part of it, at `part`, or by `callee(part)`."""

    part: Span
    callee: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditCall(Edit):
    """Changes the function or the arguments of a call and leaves the rest as it stands."""

    callee: str = ""
    positional: tuple[tuple[int, str], ...] = ()
    """Positional arguments that become keywords: place and keyword."""
    rename: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    add: tuple[tuple[str, str], ...] = ()
    """Keywords to add, with the source of their values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropStatement(Edit):
    """Removes a simple statement; its comments stay."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetStatement(Edit):
    """Replaces a statement by `source`, one line."""

    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeToIf(Edit):
    """Makes `if test: rest` `else: handler` of `try: probe; rest` `except ...: handler`."""

    test: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangeImport(Edit):
    """In the import statement at `span`, imports `new` (dotted) in place of the alias `old`.

    The local name stays. `old` is written as in the statement; an empty `new` drops the alias.
    """

    old: str
    new: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Todo(Edit):
    """Puts `# TODO(meshdp): text`, of one or more lines, above the statement at `span`."""

    text: str
