"""Finders for what is wrong about a mapped function itself."""

import ast
from collections.abc import Iterator
from typing import Any

from compat.migrate._find_names import to_compat
from compat.migrate._finding import Context, Finding
from compat.migrate._maps import PMAPS, Mapped, axes
from compat.migrate._scopes import UNKNOWN, Function

_GRADS = {"jax.grad", "jax.value_and_grad"}
_SUMS = {"jax.numpy.sum", "numpy.sum"}


def find_maps(context: Context) -> Iterator[Finding]:
    """Faults of maps that show in how they are made."""
    for mapped in context.maps.all():
        if mapped.name == "jax.pmap":
            yield from _negative_axes(context, mapped)
            yield from _nested(context, mapped)
        yield from _static_numbers(context, mapped)
        yield from _unbound_axes(context, mapped)
        yield from _gradients_of_sums(context, mapped)
    yield from _means_of_means(context)


def _negative_axes(context: Context, mapped: Mapped) -> Iterator[Finding]:
    for name in ("in_axes", "out_axes"):
        node = mapped.argument(name)
        value = context.module.constant(node)
        if node is not None and value is not UNKNOWN and _has_negative(value):
            edits = to_compat(context, mapped.callee)
            yield context.finding("MD201", node, *edits, name=f"{name}={ast.unparse(node)}")


def _has_negative(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_negative(v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(_has_negative(v) for v in value)
    return isinstance(value, int) and value < 0


def _static_numbers(context: Context, mapped: Mapped) -> Iterator[Finding]:
    node = mapped.argument("static_broadcasted_argnums")
    value = context.module.constant(node)
    function = mapped.function
    if node is None or value is UNKNOWN or function is None or function.args.vararg:
        return
    args = function.args.posonlyargs + function.args.args
    # A bound method's `self` is not among the arguments of the call.
    owner = context.module.parents.get(function)
    bound = isinstance(owner, ast.ClassDef) and not _is_decorator(mapped, function)
    count = len(args) - mapped.given - int(bound)
    for number in axes(value):
        if isinstance(number, int) and not -count <= number < count:
            yield context.finding(
                "MD202",
                node,
                name=f"static_broadcasted_argnums={ast.unparse(node)}",
                number=number,
                count=count,
                s="" if count == 1 else "s",
            )


def _is_decorator(mapped: Mapped, function: Function) -> bool:
    return mapped.node in getattr(function, "decorator_list", [])


def _nested(context: Context, mapped: Mapped) -> Iterator[Finding]:
    inner: list[ast.AST] = []
    if isinstance(mapped.node, ast.Call):
        inner = [a for a in mapped.node.args[:1] if context.maps.resolve(a) is not None]
    if mapped.function is not None:
        for node in ast.walk(mapped.function):
            if isinstance(node, ast.Call) and node is not mapped.node:
                called = context.maps.resolve(node.func)
                if called is not None:
                    inner.append(node)
    if inner:
        yield context.finding("MD203", inner[0], *to_compat(context, mapped.callee))


def _unbound_axes(context: Context, mapped: Mapped) -> Iterator[Finding]:
    if mapped.function is None:
        return
    bound = mapped.axis_name(context.module)
    functions = context.maps.reached(mapped.function)
    elsewhere, more = context.maps.binds_elsewhere(mapped, functions)
    if bound is UNKNOWN or more or _is_inside_another(context, mapped):
        return
    known = elsewhere | ({bound} if bound is not None else set())
    for function in functions:
        for call, name, axis in context.maps.collectives(function):
            if axis is UNKNOWN or axis is None or _is_conditional(context, call, function):
                continue
            missing = [a for a in axes(axis) if a not in known]
            if missing:
                code = "MD402" if bound is None else "MD401"
                yield context.finding(code, call, name=name, axis=missing[0], bound=repr(bound))


def _is_conditional(context: Context, node: ast.AST, function: Function) -> bool:
    while node is not function:
        node = context.module.parents[node]
        if isinstance(node, ast.If | ast.IfExp | ast.Try):
            return True
    return False


def _is_inside_another(context: Context, mapped: Mapped) -> bool:
    """Whether an enclosing function or call may bind axes that we do not see."""
    parent = context.module.parents.get(mapped.node)
    while parent is not None:
        if isinstance(parent, ast.Call) and parent is not mapped.node:
            name = context.module.qualified(parent.func) or ""
            if name in PMAPS or name.rpartition(".")[2] in ("vmap", "xmap", "shard_map"):
                return True
        if isinstance(parent, ast.FunctionDef) and parent is not mapped.function:
            for other in context.maps.all():
                if other is not mapped and other.function is parent:
                    return True
        parent = context.module.parents.get(parent)
    return False


def _gradients_of_sums(context: Context, mapped: Mapped) -> Iterator[Finding]:
    if mapped.function is None:
        return
    module = context.module
    functions = context.maps.reached(mapped.function)
    for function in functions:
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            if module.qualified(node.func) not in _GRADS:
                continue
            loss = module.function(node.args[0])
            returned = _loss_of(context, loss)
            if isinstance(returned, ast.Call) and context.maps.collective(returned) == "psum":
                yield context.finding("MD404", node, name=ast.unparse(node.args[0]))


def _loss_of(context: Context, function: Function | None) -> ast.AST | None:
    """The expression that `function` returns, its first part if it returns several."""
    if function is None:
        return None
    if isinstance(function, ast.Lambda):
        value: ast.AST | None = function.body
    else:
        returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)]
        value = returns[0].value if len(returns) == 1 else None
    if isinstance(value, ast.Tuple) and value.elts:
        value = value.elts[0]
    return None if value is None else context.module.only_value(value)


