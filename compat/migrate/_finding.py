"""A finding: a rule that fired at a place."""

import ast
import dataclasses
from typing import Any

from compat.migrate._edits import Edit, Span
from compat.migrate._maps import Maps
from compat.migrate._renames import Mode
from compat.migrate._rules import RULES, Rule
from compat.migrate._scopes import Module


@dataclasses.dataclass(frozen=True)
class Finding:
    rule: Rule
    span: Span
    what: str
    do: str
    edits: tuple[Edit, ...] = ()
    """What `fix` would do in the mode asked for; empty if it can do nothing."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What every finder gets: the module, its maps, and what is wanted."""

    module: Module
    maps: Maps
    mode: Mode
    version: tuple[int, int]
    """The JAX judged against."""

    def finding(self, code: str, node: ast.AST, *edits: Edit, **fields: Any) -> Finding:
        rule = RULES[code]
        return Finding(
            rule,
            self.span(node),
            rule.what.format(**fields),
            rule.do.format(**fields),
            edits,
        )

    def span(self, node: ast.AST) -> Span:
        return span(self.module, node)

    def reach(self, at: ast.AST, dotted: str, module: str = "") -> tuple[str, tuple[str, ...]]:
        """How to write `dotted` at the node `at`, and the imports that this needs.

        Prefers an import that is there already. `module` is one that must be imported besides.
        """
        root, _, rest = dotted.partition(".")
        extra = (module,) if module else ()
        known = self.module.name_for(root, at)
        if known is not None:
            return f"{known}.{rest}", extra
        if self.module.is_free(root):
            return dotted, extra or (root,)
        return f"_{root}.{rest}", (*extra, f"{root} as _{root}")


def span(module: Module, node: ast.AST) -> Span:
    """Where `node` stands, in characters: `ast` counts bytes."""
    return (
        node.lineno,  # type: ignore[attr-defined]
        _characters(module, node.lineno, node.col_offset),  # type: ignore[attr-defined]
        node.end_lineno,  # type: ignore[attr-defined]
        _characters(module, node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
    )


def _characters(module: Module, line: int, column: int) -> int:
    text = module.lines[line - 1]
    return column if text.isascii() else len(text.encode()[:column].decode())
