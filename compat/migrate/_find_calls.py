"""Finders for calls, statements and attributes that today's JAX refuses or warns about."""

import ast
from collections.abc import Iterator

from compat.migrate._edits import (
    DropStatement,
    Edit,
    EditCall,
    ProbeToIf,
    SetExpression,
    SetStatement,
)
from compat.migrate._finding import Context, Finding
from compat.migrate._maps import PMAPS
from compat.migrate._renames import REMOVED_IN

_PJIT_ARGUMENTS = {
    "in_axis_resources": "in_shardings",
    "out_axis_resources": "out_shardings",
}
_PJITS = {"jax.experimental.pjit.pjit", "jax.jit"}
_MESHES = {
    "jax.experimental.maps.Mesh",
    "jax.interpreters.pxla.Mesh",
    "jax.make_mesh",
    "jax.sharding.Mesh",
    "meshdp.make_mesh",
}
GONE_OPTIONS = frozenset(
    """jax_array jax_default_dtype_bits jax_eager_pmap jax_enable_memories
    jax_experimental_name_stack jax_host_callback_inline jax_host_callback_legacy
    jax_host_callback_outfeed jax_omnistaging jax_parallel_functions_output_gda
    jax_pmap_no_rank_reduction jax_pmap_shmap_merge jax_remat_opt_barrier jax_spmd_mode
    jax_unique_mhlo_module_names jax_vmap_primitive""".split()
)
"""Configuration options that JAX had and has no longer; a test asks the running JAX."""


def find_calls(context: Context) -> Iterator[Finding]:
    """Arguments, options, attributes and statements that are gone or deprecated."""
    for node in context.module.nodes:
        if isinstance(node, ast.Call):
            yield from _call(context, node)
        elif isinstance(node, ast.With):
            yield from _mesh_contexts(context, node)
        elif isinstance(node, ast.Attribute):
            yield from _attribute(context, node)
        elif isinstance(node, ast.Try):
            yield from _axis_probe(context, node)


def _call(context: Context, node: ast.Call) -> Iterator[Finding]:
    name = context.module.qualified(node.func)
    offset = 0
    partial = context.maps.partial(node)
    if partial is not None:
        name, offset = context.module.qualified(partial.callee), 1
    if name in _PJITS:
        yield from _pjit(context, node, name or "", offset)
    elif name == "jax.shard_map":
        yield from _shard_map(context, node, offset)
    elif name in PMAPS:
        yield from _pmap(context, node)
    elif name == "jax.make_mesh":
        yield from _make_mesh(context, node)
    elif name in ("jax.config.update", "jax.config.config.update"):
        yield from _option(context, node)


def _pjit(context: Context, node: ast.Call, name: str, offset: int) -> Iterator[Finding]:
    old = [k.arg for k in node.keywords if k.arg in _PJIT_ARGUMENTS]
    places = range(1 + offset, len(node.args)) if name.endswith("pjit") else ()
    names = list(_PJIT_ARGUMENTS)[: len(places)]
    if any(isinstance(a, ast.Starred) for a in node.args) or len(names) < len(places):
        return
    if old or places:
        edit = EditCall(
            span=context.span(node),
            positional=tuple(
                (place, _PJIT_ARGUMENTS[n]) for place, n in zip(places, names, strict=True)
            ),
            rename=tuple((n, _PJIT_ARGUMENTS[n]) for n in old if n),
        )
        faults = [f"{n} given by place" for n in names] + [str(n) for n in old]
        yield context.finding("MD107", node, edit, name=" and ".join(faults))


def _shard_map(context: Context, node: ast.Call, offset: int) -> Iterator[Finding]:
    names = ("mesh", "in_specs", "out_specs", "check_vma")
    positional = tuple(
        (place, names[place - 1 - offset])
        for place in range(1 + offset, min(len(node.args), 5 + offset))
    )
    old = [k.arg for k in node.keywords if k.arg == "check_rep"]
    if not (old or positional) or any(isinstance(a, ast.Starred) for a in node.args):
        return
    if context.module.guarded(node):
        return
    edit = EditCall(
        span=context.span(node),
        positional=positional,
        rename=(("check_rep", "check_vma"),) if old else (),
    )
    faults = [*map(str, old), *(f"{name} given by place" for _, name in positional)]
    yield context.finding("MD112", node, edit, name=", ".join(faults))


def _pmap(context: Context, node: ast.Call) -> Iterator[Finding]:
    gone = [k.arg for k in node.keywords if k.arg == "global_arg_shapes"]
    if gone:
        edit = EditCall(span=context.span(node), drop=("global_arg_shapes",))
        yield context.finding("MD117", node, edit, name="global_arg_shapes")


def _make_mesh(context: Context, node: ast.Call) -> Iterator[Finding]:
    keywords = {k.arg for k in node.keywords}
    if len(node.args) < 3 and not keywords & {"axis_types", None}:
        yield context.finding("MD206", node)


def _option(context: Context, node: ast.Call) -> Iterator[Finding]:
    option = context.module.constant(node.args[0]) if node.args else None
    if option in GONE_OPTIONS and not context.module.guarded(node):
        statement = context.module.parents.get(node)
        edits: tuple[Edit, ...] = ()
        if isinstance(statement, ast.Expr):
            edits = (DropStatement(span=context.span(statement)),)
        yield context.finding("MD114", node, *edits, name=option)


