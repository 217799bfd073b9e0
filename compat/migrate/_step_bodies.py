"""Whether the body of a training step means the same when one replica sees the whole batch."""

import ast
from collections.abc import Iterator

from compat.migrate._finding import Context
from compat.migrate._maps import TREE_MAPS
from compat.migrate._scopes import UNKNOWN, Function

MEANS = {"pmean", "pmax", "pmin"}
_GRADS = {"jax.grad", "jax.value_and_grad"}
_AVERAGES = {"mean", "average"}
# Over a share of the batch these give something whose mean is not that of the whole.
_UNEVEN = """amax amin argmax argmin count_nonzero cumsum max median min nanmax nanmin
    nanstd nansum nanvar norm percentile prod quantile sort argsort std var""".split()
_CURVED = """abs absolute arccos cos exp exp2 expm1 log log10 log1p log2 maximum minimum
    power reciprocal sigmoid sin sqrt square tanh rsqrt clip logaddexp""".split()
_MODULES = ("jax.numpy", "jax.numpy.linalg", "jax.nn", "jax.lax")


def body_reasons(context: Context, function: Function) -> Iterator[str]:
    """What in `function`, or in what it calls, stands against one replica for the whole batch.

    A mean of equal shares' means is the mean of all. That is true of nothing else, so whatever
    is done to a share besides, before the replicas' mean, is a reason.
    """
    functions = context.maps.reached(function)
    for inner in functions:
        for _, name, _ in context.maps.collectives(inner):
            if name not in MEANS:
                yield f"it uses {name}, which counts or tells apart replicas"
        for node in ast.walk(inner):
            if isinstance(node, ast.Call):
                yield from _reductions(context, node)
            if isinstance(node, ast.Call | ast.BinOp):
                yield from _curves(context, node)
                yield from _pairs(context, node)
            if isinstance(node, ast.BinOp):
                yield from _counts(context, node)
    if _takes_gradients(context, functions) and not _averages_gradients(context, functions):
        yield "no pmean of its gradients can be seen, so that replicas may go their own ways"
    for node in context.module.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("BatchNorm"):
            if not {"axis_name", "cross_replica_axis"} & {k.arg for k in node.keywords}:
                yield (
                    "BatchNorm without axis_name normalises each replica's share, and would "
                    "normalise the whole batch"
                )


def _reductions(context: Context, node: ast.Call) -> Iterator[str]:
    name = _operation(context, node)
    if name == "sum" and _covers_examples(context, node):
        yield (
            "it sums over all examples of a replica, which means another number when one "
            "replica has them all"
        )
    elif name == "vdot" or name in _UNEVEN and _covers_examples(context, node):
        yield f"it takes {name} over the examples of a replica, and would over all of them"


