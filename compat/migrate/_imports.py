"""Adds imports once, and finds those that a rewrite has left unused."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from compat.migrate._edits import ChangeImport
from compat.migrate._finding import span
from compat.migrate._scopes import Module


def dotted(cst: Any, node: Any) -> str:
    """The text of a name or a chain of attributes."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(cst, node.value)}.{node.attr.value}"
    return node.value


def import_statement(cst: Any, package: str, names: Sequence[tuple[str, str]]) -> Any:
    """`from package import name as local, ...`, or `import name as local` without package."""
    parts = [name if local in ("", name) else f"{name} as {local}" for name, local in names]
    head = f"from {package} import " if package else "import "
    return cst.parse_statement(head + ", ".join(parts)).body[0]


def add_imports(cst: Any, module: Any, needs: Sequence[str]) -> Any:
    """Adds `import x` (or `import x as y`) for each need that the module does not meet yet.

    They go after the first import of JAX, so that what a script sets up before it (flags,
    environment) still comes first; without one, after the imports at the top.
    """
    have = {
        f"{dotted(cst, alias.name)} as {alias.asname.name.value}"
        if alias.asname is not None
        else dotted(cst, alias.name)
        for line in module.body
        if isinstance(line, cst.SimpleStatementLine)
        for small in line.body
        if isinstance(small, cst.Import)
        for alias in small.names
    }
    new = [n for n in needs if n not in have]
    if not new:
        return module
    body = list(module.body)
    # Whatever the order of the imports, not after the first use.
    roots = {n.split(" ")[-1].split(".")[0] if " as " in n else n for n in new}
    used = [i for i, line in enumerate(body) if _mentions(cst, line, roots)]
    at = min([_place(cst, body), *used])
    lines = [cst.parse_statement(f"import {n}") for n in new]
    return module.with_changes(body=[*body[:at], *lines, *body[at:]])


def _place(cst: Any, body: Sequence[Any]) -> int:
    after = 0
    for root in ("jax", "flax"):
        for place, line in enumerate(body):
            if root in _imported_roots(cst, line):
                return place + 1
    for place, line in enumerate(body):
        if not isinstance(line, cst.SimpleStatementLine):
            continue
        docstring = place == 0 and isinstance(line.body[0], cst.Expr)
        if docstring or _imports_anything(cst, line):
            after = place + 1
    return after


def _mentions(cst: Any, line: Any, wanted: set[str]) -> bool:
    """Whether a statement names one of these, such as `compat` or `jax.extend.core`."""
    found = False

    class Visitor(cst.CSTVisitor):
        def visit_Name(self, node: Any) -> None:
            nonlocal found
            found |= node.value in wanted

        def visit_Attribute(self, node: Any) -> None:
            nonlocal found
            whole = isinstance(node.value, cst.Name | cst.Attribute)
            found |= whole and _text(node) in wanted

        def visit_Import(self, node: Any) -> bool:
            return False

        def visit_ImportFrom(self, node: Any) -> bool:
            return False

    def _text(node: Any) -> str:
        return cst.Module([]).code_for_node(node).replace(" ", "")

    line.visit(Visitor())
    return found


def _imports_anything(cst: Any, line: Any) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and any(
        isinstance(small, cst.Import | cst.ImportFrom) for small in line.body
    )


def _imported_roots(cst: Any, line: Any) -> set[str]:
    """The packages that a statement imports from when it runs."""
    found = []

    class Visitor(cst.CSTVisitor):
        def visit_FunctionDef(self, node: Any) -> bool:
            return False

        def visit_ClassDef(self, node: Any) -> bool:
            return False

        def visit_Import(self, node: Any) -> None:
            found.extend(dotted(cst, a.name) for a in node.names)

        def visit_ImportFrom(self, node: Any) -> None:
            if node.module is not None and not node.relative:
                found.append(dotted(cst, node.module))

    line.visit(Visitor())
    return {name.split(".")[0] for name in found}


def unused_imports(before: str, after: str) -> list[ChangeImport]:
    """Edits of `after` that drop the imports which `before` used and `after` does not."""
    old, new = Module(before), Module(after)
    was_used, is_used = _uses(old), _uses(new)
    edits = []
    for statement in new.tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        for alias in statement.names:
            local = alias.asname or alias.name.split(".")[0]
            gone = local in was_used and local not in is_used
            # A plain `import a.b` also makes `b` known to whoever imports `a`.
            if gone and (alias.asname or "." not in alias.name or local == "jax"):
                edits.append(ChangeImport(span=span(new, statement), old=alias.name))
    return edits


def _uses(module: Module) -> set[str]:
    used = {n.id for n in module.nodes if isinstance(n, ast.Name)}
    for node in module.nodes:
        # Names in `__all__`, in annotations written as text, in doctests.
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            used |= set(re.findall(r"\w+", node.value)) if len(node.value) < 2000 else set()
    return used