def _attribute(context: Context, node: ast.Attribute) -> Iterator[Finding]:
    module = context.module
    if node.attr in GONE_OPTIONS and module.qualified(node.value) in (
        "jax.config",
        "jax.config.config",
    ):
        if not module.guarded(node):
            yield context.finding("MD114", node, name=node.attr)
    if node.attr in ("device_buffer", "device_buffers") and _is_an_array(context, node):
        target, edits = node, ()
        value = ast.get_source_segment(module.source, node.value) or ""
        parent = module.parents.get(node)
        if node.attr == "device_buffer":
            source = f"{value}.addressable_data(0)"
        elif isinstance(parent, ast.Subscript) and not isinstance(parent.slice, ast.Slice):
            target = parent
            source = f"{value}.addressable_data({ast.unparse(parent.slice)})"
        else:
            source = f"[s.data for s in {value}.addressable_shards]"
        if "\n" not in source:
            edits = (SetExpression(span=context.span(target), source=source),)
        yield context.finding("MD116", node, *edits, name=node.attr)


def _is_an_array(context: Context, node: ast.Attribute) -> bool:
    """`device_buffers` is JAX's own word, unless this module gives it to something else."""
    if not isinstance(node.ctx, ast.Load) or context.module.qualified(node) is not None:
        return False
    for other in context.module.nodes:
        if isinstance(other, ast.FunctionDef) and other.name == node.attr:
            return False
        if isinstance(other, ast.Attribute) and other.attr == node.attr:
            if not isinstance(other.ctx, ast.Load):
                return False
    return not context.module.guarded(node)


def _mesh_contexts(context: Context, node: ast.With) -> Iterator[Finding]:
    for item in node.items:
        value = context.module.only_value(item.context_expr)
        is_mesh = isinstance(value, ast.Call) and (
            context.module.qualified(value.func) in _MESHES
        )
        if not (is_mesh or _annotated_as_mesh(context, item.context_expr)):
            continue
        source = ast.get_source_segment(context.module.source, item.context_expr) or "\n"
        edits: tuple[Edit, ...] = ()
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
        maps = any(context.maps.resolve(c.func) is not None for c in calls)
        # A context mesh would reach into maps over other meshes, and into eager operations on
        # one device: it is worth that only where specs are to find their mesh in it.
        plain = item.optional_vars is None and "\n" not in source
        if plain and not maps and _has_bare_specs(context):
            setter, needs = context.reach(node, "jax.set_mesh")
            edits = (
                SetExpression(
                    span=context.span(item.context_expr),
                    source=f"{setter}({source})",
                    needs=needs,
                ),
            )
        yield context.finding("MD113", item.context_expr, *edits)


def _has_bare_specs(context: Context) -> bool:
    """Whether jitted functions or constraints of this module may have specs without a mesh."""
    words = ("_axis_resources", "in_shardings", "out_shardings", "with_sharding_constraint")
    return any(word in context.module.source for word in words)


def _annotated_as_mesh(context: Context, node: ast.expr) -> bool:
    if not isinstance(node, ast.Name):
        return False
    bindings = context.module.bindings(node)
    if len(bindings) != 1 or not isinstance(bindings[0].node, ast.arg):
        return False
    annotation = bindings[0].node.annotation
    return annotation is not None and context.module.qualified(annotation) in _MESHES


def _axis_probe(context: Context, node: ast.Try) -> Iterator[Finding]:
    """`try: core.axis_frame(name); ...; except NameError: ...`, which asks for an axis."""
    probe = node.body[0]
    if not (isinstance(probe, ast.Expr) and isinstance(probe.value, ast.Call)):
        return
    call = probe.value
    if context.module.qualified(call.func) != "jax.core.axis_frame" or len(call.args) != 1:
        return
    edits: tuple[Edit, ...] = ()
    # More statements after the probe could raise NameErrors of their own.
    if context.mode != "jax" and len(node.body) == 2 and _catches_name_error_only(node):
        callee, needs = context.reach(node, "compat.in_pmap")
        test = f"{callee}({ast.unparse(call.args[0])})"
        place = context.span(node)
        handled = node.handlers[0].body
        results = [ast.unparse(node.body[1]), *map(ast.unparse, handled)]
        if results == ["return True", "return False"]:
            edits = (SetStatement(span=place, source=f"return {test}", needs=needs),)
        else:
            edits = (ProbeToIf(span=place, test=test, needs=needs),)
    yield context.finding(
        "MD119",
        call.func,
        *edits,
        name="jax.core.axis_frame",
        version="{}.{}".format(*REMOVED_IN["jax.core.axis_frame"]),
        hint="Use compat.in_pmap(name).",
    )


def _catches_name_error_only(node: ast.Try) -> bool:
    if len(node.handlers) != 1 or node.orelse or node.finalbody:
        return False
    handler = node.handlers[0]
    return (
        handler.name is None
        and isinstance(handler.type, ast.Name)
        and handler.type.id == "NameError"
    )
