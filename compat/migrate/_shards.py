"""Recognises the expressions that add a device dimension to a value."""

import ast

from compat.migrate._finding import Context
from compat.migrate._maps import REPLICATES, TREE_MAPS

_SHARDS = {"compat.shard", "flax.training.common_utils.shard"}
_COUNTS = {"jax.device_count", "jax.local_device_count"}
_DEVICES = {"jax.devices", "jax.local_devices"}


def replicated_part(context: Context, node: ast.AST) -> ast.expr | None:
    """`x` in `replicate(x)`, over all devices."""
    if not (isinstance(node, ast.Call) and node.args and not node.keywords):
        return None
    name = context.module.qualified(node.func) or ""
    if name not in REPLICATES or name.endswith("device_put_sharded"):
        return None
    devices = node.args[1:]
    return node.args[0] if all(_is_all_devices(context, d) for d in devices) else None


def sharded_part(context: Context, node: ast.AST) -> ast.expr | None:
    """`x` in what splits the leading dimension of `x` over all devices.

    That is `shard(x)`; `x.reshape((n, -1) + x.shape[1:])` and its like; a `tree_map` of that;
    and a call of a function of this module that does nothing else.
    """
    if not isinstance(node, ast.Call):
        return None
    name = context.module.qualified(node.func)
    if name in _SHARDS and len(node.args) == 1:
        return node.args[0]
    if name in TREE_MAPS and len(node.args) == 2:
        mapped = context.module.function(node.args[0])
        return node.args[1] if _splits_its_argument(context, mapped) else None
    if isinstance(node.func, ast.Attribute) and node.func.attr == "reshape":
        return node.func.value if _is_a_split(context, node) else None
    function = context.module.function(node.func)
    if function is not None and len(node.args) == 1 and not node.keywords:
        return node.args[0] if _splits_its_argument(context, function) else None
    return None


def _splits_its_argument(context: Context, function: ast.AST | None) -> bool:
    if not isinstance(function, ast.FunctionDef | ast.Lambda) or len(function.args.args) != 1:
        return False
    value: ast.AST | None = None
    if isinstance(function, ast.Lambda):
        value = function.body
    else:
        body = [s for s in function.body if not _is_docstring(s)]
        if len(body) == 1 and isinstance(body[0], ast.Return) and not function.decorator_list:
            value = body[0].value
    if value is None:
        return False
    part = sharded_part(context, value)
    return isinstance(part, ast.Name) and part.id == function.args.args[0].arg


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_a_split(context: Context, node: ast.Call) -> bool:
    """`x.reshape((n, -1) + x.shape[1:])` or `x.reshape(n, -1, *x.shape[1:])`."""
    assert isinstance(node.func, ast.Attribute)
    rest = ast.unparse(node.func.value) + ".shape[1:]"
    head: list[ast.expr] = []
    if len(node.args) == 1:
        shape = node.args[0]
        if isinstance(shape, ast.BinOp) and isinstance(shape.op, ast.Add):
            if isinstance(shape.left, ast.Tuple) and ast.unparse(shape.right) == rest:
                head = shape.left.elts
        elif isinstance(shape, ast.Tuple):
            head = _before_star(shape.elts, rest)
    else:
        head = _before_star(node.args, rest)
    return len(head) == 2 and _is_device_count(context, head[0])


def _before_star(items: list[ast.expr], rest: str) -> list[ast.expr]:
    if items and isinstance(items[-1], ast.Starred):
        if ast.unparse(items[-1].value) == rest:
            return items[:-1]
    return []


def _is_device_count(context: Context, node: ast.expr) -> bool:
    value = context.module.only_value(node)
    if not isinstance(value, ast.Call):
        return False
    if context.module.qualified(value.func) in _COUNTS:
        return True
    is_len = isinstance(value.func, ast.Name) and value.func.id == "len"
    return is_len and len(value.args) == 1 and _is_all_devices(context, value.args[0])


def _is_all_devices(context: Context, node: ast.expr) -> bool:
    value = context.module.only_value(node)
    return (
        isinstance(value, ast.Call)
        and not value.args
        and not value.keywords
        and context.module.qualified(value.func) in _DEVICES
    )
