"""Finders for names and arguments that are gone or going."""

import ast
from collections.abc import Iterator

from compat.migrate._edits import ChangeImport, DropStatement, Edit, SetExpression
from compat.migrate._finding import Context, Finding
from compat.migrate._renames import COMPAT, REMOVED_IN, SAME, Rename, hint, removed
from compat.migrate._scopes import Module

# Present still, so that `REMOVED_IN` says nothing of them.
_OLD = {
    "jax.host_count": "MD104",
    "jax.host_id": "MD104",
    "jax.host_ids": "MD104",
    "jax.experimental.shard_map.shard_map": "MD111",
    "jax.experimental.pjit.pjit": "MD120",
    "jax.pmap": "MD123",
    "flax.jax_utils.unreplicate": "MD303",
    "flax.jax_utils.replicate": "MD306",
}
_DEPRECATED = {
    "jax.experimental.shard_map.shard_map": Rename(
        "jax.experimental.shard_map.shard_map", "jax.shard_map"
    ),
    "jax.experimental.pjit.pjit": Rename("jax.experimental.pjit.pjit", "jax.jit"),
}
_TREES = {"flatten", "leaves", "map", "structure", "transpose", "unflatten"}
_ARRAYS = ("ShardedDeviceArray", "DeviceArray", "KeyArray", "PRNGKeyArray", "GlobalDeviceArray")


def find_names(context: Context) -> Iterator[Finding]:
    """Uses and imports of names that are removed, deprecated or renamed."""
    module = context.module
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield from _imported(context, node, f"{node.module}.{alias.name}", alias)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _imported(context, node, alias.name, alias)
        elif isinstance(node, ast.Attribute | ast.Name):
            parent = module.parents.get(node)
            if not (isinstance(parent, ast.Attribute) and parent.value is node):
                yield from _used(context, node)


def _imported(
    context: Context, node: ast.Import | ast.ImportFrom, name: str, alias: ast.alias
) -> Iterator[Finding]:
    old = _listed(name, context)
    if old is None or context.module.guarded(node):
        return
    rename = _rename(old, context)
    edits: tuple[Edit, ...] = ()
    if alias.name == "*":
        pass
    elif rename is not None:
        if _calls_can_follow(context, old):
            new = ".".join(rename.import_from) + name[len(old) :]
            edits = (_change(context, node, alias, new),)
    elif rename is None and _uses_are_all_fixable(context, node, alias):
        # The uses are rewritten first; what remains here is an import that nothing needs.
        plain = isinstance(node, ast.Import) and not alias.asname
        others = context.module.top.names.get("jax", [])
        new = "jax" if plain and all(b.node is node for b in others) else ""
        edits = (_change(context, node, alias, new),)
    yield _finding(context, alias, old, name, edits)


def _change(
    context: Context, node: ast.Import | ast.ImportFrom, alias: ast.alias, new: str
) -> ChangeImport:
    return ChangeImport(span=context.span(node), old=alias.name, new=new)


def _used(context: Context, node: ast.Attribute | ast.Name) -> Iterator[Finding]:
    module = context.module
    name = module.qualified(node)
    if name is None or not isinstance(node.ctx, ast.Load) or module.guarded(node):
        return
    old = _listed(name, context)
    if old is None:
        return
    part = _prefix(module, node, old)
    # A plain name was reported where it was imported or assigned.
    if not isinstance(part, ast.Attribute):
        return
    if old == "jax.pmap" and _is_a_mention(module, part):
        return
    rename = _rename(old, context)
    edits: tuple[Edit, ...] = ()
    if rename is not None and _calls_can_follow(context, old):
        edits = (_replace(context, part, rename),)
    elif old.startswith("jax.tools.colab_tpu"):
        edits = _without_setup(context, node)
    yield _finding(context, part, old, name, edits)


def to_compat(context: Context, callee: ast.expr) -> tuple[Edit, ...]:
    """What makes `callee`, an expression that names `jax.pmap`, name `compat.pmap`."""
    if context.mode == "jax" or context.module.qualified(callee) != "jax.pmap":
        return ()
    rename = COMPAT["jax.pmap"]
    if isinstance(callee, ast.Attribute):
        return (_replace(context, callee, rename),)
    for binding in context.module.bindings(callee) if isinstance(callee, ast.Name) else []:
        if isinstance(binding.node, ast.ImportFrom):
            for alias in binding.node.names:
                if alias.name == "pmap":
                    return (_change(context, binding.node, alias, rename.new),)
        elif binding.value is not None and isinstance(binding.value, ast.expr):
            return to_compat(context, binding.value)
    return ()


def _is_a_mention(module: Module, node: ast.AST) -> bool:
    """Whether `jax.pmap` is spoken of (compared, listed, wrapped, patched) and maps nothing."""
    parent = module.parents.get(node)
    if isinstance(parent, ast.Call) and node in parent.args:
        last = (ast.unparse(parent.func)).rpartition(".")[2]
        return last in ("isinstance", "patch", "signature", "update_wrapper", "wraps")
    return isinstance(
        parent, ast.Attribute | ast.Compare | ast.List | ast.Set | ast.Tuple | ast.Expr
    )


