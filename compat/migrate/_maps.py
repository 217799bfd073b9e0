"""Which expressions are mapped functions, and what is known about each."""

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any

from compat.migrate._scopes import UNKNOWN, Function, Module

PMAPS = {"jax.pmap", "compat.pmap", "jax.soft_pmap"}
PARTIALS = {"functools.partial", "jax.partial", "jax.tree_util.Partial"}
REPLICATES = {
    "compat.device_put_replicated",
    "compat.device_put_sharded",
    "compat.replicate",
    "flax.jax_utils.replicate",
    "jax.device_put_replicated",
    "jax.device_put_sharded",
}
UNREPLICATES = {"compat.first", "compat.unreplicate", "flax.jax_utils.unreplicate"}
TREE_MAPS = {
    "compat.tree_map",
    "compat.tree_multimap",
    "jax.tree.map",
    "jax.tree_map",
    "jax.tree_multimap",
    "jax.tree_util.tree_map",
    "jax.tree_util.tree_multimap",
}
# Name of each collective with the place of its axis among the positional arguments.
_COLLECTIVES = {
    "all_gather": 1, "all_to_all": 1, "axis_index": 0, "axis_size": 0, "pbroadcast": 1,
    "pmax": 1, "pmean": 1, "pmin": 1, "ppermute": 1, "pshuffle": 1, "psum": 1,
    "psum_scatter": 1, "pswapaxes": 1,
}  # fmt: skip
_SHARD_MAPS = {
    "jax.shard_map",
    "jax.smap",
    "jax.experimental.shard_map.shard_map",
    "jax.experimental.maps.xmap",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Mapped:
    """A function made by `pmap`."""

    node: ast.AST
    """The call, or the decorator, that makes it."""
    callee: ast.expr
    """The expression that names `pmap`."""
    name: str
    """`jax.pmap` or `compat.pmap`."""
    function: Function | None
    """What is mapped, when it is in this module."""
    given: int
    """How many leading arguments a `partial` around the function has already supplied."""
    wrappers: tuple[ast.Call, ...]
    """`vmap(...)`, `jit(...)` and the like around the function."""
    positional: tuple[ast.expr, ...]
    """Arguments of `pmap` after the function."""
    keywords: dict[str, ast.expr]

    def argument(self, name: str) -> ast.expr | None:
        if name == "axis_name" and self.positional:
            return self.positional[0]
        return self.keywords.get(name)

    def axis_name(self, module: Module) -> Any:
        """The literal axis name, `None` without one, or `UNKNOWN`."""
        node = self.argument("axis_name")
        return None if node is None else module.constant(node)

    def devices(self) -> str:
        """The source of `devices=`, or "" for all devices; compares device sets."""
        node = self.keywords.get("devices")
        return "" if node is None else ast.unparse(node)


@dataclasses.dataclass(frozen=True)
class _Partial:
    callee: ast.expr
    args: tuple[ast.expr, ...]
    keywords: dict[str, ast.expr]


class Maps:
    """Answers questions about the mapped functions of one module."""

    def __init__(self, module: Module):
        self.module = module
        self._known: dict[ast.AST, Mapped | None] = {}
        self._all: list[Mapped] | None = None

    def all(self) -> list[Mapped]:
        """Every mapped function that is made anywhere in the module, in order."""
        if self._all is None:
            self._all = self._find_all()
        return self._all

    def _find_all(self) -> list[Mapped]:
        found = []
        for node in self.module.nodes:
            if isinstance(node, ast.Call):
                mapped = self.from_call(node)
                if mapped is not None:
                    found.append(mapped)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                mapped = self.from_decorators(node)
                if mapped is not None:
                    found.append(mapped)
        return found

    def partial(self, node: ast.AST) -> _Partial | None:
        """Reads `partial(f, ...)`, or a name assigned such a call."""
        node = self.module.only_value(node)
        if not (isinstance(node, ast.Call) and node.args):
            return None
        if self.module.qualified(node.func) not in PARTIALS:
            return None
        keywords = {k.arg: k.value for k in node.keywords if k.arg}
        inner = self.partial(node.args[0])
        if inner is not None:
            return _Partial(
                inner.callee, inner.args + tuple(node.args[1:]), inner.keywords | keywords
            )
        return _Partial(node.args[0], tuple(node.args[1:]), keywords)

    def from_call(self, node: ast.Call) -> Mapped | None:
        """Reads `pmap(f, ...)` or `partial(pmap, ...)(f)`."""
        keywords = {k.arg: k.value for k in node.keywords if k.arg}
        args = tuple(node.args)
        callee, name = node.func, self.module.qualified(node.func)
        if name not in PMAPS:
            partial = self.partial(node.func)
            if partial is None:
                return None
            callee, name = partial.callee, self.module.qualified(partial.callee)
            args, keywords = partial.args + args, partial.keywords | keywords
        if name not in PMAPS or not args or isinstance(args[0], ast.Starred):
            return None
        function, given, wrappers = self._function(args[0])
        return Mapped(node, callee, name, function, given, wrappers, args[1:], keywords)

    def from_decorators(self, node: ast.AST) -> Mapped | None:
        """Reads `@pmap` and `@partial(pmap, ...)` above a `def`."""
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        for decorator in node.decorator_list:
            name = self.module.qualified(decorator)
            if name in PMAPS:
                return Mapped(decorator, decorator, name, node, 0, (), (), {})
            partial = self.partial(decorator)
            if partial is not None:
                name = self.module.qualified(partial.callee)
                if name in PMAPS:
                    return Mapped(
                        decorator,
                        partial.callee,
                        name,
                        node,
                        0,
                        (),
                        partial.args,
                        partial.keywords,
                    )
        return None

    def resolve(self, node: ast.AST) -> Mapped | None:
        """The mapped function that `node` stands for, if it is one for certain."""
        if node not in self._known:
            self._known[node] = None  # an answer for whoever comes back here in a circle
            self._known[node] = self._resolve(node)
        return self._known[node]

    def _resolve(self, node: ast.AST) -> Mapped | None:
        if isinstance(node, ast.Call):
            return self.from_call(node)
        if isinstance(node, ast.Name):
            bindings = self.module.bindings(node)
            wrapped = self.module.wrapped(node)
            if wrapped is not None:
                statement = self.module.statement(wrapped[1].node)
                if node.lineno > (statement.end_lineno or statement.lineno):
                    bindings = [wrapped[1]]
            if len(bindings) != 1:
                return None
            if bindings[0].kind == "assign" and bindings[0].value is not None:
                return self.resolve(bindings[0].value)
            return self.from_decorators(bindings[0].node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self.module.enclosing(node, ast.ClassDef)
            if node.value.id == "self" and owner is not None:
                values = self.module.class_attributes(owner, node.attr)
                if len(values) == 1:
                    return self.resolve(values[0])
                method = self.module.function(node)
                return None if values or method is None else self.from_decorators(method)
        return None

    def _function(self, node: ast.expr) -> tuple[Function | None, int, tuple[ast.Call, ...]]:
        """What is mapped: the function, how much a partial has supplied, what is around it."""
        partial = self.partial(node)
        if partial is not None:
            function, given, wrappers = self._function(partial.callee)
            return function, given + len(partial.args), wrappers
        node_ = self.module.only_value(node)
        if isinstance(node_, ast.Call) and node_.args:
            name = self.module.qualified(node_.func)
            if name in ("jax.jit", "jax.vmap", "jax.checkpoint", "jax.remat"):
                function, given, wrappers = self._function(node_.args[0])
                return function, given, (node_, *wrappers)
        return self.module.function(node), 0, ()

    def reached(self, function: Function) -> list[Function]:
        """`function` and every function of this module that it mentions, directly or not."""
        found: list[Function] = [function]
        for current in found:
            for node in ast.walk(current):
                if isinstance(node, ast.Name | ast.Attribute):
                    other = self.module.function(node)
                    if other is not None and other not in found and len(found) < 50:
                        found.append(other)
        return found

    def collectives(self, function: Function) -> Iterator[tuple[ast.Call, str, Any]]:
        """Each collective called in `function`: the call, its name and its literal axis."""
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = self.collective(node)
                if name is not None:
                    yield node, name, self.module.constant(self.axis_of(node))

    def collective(self, node: ast.Call) -> str | None:
        """The name of the collective that `node` calls, such as `pmean`."""
        name = self.module.qualified(node.func) or ""
        package, _, last = name.rpartition(".")
        known = package in ("jax.lax", "compat", "jax._src.lax.parallel")
        return last if known and last in _COLLECTIVES else None

    def axis_of(self, node: ast.Call) -> ast.expr | None:
        """The expression that names the axis of a collective."""
        place = _COLLECTIVES[self.collective(node) or ""]
        if len(node.args) > place:
            return node.args[place]
        return next((k.value for k in node.keywords if k.arg == "axis_name"), None)

    def binds_elsewhere(
        self, mapped: Mapped, functions: list[Function]
    ) -> tuple[set[Any], bool]:
        """Axis names bound in these functions and around them; whether there may be more."""
        names: set[Any] = set()
        for root in (*mapped.wrappers, *functions):
            for node in ast.walk(root):
                if isinstance(node, ast.Call):
                    callee = self.module.qualified(node.func)
                    if callee in _SHARD_MAPS:
                        return names, True
                    values = [k.value for k in node.keywords if k.arg == "axis_name"]
                    if callee in PMAPS:
                        values += node.args[1:2]
                    if self.collective(node) is None:
                        names |= {self.module.constant(v) for v in values}
        return names, UNKNOWN in names


def axes(value: Any) -> tuple[Any, ...]:
    """One axis name or several, as a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)
