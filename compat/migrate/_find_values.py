"""Finders for what is done with the results of mapped functions."""

import ast

from compat.migrate._edits import Edit, Keep
from compat.migrate._find_names import to_compat
from compat.migrate._finding import Context, Finding
from compat.migrate._flow import Env, Flow, Value, is_first_row, key
from compat.migrate._maps import TREE_MAPS, Mapped, axes
from compat.migrate._scopes import UNKNOWN

_READERS = {"float", "int", "print", "numpy.asarray", "numpy.array"}
_STACKS = {"jax.numpy.concatenate", "jax.numpy.stack", "jax.numpy.vstack", "jax.numpy.hstack"}
_SAVERS = {
    "flax.serialization.to_bytes",
    "flax.training.checkpoints.save_checkpoint",
    "flax.training.checkpoints.save_checkpoint_multiprocess",
    "numpy.save",
    "numpy.savez",
    "pickle.dump",
    "pickle.dumps",
}
# Questions about an array's form, not operations on it.
_FORMS = {"shape", "ndim", "size", "dtype", "result_type", "issubdtype", "iinfo", "finfo"}


def find_values(context: Context) -> list[Finding]:
    """Faults in the use of mapped results, each once."""
    found: dict[tuple[str, ast.AST], Finding] = {}

    def visit(node: ast.AST, env: Env, flow: Flow) -> None:
        for finding, at in _visit(context, node, env, flow):
            found.setdefault((finding.rule.code, at), finding)

    Flow(context, visit).run()
    return list(found.values())


def _visit(context: Context, node: ast.AST, env: Env, flow: Flow):
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        name = key(node)
        if name in flow.donated:
            call = flow.donated.pop(name)
            yield context.finding("MD207", call, name=name), call
    if isinstance(node, ast.Subscript):
        yield from _row(context, node, env, flow)
    elif isinstance(node, ast.BinOp):
        yield from _mixed(context, node, [node.left, node.right], env, flow)
    elif isinstance(node, ast.Call):
        yield from _call(context, node, env, flow)


def _call(context: Context, node: ast.Call, env: Env, flow: Flow):
    module = context.module
    name = module.qualified(node.func) or ""
    mapped = context.maps.resolve(node.func)
    if mapped is not None:
        yield from _inputs(context, mapped, node, env, flow)
        yield from _donations(context, mapped, node, flow)
        return
    values = [(a, flow.value(a, env)) for a in node.args]
    known = [(a, v) for a, v in values if v is not None and v.kind == "mapped"]
    if name in TREE_MAPS and len(node.args) == 2 and is_first_row(node.args[0]):
        if known and not known[0][1].parts:
            edits = _unreplicate(context, node, node.args[1])
            yield context.finding("MD302", node, *edits, name=ast.unparse(node.args[1])), node
    elif name in _STACKS and node.args and isinstance(node.args[0], ast.Tuple | ast.List):
        yield from _mixed(context, node, node.args[0].elts, env, flow)
    elif _saves(name, node):
        keywords = [(k.value, flow.value(k.value, env)) for k in node.keywords]
        for argument, value in [*known, *keywords]:
            if value is not None and value.kind == "mapped":
                edits = _wrap(context, argument)
                yield (
                    context.finding("MD304", argument, *edits, name=ast.unparse(argument)),
                    argument,
                )
    elif name.startswith("jax.numpy.") and name.rpartition(".")[2] not in _FORMS and known:
        yield context.finding("MD305", node, name=ast.unparse(node.func)), node


def _saves(name: str, node: ast.Call) -> bool:
    last = node.func.attr if isinstance(node.func, ast.Attribute) else name
    return name in _SAVERS or last in ("save_checkpoint", "save_checkpoint_multiprocess")


def _row(context: Context, node: ast.Subscript, env: Env, flow: Flow):
    index = context.module.constant(node.slice)
    if index is UNKNOWN or isinstance(index, bool) or not isinstance(index, int):
        return
    value = flow.value(node.value, env)
    if value is None or value.kind != "mapped" or value.parts:
        return
    if not value.array and not is_read(context, node):
        return
    sure = value.certain or is_number(context, node)
    edits = _unreplicate(context, node, node.value) if index == 0 and sure else ()
    yield context.finding("MD301", node, *edits, name=ast.unparse(node)), node


def is_number(context: Context, node: ast.AST) -> bool:
    """Whether `node` is turned into one number, so that it must be a row of one array."""
    parent = context.module.parents.get(node)
    if isinstance(parent, ast.Attribute):
        return parent.attr == "item"
    return (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Name)
        and parent.func.id in ("float", "int")
        and node in parent.args
    )


def is_read(context: Context, node: ast.AST) -> bool:
    """Whether `node` is turned into numbers or text, so that it is an array most likely."""
    parent = context.module.parents.get(node)
    if isinstance(parent, ast.FormattedValue):
        return True
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("item", "shape", "max", "mean", "min", "sum", "tolist")
    if isinstance(parent, ast.Call) and node in parent.args:
        name = context.module.qualified(parent.func)
        plain = parent.func.id if isinstance(parent.func, ast.Name) else None
        return name in _READERS or (name is None and plain in _READERS)
    return False


def _unreplicate(context: Context, node: ast.AST, part: ast.expr) -> tuple[Edit, ...]:
    if context.mode == "jax":
        return ()
    callee, needs = context.reach(node, "compat.unreplicate")
    return (Keep(span=context.span(node), part=context.span(part), callee=callee, needs=needs),)


def _wrap(context: Context, node: ast.expr) -> tuple[Edit, ...]:
    return _unreplicate(context, node, node)


def _mixed(context: Context, node: ast.AST, parts: list[ast.expr], env: Env, flow: Flow):
    values: list[tuple[ast.expr, Value]] = []
    for part in parts:
        value = flow.value(part, env)
        if value is not None and value.kind == "mapped":
            values.append((part, value))
    if len({v.devices for _, v in values}) > 1:
        names = " and ".join(ast.unparse(p) for p, _ in values)
        yield context.finding("MD204", node, name=names), node


def _inputs(context: Context, mapped: Mapped, node: ast.Call, env: Env, flow: Flow):
    if mapped.name != "jax.pmap":
        return
    for argument in node.args:
        value = flow.value(argument, env)
        if value is not None and value.kind == "committed":
            edits = to_compat(context, mapped.callee)
            yield context.finding("MD205", argument, *edits, name=value.why), argument


def _donations(context: Context, mapped: Mapped, node: ast.Call, flow: Flow):
    numbers = context.module.constant(mapped.argument("donate_argnums"))
    if numbers is UNKNOWN:
        return
    names = [key(a) for a in node.args]
    for number in axes(numbers):
        if not isinstance(number, int) or not 0 <= number < len(names) or not names[number]:
            continue
        name = names[number]
        if names.count(name) > 1:
            yield context.finding("MD207", node, name=name), node
        else:
            statement = context.module.statement(node)
            if not isinstance(statement, ast.Return):
                flow.pending[name] = node
