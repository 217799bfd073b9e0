"""Where the results of mapped functions go, in one scope at a time.

Statements are read in order, loops twice. A name is known to hold a mapped result from the
assignment that says so until the next one; whatever is not understood is not known.
"""

import ast
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from compat.migrate._finding import Context
from compat.migrate._maps import REPLICATES, TREE_MAPS, UNREPLICATES
from compat.migrate._scopes import Function


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of a value that came out of a map, or was tied to a device."""

    kind: str
    """`mapped`: one row per device; `committed`: tied to a placement that is no such thing."""
    devices: str = ""
    """The source of `devices=`; values of different sources may live apart."""
    why: str = ""
    """For `committed`: how it came to be."""
    parts: tuple[str, ...] = ()
    """For a tuple: the source of each element of the `return`; empty for anything else."""
    array: bool = False
    """Likely one array, because it was reached by a name in a dict, so that `x[0]` is a row."""
    certain: bool = False
    """Certainly one array, because it was computed by an operator."""


Env = dict[str, Value]
Visit = Callable[[ast.AST, Env, "Flow"], None]

_BLOCKS = ("body", "orelse", "finalbody")


class Flow:
    """Follows values through every scope of a module and shows each expression to `visit`."""

    def __init__(self, context: Context, visit: Visit):
        self.context = context
        self.visit = visit
        self.donated: dict[str, ast.AST] = {}
        # Donated by the statement that is being read, whose own arguments are still whole.
        self.pending: dict[str, ast.AST] = {}

    def run(self) -> None:
        module = self.context.module
        self._block(module.tree.body, {})
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.donated = {}
                self._block(node.body, {})

    def _block(self, statements: list[ast.stmt], env: Env) -> None:
        for statement in statements:
            self._statement(statement, env)

    def _statement(self, statement: ast.stmt, env: Env) -> None:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        for expression in own_expressions(statement):
            for node in subexpressions(expression):
                self.visit(node, env, self)
        self.donated |= self.pending
        self.pending = {}
        self._assign(statement, env)
        repeat = isinstance(statement, ast.For | ast.AsyncFor | ast.While)
        if isinstance(statement, ast.For) and isinstance(statement.target, ast.Name):
            env.pop(statement.target.id, None)
        for _ in range(2 if repeat else 1):
            for block in _BLOCKS:
                self._block(getattr(statement, block, []), env)
            for handler in getattr(statement, "handlers", []):
                self._block(handler.body, env)
            for case in getattr(statement, "cases", []):
                self._block(case.body, env)

    def _assign(self, statement: ast.stmt, env: Env) -> None:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                self._bind(target, statement.value, env)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._bind(statement.target, statement.value, env)
        elif isinstance(statement, ast.AugAssign | ast.Delete | ast.For):
            targets = getattr(statement, "targets", None) or [statement.target]  # type: ignore
            for target in targets:
                for node in ast.walk(target):
                    forget(env, key(node), self.donated)

    def _bind(self, target: ast.AST, source: ast.expr, env: Env) -> None:
        value = self.value(source, env)
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(source, ast.Tuple) and len(source.elts) == len(target.elts):
                values = [self.value(s, env) for s in source.elts]
            else:
                values = [part(value, i, len(target.elts)) for i in range(len(target.elts))]
            for name, item in zip(target.elts, values, strict=True):
                self._set(name, item, env)
        else:
            self._set(target, value, env)

    def _set(self, target: ast.AST, value: Value | None, env: Env) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for i, name in enumerate(target.elts):
                self._set(name, part(value, i, len(target.elts)), env)
            return
        name = key(target)
        forget(env, name, self.donated)
        if name and value is not None:
            env[name] = value

    def value(self, node: ast.AST, env: Env) -> Value | None:
        """What is known of the value of `node`."""
        name = key(node)
        if name in env:
            return env[name]
        if isinstance(node, ast.Attribute):
            base = self.value(node.value, env)
            if base is not None and base.kind == "mapped" and not base.parts:
                return Value("mapped", base.devices)  # any tree, a tuple for all we know
            return None
        if isinstance(node, ast.Subscript):
            return self._item(node, env)
        if isinstance(node, ast.Call):
            return self._call(node, env)
        return None

    def _item(self, node: ast.Subscript, env: Env) -> Value | None:
        base = self.value(node.value, env)
        if base is None or base.kind != "mapped":
            return base
        index = self.context.module.constant(node.slice)
        if isinstance(index, str):
            return Value("mapped", base.devices, array=True)
        if base.parts:
            return part(base, index, 0) if isinstance(index, int) else None
        whole = isinstance(node.slice, ast.Slice) and node.slice.lower is node.slice.upper
        if whole or not base.array and not isinstance(node.slice, ast.Slice | ast.Name):
            return None
        return Value("committed", why=f"{ast.unparse(node)}, rows of a mapped result,")

    def _call(self, node: ast.Call, env: Env) -> Value | None:
        module = self.context.module
        mapped = self.context.maps.resolve(node.func)
        if mapped is not None:
            out = module.constant(mapped.argument("out_axes"))
            if mapped.argument("out_axes") is not None and not _is_zero(out):
                return None  # a row of the result is not what one device made
            return Value("mapped", mapped.devices(), parts=_returned(mapped.function))
        name = module.qualified(node.func) or ""
        if name in REPLICATES:
            place = 0 if name in UNREPLICATES else 1
            devices = node.args[place] if len(node.args) > place else None
            source = ast.unparse(devices) if devices is not None else ""
            return Value("mapped", "" if _is_all(source) else source)
        if name in UNREPLICATES or name == "jax.device_get":
            return None
        args = [self.value(a, env) for a in node.args]
        if name in TREE_MAPS and node.args and not is_first_row(node.args[0]):
            return next((a for a in args if a is not None and a.kind == "mapped"), None)
        if name == "jax.device_put" and _names_one_device(self.context, node):
            return Value("committed", why=f"{ast.unparse(node.args[0])}, put on one device,")
        if isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
            return self.value(node.func.value, env)
        if name.startswith(("jax.numpy.", "jax.random.")):
            # What these take is an array, so that an index into it is a row for certain.
            for arg in (a for a in node.args if isinstance(a, ast.Subscript)):
                base = self.value(arg.value, env)
                if base is not None and base.kind == "mapped" and not base.parts:
                    why = f"{ast.unparse(arg)}, a row of a mapped result,"
                    return Value("committed", why=why)
            return next((a for a in args if a is not None and a.kind == "committed"), None)
        return None


def key(node: ast.AST) -> str:
    """`x` for a name, `self.x.y` for a chain of attributes, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = key(node.value)
        return base and f"{base}.{node.attr}"
    return ""


