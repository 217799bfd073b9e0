"""What a name stands for, through any style of import.

One pass over the syntax tree records, for every scope, what binds each name. A name that has
several bindings stands for something only if all of them agree.
"""

import ast
import dataclasses
import io
import re
import warnings
from collections.abc import Iterator
from typing import Any

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# A test that asks which JAX this is; what stands under it was written for several versions.
_ASKS_VERSION = re.compile(r"hasattr|getattr|version|TYPE_CHECKING", re.IGNORECASE)
_MISSING = {"ImportError", "ModuleNotFoundError", "AttributeError"}

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """One place that gives a name its meaning."""

    kind: str
    """`import`, `assign`, `def`, `class`, `arg` or `other`."""
    node: ast.AST
    value: Any = None
    """The qualified name of an import; the expression of a plain `name = expression`."""


def parse(source: str) -> ast.Module:
    """`ast.parse`, silent about odd escapes: under `-W error` they would pass for errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


class Scope:
    def __init__(self, node: ast.AST, parent: "Scope | None"):
        self.node = node
        self.parent = parent
        self.names: dict[str, list[Binding]] = {}

    def bind(self, name: str, kind: str, node: ast.AST, value: Any = None) -> None:
        self.names.setdefault(name, []).append(Binding(kind, node, value))


class Module:
    """A parsed module whose names can be asked after.

    **Raises:**

    - `SyntaxError`: if `source` is not Python.
    """

    def __init__(self, source: str):
        self.source = source
        # As Python counts lines: `str.splitlines` also splits at form feeds and the like.
        self.lines = io.StringIO(source, newline=None).read().split("\n")
        self.tree = parse(source)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, Scope] = {}
        self.top = Scope(self.tree, None)
        self.nodes: list[ast.AST] = []
        self._scopes_made: list[Scope] = []
        self._qualified: dict[ast.AST, str | None] = {}
        self._attributes: dict[ast.ClassDef, dict[str, list[ast.AST]]] = {}
        for child in self.tree.body:
            self._visit(child, self.tree, self.top)

    def qualified(self, node: ast.AST) -> str | None:
        """The dotted name that `node` refers to (`jax.tree_map`), or `None`."""
        if node not in self._qualified:
            self._qualified[node] = self._qualify(node, frozenset())
        return self._qualified[node]

    def _qualify(self, node: ast.AST, seen: frozenset[Binding]) -> str | None:
        if isinstance(node, ast.Attribute):
            base = self._qualify(node.value, seen)
            return base and f"{base}.{node.attr}"
        if not isinstance(node, ast.Name):
            return None
        bindings = self.bindings(node)
        found = set()
        for binding in bindings:
            if binding in seen:
                return None
            if binding.kind == "import":
                found.add(binding.value)
            elif _is_none(binding.value):
                continue  # `except ImportError: jax = None`, of which nothing is asked
            elif binding.kind == "assign" and binding.value is not None:
                found.add(self._qualify(binding.value, seen | {binding}))
            else:
                return None
        return found.pop() if len(found) == 1 else None

    def bindings(self, name: ast.Name) -> list[Binding]:
        """Every binding of `name` in the nearest scope that has one."""
        scope: Scope | None = self.scopes.get(name, self.top)
        first = True
        while scope is not None:
            # A class body is invisible from the functions inside it.
            if name.id in scope.names and (first or not isinstance(scope.node, ast.ClassDef)):
                return scope.names[name.id]
            first = False
            scope = scope.parent
        return []

    def only_value(self, node: ast.AST) -> ast.AST:
        """Follows a name that is assigned once to the expression it was assigned."""
        for _ in range(10):
            if not isinstance(node, ast.Name):
                return node
            bindings = self.bindings(node)
            if len(bindings) != 1 or bindings[0].kind != "assign" or bindings[0].value is None:
                return node
            node = bindings[0].value
        return node

    def function(self, node: ast.AST) -> Function | None:
        """The `def` or `lambda` in this module that `node` refers to."""
        node = self.only_value(node)
        if isinstance(node, ast.Lambda):
            return node
        if isinstance(node, ast.Name):
            bindings = self.bindings(node)
            wrapped = self.wrapped(node)
            if wrapped is not None and node in ast.walk(wrapped[1].value):
                return wrapped[0].node  # type: ignore[return-value]
            if len(bindings) == 1 and isinstance(bindings[0].node, _FUNCTIONS):
                return bindings[0].node if bindings[0].kind == "def" else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self.enclosing(node, ast.ClassDef)
            if node.value.id in ("self", "cls") and owner is not None:
                methods = [
                    m
                    for m in owner.body
                    if isinstance(m, ast.FunctionDef) and m.name == node.attr
                ]
                return methods[0] if len(methods) == 1 else None
        return None

    def wrapped(self, name: ast.Name) -> tuple[Binding, Binding] | None:
        """The two bindings of `name` where a `def f` is followed by `f = wrap(f)`."""
        bindings = self.bindings(name)
        if [b.kind for b in bindings] != ["def", "assign"]:
            return None
        inside = ast.walk(bindings[1].value) if bindings[1].value is not None else ()
        again = any(isinstance(n, ast.Name) and n.id == name.id for n in inside)
        return (bindings[0], bindings[1]) if again else None

    def constant(self, node: ast.AST | None) -> Any:
        """The literal `node` stands for, through names assigned once; else `UNKNOWN`."""
        if node is None:
            return UNKNOWN
        try:
            return ast.literal_eval(self.only_value(node))  # type: ignore[arg-type]
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        if isinstance(node, ast.Tuple | ast.List):
            items = tuple(self.constant(item) for item in node.elts)
            return UNKNOWN if UNKNOWN in items else items
        return UNKNOWN

    def name_for(self, dotted: str, at: ast.AST) -> str | None:
        """A name that stands for the import `dotted` at the node `at`, if there is one."""
        scope: Scope | None = self.scopes.get(at, self.top)
        hidden: set[str] = set()
        while scope is not None:
            for name, bindings in scope.names.items():
                imports = {b.value for b in bindings if b.kind == "import"}
                whole = len(bindings) == sum(b.kind == "import" for b in bindings)
                if name not in hidden and whole and imports == {dotted}:
                    return name
            hidden |= set(scope.names)
            scope = scope.parent
        return None

    def is_free(self, name: str) -> bool:
        """Whether nothing in the module binds `name`, so that an import may."""
        return all(name not in scope.names for scope in self._every_scope())

    def _every_scope(self) -> set[Scope]:
        return {self.top, *self._scopes_made}

    def enclosing(self, node: ast.AST, kinds: Any) -> Any:
        """The innermost node of one of these kinds that holds `node`."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, kinds):
            parent = self.parents.get(parent)
        return parent

    def statement(self, node: ast.AST) -> ast.stmt:
        return node if isinstance(node, ast.stmt) else self.enclosing(node, ast.stmt)

    def guarded(self, node: ast.AST) -> bool:
        """Whether the code asks for the JAX version, or catches its absence, around `node`."""
        child, parent = node, self.parents.get(node)
        while parent is not None:
            if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
                if _ASKS_VERSION.search(ast.unparse(parent.test)):
                    return True
            if isinstance(parent, ast.BoolOp) and child in parent.values:
                earlier = parent.values[: parent.values.index(child)]  # type: ignore[arg-type]
                if any(_ASKS_VERSION.search(ast.unparse(value)) for value in earlier):
                    return True
            if isinstance(parent, ast.Call) and child in parent.args:
                if ast.unparse(parent.func) in ("hasattr", "getattr"):
                    return True
            if isinstance(parent, ast.Try) and _catches_missing(parent):
                if child in parent.body or child in parent.handlers:
                    return True
            child, parent = parent, self.parents.get(parent)
        return False

    def class_attributes(self, owner: ast.ClassDef, name: str) -> list[ast.AST]:
        """Every expression assigned to `self.name` in `owner`."""
        if owner not in self._attributes:
            found: dict[str, list[ast.AST]] = {}
            for node in ast.walk(owner):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Attribute) and _is_self(target.value):
                            found.setdefault(target.attr, []).append(node.value)
            self._attributes[owner] = found
        return self._attributes[owner].get(name, [])

    def _visit(self, node: ast.AST, parent: ast.AST, scope: Scope) -> None:
        self.parents[node] = parent
        self.scopes[node] = scope
        self.nodes.append(node)
        outer: list[ast.AST] = []
        inner = scope
        if isinstance(node, _FUNCTIONS):
            if not isinstance(node, ast.Lambda):
                scope.bind(node.name, "def", node)
                outer = [*node.decorator_list, *([node.returns] if node.returns else [])]
            outer += [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
            inner = Scope(node, scope)
        elif isinstance(node, ast.ClassDef):
            scope.bind(node.name, "class", node)
            outer = [*node.decorator_list, *node.bases, *node.keywords]
            inner = Scope(node, scope)
        elif isinstance(node, _COMPREHENSIONS):
            inner = Scope(node, scope)
        else:
            _bind_statement(node, scope, self.top)
        if inner is not scope:
            self._scopes_made.append(inner)
        for child in outer:
            self._visit(child, node, scope)
        for child in ast.iter_child_nodes(node):
            if child not in outer:
                self._visit_argument(child, node, inner)

    def _visit_argument(self, node: ast.AST, parent: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.arguments):
            self.parents[node] = parent
            for arg in _arguments(node):
                scope.bind(arg.arg, "arg", arg)
                self.parents[arg] = parent
                if arg.annotation is not None and scope.parent is not None:
                    self._visit(arg.annotation, parent, scope.parent)
        else:
            self._visit(node, parent, scope)


UNKNOWN: Any = object()
"""What `Module.constant` returns for an expression that is not a literal."""


def _bind_statement(node: ast.AST, scope: Scope, top: Scope) -> None:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                scope.bind(alias.asname, "import", node, alias.name)
            else:
                root = alias.name.split(".")[0]
                scope.bind(root, "import", node, root)
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            name = alias.asname or alias.name
            scope.bind(name, "import", node, f"{module}.{alias.name}")
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                scope.bind(target.id, "assign", node, node.value)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        scope.bind(node.target.id, "assign", node, node.value)
    elif isinstance(node, ast.Global):
        for name in node.names:
            scope.bind(name, "other", node)
            top.bind(name, "other", node)
    elif isinstance(node, ast.Nonlocal | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        for name in getattr(node, "names", None) or [getattr(node, "name", None)]:
            if name:
                scope.bind(name, "other", node)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        while isinstance(scope.node, _COMPREHENSIONS) and scope.parent is not None:
            # A walrus binds outside; binding loop variables there too is only careful.
            scope.bind(node.id, "other", node)
            scope = scope.parent
        if not any(_targets(b.node, node) for b in scope.names.get(node.id, [])):
            scope.bind(node.id, "other", node)


def _is_none(value: Any) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _targets(statement: ast.AST, name: ast.Name) -> bool:
    if isinstance(statement, ast.Assign):
        return name in statement.targets
    return isinstance(statement, ast.AnnAssign) and statement.target is name


def _arguments(args: ast.arguments) -> Iterator[ast.arg]:
    yield from args.posonlyargs
    yield from args.args
    yield from args.kwonlyargs
    yield from (a for a in (args.vararg, args.kwarg) if a is not None)


def _catches_missing(node: ast.Try) -> bool:
    for handler in node.handlers:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        names = {ast.unparse(k) if k is not None else "" for k in kinds}
        if names & _MISSING or (names & {"", "Exception"} and len(node.body) <= 3):
            return True
    return False