def _means_of_means(context: Context) -> Iterator[Finding]:
    module = context.module
    for node in module.nodes:
        if not (isinstance(node, ast.Call) and node.args):
            continue
        if context.maps.collective(node) != "pmean":
            continue
        if _is_weighted_mean(context, node.args[0]) or _is_its_gradient(context, node.args[0]):
            yield context.finding("MD403", node)


def _is_weighted_mean(context: Context, node: ast.AST) -> bool:
    """`sum(x * w) / sum(w)`, or `mean(x, where=w)`, or `average(x, weights=w)`."""
    node = context.module.only_value(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_sum(context, node.left) and _is_sum(context, node.right)
    if isinstance(node, ast.Call):
        name = context.module.qualified(node.func)
        keywords = {k.arg for k in node.keywords}
        return (name == "jax.numpy.mean" and "where" in keywords) or (
            name == "jax.numpy.average" and "weights" in keywords
        )
    return False


def _is_sum(context: Context, node: ast.AST) -> bool:
    node = context.module.only_value(node)
    if not isinstance(node, ast.Call):
        return False
    name = context.module.qualified(node.func)
    if name in ("jax.numpy.maximum", "jax.numpy.clip"):  # a guard against a count of zero
        return bool(node.args) and _is_sum(context, node.args[0])
    method = isinstance(node.func, ast.Attribute) and node.func.attr == "sum"
    whole = not {k.arg for k in node.keywords} & {"axis"}
    plain = len(node.args) == (1 if name in _SUMS else 0)
    return whole and plain and (name in _SUMS or (method and name is None))


def _is_its_gradient(context: Context, node: ast.AST) -> bool:
    """Whether `node` is a gradient of such a mean, taken in the same function."""
    if not isinstance(node, ast.Name):
        return False
    bindings = context.module.bindings(node)
    scope = context.module.scopes[node].node
    if len(bindings) == 0 or len(bindings) > 2:
        return False
    for statement in ast.walk(scope):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        targets = [n for t in statement.targets for n in ast.walk(t)]
        names = {n.id for n in targets if isinstance(n, ast.Name)}
        made = context.module.only_value(statement.value.func)
        if node.id in names and isinstance(made, ast.Call) and made.args:
            if context.module.qualified(made.func) in _GRADS:
                loss = _loss_of(context, context.module.function(made.args[0]))
                return loss is not None and _is_weighted_mean(context, loss)
    return False