def _replace(context: Context, part: ast.Attribute, rename: Rename) -> SetExpression:
    base = context.module.qualified(part.value)
    for dotted in (rename.new, ".".join(rename.import_from)):
        package, _, last = dotted.rpartition(".")
        if package == base:
            source = f"{ast.unparse(part.value)}.{last}"
            return SetExpression(span=context.span(part), source=source)
    root: ast.expr = part
    while isinstance(root, ast.Attribute):
        root = root.value
    if rename.new.startswith("jax.") and context.module.qualified(root) == "jax":
        source = ast.unparse(root) + rename.new.removeprefix("jax")
        needs = (rename.module,) if rename.module else ()
    else:
        source, needs = context.reach(part, rename.new, rename.module)
    return SetExpression(span=context.span(part), source=source, needs=needs)


def _without_setup(context: Context, node: ast.AST) -> tuple[Edit, ...]:
    call = context.module.parents.get(node)
    statement = context.module.parents.get(call) if call is not None else None
    if isinstance(call, ast.Call) and isinstance(statement, ast.Expr):
        return (DropStatement(span=context.span(statement)),)
    return ()


def _prefix(module: Module, node: ast.expr, old: str) -> ast.expr:
    """The part of the chain `node` that stands for `old`."""
    while isinstance(node, ast.Attribute) and module.qualified(node) != old:
        if len(module.qualified(node.value) or "") < len(old):
            break
        node = node.value
    return node


def _listed(name: str, context: Context) -> str | None:
    """The longest part of `name`, from the left, that there is something to say about."""
    gone = removed(name)
    part = name
    while part:
        if part in _OLD or (part in SAME and gone) or part in REMOVED_IN:
            return part
        if part in COMPAT and gone:
            return part
        part = part.rpartition(".")[0]
    return None


def _rename(old: str, context: Context) -> Rename | None:
    if old in SAME:
        return SAME[old]
    if old in _DEPRECATED:
        return _DEPRECATED[old]
    return COMPAT.get(old) if context.mode != "jax" else None


def _calls_can_follow(context: Context, old: str) -> bool:
    """Whether every call of an old shard_map can be written for the new one."""
    if old != "jax.experimental.shard_map.shard_map":
        return True
    for node in context.module.nodes:
        if isinstance(node, ast.Call) and context.module.qualified(node.func) == old:
            if any(k.arg in (None, "auto") for k in node.keywords):
                return False
            if any(isinstance(a, ast.Starred) for a in node.args):
                return False
        if isinstance(node, ast.Call) and node.args:
            if context.module.qualified(node.args[0]) == old:
                if any(k.arg in (None, "auto") for k in node.keywords):
                    return False
    return True


def _uses_are_all_fixable(context: Context, node: ast.AST, alias: ast.alias) -> bool:
    module = context.module
    local = alias.asname or alias.name
    whole = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
    for other in module.nodes:
        if not isinstance(other, ast.Attribute | ast.Name):
            continue
        parent = module.parents.get(other)
        if isinstance(parent, ast.Attribute) and parent.value is other:
            continue
        name = module.qualified(other)
        if name is None or not (name == whole or name.startswith(whole + ".")):
            continue
        old = _listed(name, context)
        if old is not None and _rename(old, context) is not None:
            continue
        if name.startswith("jax.tools.colab_tpu") and _without_setup(context, other):
            continue
        return False
    return local not in _exported(context)


def _exported(context: Context) -> set[str]:
    for node in context.module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            value = context.module.constant(node.value)
            return set(value) if isinstance(value, list | tuple) else set()
    return set()


def _finding(
    context: Context, node: ast.AST, old: str, name: str, edits: tuple[Edit, ...]
) -> Finding:
    gone = removed(old)
    version = REMOVED_IN[gone] if gone else (0, 0)
    code = _code(old, gone)
    if gone and version > context.version:
        code = "MD122"
    shown = name if gone == old and old not in SAME and name.startswith(old) else old
    return context.finding(
        code,
        node,
        *edits,
        name=shown,
        short=old.rpartition(".")[2],
        hint=hint(name),
        version=f"{version[0]}.{version[1]}",
    )


def _code(old: str, gone: str | None) -> str:
    if old in _OLD:
        return _OLD[old]
    last = old.rpartition(".")[2]
    if last.startswith("device_put_"):
        return "MD101"
    if last == "tree_multimap":
        return "MD103"
    if old.startswith("jax.tree_"):
        return "MD102"
    if last == "soft_pmap":
        return "MD118"
    if old.startswith("jax.tools.colab_tpu"):
        return "MD105"
    if last in _ARRAYS:
        return "MD115"
    if old == "jax.core.axis_frame":
        return "MD119"
    for start, code in (
        ("jax.experimental.maps", "MD106"),
        ("jax.interpreters", "MD109"),
        ("jax.core", "MD110"),
        ("jax.sharding", "MD108"),
        ("jax.experimental.sharding", "MD108"),
    ):
        if old.startswith(start):
            return code
    return "MD121"