def _curves(context: Context, node: ast.Call | ast.BinOp) -> Iterator[str]:
    """A mean over a replica's examples that goes through something that is not linear."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Call) and _operation(context, node) in _CURVED:
        parts = node.args
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        parts = [node.left]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        parts = [node.right]
    curved = any(_is_share_mean(context, p) for p in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        curved = _is_centre(context, node.right, node.left)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        curved = _is_share_mean(context, node.left) and _is_share_mean(context, node.right)
    if curved:
        yield (
            f"`{ast.unparse(node)}` is of a mean over a replica's examples, and would be of "
            "the mean over all"
        )


def _is_centre(context: Context, node: ast.expr, other: ast.expr) -> bool:
    """Whether `node` is the mean of `other`, or a mean for each feature."""
    value = _last_value(context, node)
    if not isinstance(value, ast.Call) or _operation(context, value) not in _AVERAGES:
        return False
    method = context.module.qualified(value.func) is None
    of = value.func.value if method and isinstance(value.func, ast.Attribute) else None
    of = value.args[0] if of is None and value.args else of
    same = of is not None and ast.unparse(of) == ast.unparse(other)
    features = len(value.args) > (0 if method else 1) or bool(value.keywords)
    return _covers_examples(context, value) and (same or features)


def _pairs(context: Context, node: ast.Call | ast.BinOp) -> Iterator[str]:
    """Products that set the examples of a replica against each other, or sum over them."""
    operands: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        operands = [node.left, node.right]
    elif isinstance(node, ast.Call):
        name = _operation(context, node)
        if name in ("dot", "inner", "matmul"):
            operands = node.args[:2]
        elif name == "einsum" and node.args and _mixes(context.module.constant(node.args[0])):
            yield f"`{ast.unparse(node)}` may mix the examples of a replica with each other"
    if len(operands) != 2:
        return
    left, right = operands
    named = (
        isinstance(left, ast.Name)
        and isinstance(right, ast.Attribute)
        and right.attr == "T"
        and isinstance(right.value, ast.Name)
    )
    if named or ast.unparse(left) == ast.unparse(right):
        yield f"`{ast.unparse(node)}` may mix the examples of a replica with each other"


def _mixes(formula: object) -> bool:
    if not isinstance(formula, str) or "->" not in formula:
        return False
    inputs, _, result = formula.replace(" ", "").partition("->")
    first = [part[:1] for part in inputs.split(",")]
    return first[0] not in result or len({f for f in first if f in result}) > 1


def _counts(context: Context, node: ast.BinOp) -> Iterator[str]:
    """Arithmetic with the number of examples of a replica."""
    if not isinstance(node.op, ast.Mult | ast.Div | ast.Pow):
        return
    if any(_is_count(context, side) for side in (node.left, node.right)):
        around = context.module.parents.get(node)
        while isinstance(around, ast.expr) and not isinstance(around, ast.Call):
            around = context.module.parents.get(around)
        # A shape made of it is as right for more examples.
        if not (isinstance(around, ast.Call) and _operation(context, around) == "reshape"):
            yield f"`{ast.unparse(node)}` depends on how many examples a replica has"


def _is_count(context: Context, node: ast.expr) -> bool:
    value = _last_value(context, node)
    if isinstance(value, ast.Subscript) and context.module.constant(value.slice) == 0:
        value = value.value
    elif value is not node and isinstance(value, ast.Attribute):  # `n, d = x.shape`
        bindings = context.module.bindings(node) if isinstance(node, ast.Name) else []
        targets = [context.module.statement(b.node) for b in bindings]
        names = [ast.unparse(t.targets[0]) for t in targets if isinstance(t, ast.Assign)]
        if not any(n.lstrip("(").split(",")[0] == ast.unparse(node) for n in names):
            return False
    elif isinstance(value, ast.Call):
        return ast.unparse(value.func) == "len"
    else:
        return isinstance(value, ast.Attribute) and value.attr == "size"
    return isinstance(value, ast.Attribute) and value.attr in ("shape", "size")


def _operation(context: Context, node: ast.Call) -> str | None:
    """The last part of the name of a function of JAX, or of a method."""
    name = context.module.qualified(node.func)
    if name is None:
        return node.func.attr if isinstance(node.func, ast.Attribute) else None
    module, _, last = name.rpartition(".")
    return last if module in _MODULES else None


def _covers_examples(context: Context, node: ast.Call) -> bool:
    """Whether a reduction runs over everything or over the leading dimension."""
    method = context.module.qualified(node.func) is None
    places = node.args[0 if method else 1 :]
    if _operation(context, node) in ("percentile", "quantile", "norm"):
        places = places[1:]
    given = next((k.value for k in node.keywords if k.arg == "axis"), None)
    given = places[0] if given is None and places else given
    axis = context.module.constant(given) if given is not None else None
    if axis is None or axis is UNKNOWN:
        return axis is None
    return 0 in (axis if isinstance(axis, tuple | list) else (axis,))


def _is_share_mean(context: Context, node: ast.expr) -> bool:
    value = _last_value(context, node)
    if isinstance(value, ast.UnaryOp):
        return _is_share_mean(context, value.operand)
    if isinstance(value, ast.BinOp):
        return _is_share_mean(context, value.left) or _is_share_mean(context, value.right)
    if not isinstance(value, ast.Call):
        return False
    if _is_gradient_call(context, value):
        # `loss, grads = value_and_grad(f)(...)`; the loss is a mean.
        return isinstance(node, ast.Name) and not _holds_gradients(context, node)
    return _operation(context, value) in _AVERAGES and _covers_examples(context, value)


def _last_value(context: Context, node: ast.expr) -> ast.expr:
    """The expression assigned last, in the text, to the name `node`."""
    if not isinstance(node, ast.Name):
        return node
    found: list[tuple[int, ast.expr]] = []
    for binding in context.module.bindings(node):
        statement = context.module.statement(binding.node)
        if isinstance(statement, ast.Assign) and statement.lineno < node.lineno:
            found.append((statement.lineno, statement.value))
    return max(found, key=lambda f: f[0])[1] if found else node


def _is_gradient_call(context: Context, node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    made = context.module.only_value(node.func)
    return isinstance(made, ast.Call) and context.module.qualified(made.func) in _GRADS


def _takes_gradients(context: Context, functions: list[Function]) -> bool:
    return any(_is_gradient_call(context, n) for f in functions for n in ast.walk(f))


def _averages_gradients(context: Context, functions: list[Function]) -> bool:
    """Whether some pmean is given what a gradient function returned, and nothing else of it."""
    for function in functions:
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = context.maps.collective(node)
            mapped = context.module.qualified(node.func) in TREE_MAPS and len(node.args) == 2
            if mapped:
                over = context.module.function(node.args[0])
                inside = ast.walk(over if over is not None else node.args[0])
                name = next(
                    (
                        n
                        for c in inside
                        if isinstance(c, ast.Call) and (n := context.maps.collective(c))
                    ),
                    None,
                )
            given = node.args[1] if mapped else node.args[0]
            if name == "pmean" and _holds_gradients(context, given):
                return True
    return False


def _holds_gradients(context: Context, node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List):
        return any(_holds_gradients(context, e) for e in node.elts)
    if isinstance(node, ast.Dict):
        return any(_holds_gradients(context, v) for v in node.values)
    if isinstance(node, ast.Subscript):
        made = _last_value(context, node.value)
        return _is_gradient_call(context, made) and context.module.constant(node.slice) == 1
    made = _last_value(context, node)
    if not isinstance(made, ast.Call) or not _is_gradient_call(context, made):
        return False
    function = context.module.only_value(made.func)
    both = isinstance(function, ast.Call) and (
        context.module.qualified(function.func) == "jax.value_and_grad"
    )
    statement = context.module.parents.get(made)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not isinstance(target, ast.Tuple):
        return True  # gradients, with or without the value: all of it is averaged
    place = 1 if both else 0
    return isinstance(node, ast.Name) and ast.unparse(target.elts[place]) == node.id