def forget(env: Env, name: str, donated: dict[str, ast.AST]) -> None:
    for known in [k for k in env if k == name or k.startswith(f"{name}.")]:
        del env[known]
    donated.pop(name, None)


def part(value: Value | None, index: int, count: int) -> Value | None:
    """Element `index` of a value that is unpacked into `count` (0: indexed)."""
    if value is None or value.kind != "mapped":
        return None
    if value.parts and (count in (0, len(value.parts)) and index < len(value.parts)):
        tree = ast.parse(value.parts[index], mode="eval").body
        parts = tuple(map(ast.unparse, tree.elts)) if isinstance(tree, ast.Tuple) else ()
        computed = isinstance(tree, ast.BinOp)
        return Value("mapped", value.devices, parts=parts, array=computed, certain=computed)
    return None if value.parts or count == 0 else Value("mapped", value.devices)


def is_first_row(node: ast.AST) -> bool:
    """`lambda x: x[0]`."""
    return (
        isinstance(node, ast.Lambda)
        and len(node.args.args) == 1
        and isinstance(node.body, ast.Subscript)
        and isinstance(node.body.value, ast.Name)
        and node.body.value.id == node.args.args[0].arg
        and isinstance(node.body.slice, ast.Constant)
        and node.body.slice.value == 0
    )


def own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement that are evaluated where it stands."""
    for _, field in ast.iter_fields(statement):
        for item in field if isinstance(field, list) else [field]:
            if isinstance(item, ast.expr):
                yield item
            elif isinstance(item, ast.withitem):
                yield item.context_expr


def subexpressions(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what is evaluated with it, leaving out the bodies of lambdas."""
    yield node
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from subexpressions(child)


def _is_zero(axes: Any) -> bool:
    if isinstance(axes, tuple | list):
        return all(map(_is_zero, axes))
    return axes == 0 and not isinstance(axes, bool)


def _returned(function: Function | None) -> tuple[str, ...]:
    if function is None:
        return ()
    if isinstance(function, ast.Lambda):
        value: ast.AST | None = function.body
    else:
        own = [n for n in _walk_own(function) if isinstance(n, ast.Return)]
        value = own[0].value if len(own) == 1 else None
    return tuple(map(ast.unparse, value.elts)) if isinstance(value, ast.Tuple) else ()


def _walk_own(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _walk_own(child)


def _is_all(source: str) -> bool:
    return source in ("", "jax.devices()", "jax.local_devices()")


def _names_one_device(context: Context, node: ast.Call) -> bool:
    """Whether the second argument of `device_put` is `devices()[i]`."""
    given = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "device")]
    if not given:
        return False
    device = context.module.only_value(given[0])
    if not isinstance(device, ast.Subscript) or isinstance(device.slice, ast.Slice):
        return False
    devices = context.module.only_value(device.value)
    return isinstance(devices, ast.Call) and context.module.qualified(devices.func) in (
        "jax.devices",
        "jax.local_devices",
    )
