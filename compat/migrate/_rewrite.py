"""Applies edits to source text with libcst, which keeps comments and layout.

libcst is the extra `migrate`: it is imported when a file is to be rewritten, not before.
"""

import importlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from compat.migrate._edits import (
    ChangeImport,
    DropStatement,
    Edit,
    EditCall,
    Keep,
    ProbeToIf,
    SetExpression,
    SetStatement,
    Span,
    Todo,
)


def load_libcst() -> Any:
    """Imports libcst.

    **Raises:**

    - `ImportError`: if it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module("libcst")
    except ImportError:
        raise ImportError(
            "`python -m compat fix` rewrites with libcst, which is not installed. "
            "Install it with: pip install 'meshdp[migrate]'"
        ) from None


def rewrite(source: str, edits: Iterable[Edit]) -> str:
    """Applies `edits` to `source`.

    An edit inside an expression that another edit replaces whole is left out; a second call
    with fresh edits will find it.

    **Raises:**

    - `SyntaxError`: if libcst does not know syntax that this Python does.
    """
    cst = load_libcst()
    from compat.migrate._imports import add_imports

    edits = list(dict.fromkeys(edits))
    metadata = importlib.import_module("libcst.metadata")
    try:
        parsed = cst.parse_module(source)
    except cst.ParserSyntaxError as e:
        where = ("<module>", e.raw_line, e.raw_column, None)
        raise SyntaxError(f"libcst cannot parse it ({e.message})", where) from None
    wrapper = metadata.MetadataWrapper(parsed, unsafe_skip_copy=True)
    places = wrapper.resolve(metadata.PositionProvider)
    module = wrapper.module.visit(_transformer(cst, wrapper.module, places, edits))
    needs = dict.fromkeys(n for edit in edits for n in edit.needs)
    return add_imports(cst, module, list(needs)).code


def _transformer(cst: Any, module: Any, places: Any, edits: Sequence[Edit]) -> Any:
    """A libcst transformer; made in a function because its base class is imported late."""
    expressions: dict[Span, Edit] = {}
    statements: dict[Span, list[Edit]] = {}
    for edit in edits:
        if isinstance(edit, SetExpression | Keep | EditCall):
            expressions.setdefault(edit.span, edit)
        else:
            statements.setdefault(edit.span, []).append(edit)
    parts = {e.part for e in expressions.values() if isinstance(e, Keep)}
    config = module.config_for_parsing

    def place(node: Any) -> Span:
        at = places[node]
        return (at.start.line, at.start.column, at.end.line, at.end.column)

    def bare(node: Any) -> Any:
        return node.with_changes(lpar=[], rpar=[]) if hasattr(node, "lpar") else node

    def comments(node: Any) -> list[Any]:
        found: list[Any] = []
        for child in node.children:
            found += [child] if isinstance(child, cst.Comment) else comments(child)
        return found

    def like(new: Any, old: Any) -> Any:
        """`new` in the parentheses of `old`."""
        return new.with_changes(lpar=old.lpar, rpar=old.rpar) if old.lpar else new

    class Transformer(cst.CSTTransformer):
        def __init__(self) -> None:
            super().__init__()
            self.updated: dict[Span, Any] = {}
            self.without_a_place: list[Any] = []

        def on_leave(self, original_node: Any, updated_node: Any) -> Any:
            updated_node = super().on_leave(original_node, updated_node)
            if isinstance(original_node, cst.BaseExpression) and original_node in places:
                span = place(original_node)
                edit = expressions.get(span)
                if edit is not None:
                    old, updated_node = updated_node, self.expression(edit, updated_node)
                    self.left_out(old, [updated_node])
                if span in parts:
                    self.updated.setdefault(span, updated_node)
            elif isinstance(original_node, cst.BaseStatement):
                return self.statement(original_node, updated_node)
            return updated_node

        def expression(self, edit: Edit, node: Any) -> Any:
            if isinstance(edit, SetExpression):
                return like(cst.parse_expression(edit.source, config=config), node)
            if isinstance(edit, Keep):
                kept = self.updated[edit.part]
                if edit.callee:
                    callee = cst.parse_expression(edit.callee, config=config)
                    return like(cst.Call(func=callee, args=[cst.Arg(bare(kept))]), node)
                return like(kept, node)
            if isinstance(edit, EditCall) and isinstance(node, cst.Call):
                return edit_call(cst, edit, node)
            return node

        def statement(self, original: Any, node: Any) -> Any:
            if isinstance(original, cst.SimpleStatementLine):
                return self.line(original, node)
            for edit in statements.get(place(original), []):
                if isinstance(edit, SetStatement):
                    new = cst.parse_statement(edit.source, config=config)
                    bare_node = node.with_changes(leading_lines=[])
                    inside = [cst.EmptyLine(comment=c) for c in comments(bare_node)]
                    return new.with_changes(leading_lines=[*node.leading_lines, *inside])
                if isinstance(edit, ProbeToIf):
                    return probe_to_if(cst, edit, node)
            node = self.todo(place(original)[:2], node)
            return node.with_changes(leading_lines=[*node.leading_lines, *self.lost()])

        def todo(self, start: tuple[int, int], node: Any) -> Any:
            todos = [
                e
                for span, found in statements.items()
                for e in found
                if span[:2] == start and isinstance(e, Todo)
            ]
            for edit in todos:
                first, *rest = edit.text.split("\n")
                said = [f"# TODO(meshdp): {first}", *(f"# {line}" for line in rest)]
                lines = [cst.EmptyLine(comment=cst.Comment(line)) for line in said]
                node = node.with_changes(leading_lines=[*node.leading_lines, *lines])
            return node

        def small(self, original: Any, node: Any, in_line: bool) -> tuple[list[Any], list[Any]]:
            """What becomes of the statements of one line, and statements to add after it.

            With `in_line` there are none: others of the line may need what they import.
            """
            small: list[Any] = []
            extra: list[Any] = []
            for old, new in zip(original.body, node.body, strict=True):
                edits = statements.get(place(old), [])
                changes = [e for e in edits if isinstance(e, ChangeImport)]
                if any(isinstance(e, DropStatement) for e in edits):
                    continue
                if changes:
                    kept, more = change_import(cst, new, changes)
                    self.left_out(new, kept)
                    small += [*kept, *more] if in_line else kept
                    extra += [] if in_line else more
                else:
                    small.append(new)
            return small, extra

        def left_out(self, old: Any, new: Sequence[Any]) -> None:
            """Remembers the comments in `old` that are not in `new`."""
            kept = [c.value for node in new for c in comments(node)]
            for comment in comments(old):
                if comment.value in kept:
                    kept.remove(comment.value)
                elif not is_pragma(comment.value):
                    self.without_a_place.append(comment)

        def lost(self) -> list[Any]:
            """Lines for the comments that have been left out so far."""
            lines = [cst.EmptyLine(comment=c) for c in self.without_a_place]
            self.without_a_place = []
            return lines

        def line(self, original: Any, node: Any) -> Any:
            small, extra = self.small(original, node, in_line=len(original.body) > 1)
            node = self.todo(place(original)[:2], node)
            node = node.with_changes(leading_lines=[*node.leading_lines, *self.lost()])
            if not small and not extra:
                return node.with_changes(body=[_dropped(cst)])
            if small and len(small) < len(original.body):
                small[-1] = small[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            lines = [cst.SimpleStatementLine(body=[s]) for s in extra]
            if small:
                lines.insert(0, node.with_changes(body=small))
            elif lines:
                lines[0] = node.with_changes(body=lines[0].body)
            return lines[0] if len(lines) == 1 else cst.FlattenSentinel(lines)

        def leave_IndentedBlock(self, original_node: Any, updated_node: Any) -> Any:
            body, rest = _without_dropped(cst, updated_node.body)
            footer = [*rest, *updated_node.footer]
            if not body:
                body = [cst.SimpleStatementLine(body=[cst.Pass()])]
            return updated_node.with_changes(body=body, footer=footer)

        def leave_Module(self, original_node: Any, updated_node: Any) -> Any:
            body, rest = _without_dropped(cst, updated_node.body)
            return updated_node.with_changes(body=body, footer=[*rest, *updated_node.footer])

        def leave_SimpleStatementSuite(self, original_node: Any, updated_node: Any) -> Any:
            small, _ = self.small(original_node, updated_node, in_line=True)
            if small:
                small[-1] = small[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            return updated_node.with_changes(body=small or [cst.Pass()])

    return Transformer()


def is_pragma(comment: str) -> bool:
    """Whether a comment speaks to a tool about its line, and goes with it."""
    return re.match(r"#\s*(noqa|type:|pylint:|pragma:|isort:|fmt:|ruff:)", comment) is not None


def _dropped(cst: Any) -> Any:
    # A statement that cannot be in anybody's source marks a line for removal, so that the
    # block it stands in can see to its comments.
    return cst.Expr(cst.Name("__meshdp_dropped__"))


def _is_dropped(cst: Any, line: Any) -> bool:
    return (
        isinstance(line, cst.SimpleStatementLine)
        and len(line.body) == 1
        and isinstance(line.body[0], cst.Expr)
        and isinstance(line.body[0].value, cst.Name)
        and line.body[0].value.value == "__meshdp_dropped__"
    )


def _without_dropped(cst: Any, lines: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Removes the marked lines; their comments go to the next line, or are returned."""
    body: list[Any] = []
    carried: list[Any] = []
    for line in lines:
        if _is_dropped(cst, line):
            carried += line.leading_lines
            comment = line.trailing_whitespace.comment
            if comment is not None and not is_pragma(comment.value):
                carried.append(cst.EmptyLine(comment=comment))
            continue
        said = any(e.comment is not None for e in carried)
        if carried and (said or not line.leading_lines):
            line = line.with_changes(leading_lines=[*carried, *line.leading_lines])
        carried = []
        body.append(line)
    return body, [e for e in carried if e.comment is not None]


def probe_to_if(cst: Any, edit: ProbeToIf, node: Any) -> Any:
    """Turns a `try` whose first statement only asks into an `if` that asks."""
    probe, first, *rest = node.body.body
    first = first.with_changes(leading_lines=[*probe.leading_lines, *first.leading_lines])
    return cst.If(
        test=cst.parse_expression(edit.test),
        body=node.body.with_changes(body=[first, *rest]),
        orelse=cst.Else(body=node.handlers[0].body),
        leading_lines=node.leading_lines,
    )


def edit_call(cst: Any, edit: EditCall, node: Any) -> Any:
    """Changes callee and arguments of `node`."""
    positional = dict(edit.positional)
    rename = dict(edit.rename)
    args: list[Any] = []
    for place, arg in enumerate(node.args):
        name = arg.keyword.value if arg.keyword is not None else None
        new = rename.get(name, "") if name is not None else positional.get(place, "")
        if name is not None and name in edit.drop:
            # What closes the list stays as it was written.
            if args and place == len(node.args) - 1:
                args[-1] = args[-1].with_changes(
                    comma=arg.comma, whitespace_after_arg=arg.whitespace_after_arg
                )
            continue
        if new:
            equal = cst.AssignEqual(
                whitespace_before=cst.SimpleWhitespace(""),
                whitespace_after=cst.SimpleWhitespace(""),
            )
            arg = arg.with_changes(
                keyword=cst.Name(new), equal=arg.equal if name is not None else equal
            )
        args.append(arg)
    for name, value in edit.add:
        # Before the last, so that what closes the list stays, and spaced as its neighbours.
        comma = args[-2].comma if len(args) > 1 else cst.MaybeSentinel.DEFAULT
        new_arg = cst.Arg(
            keyword=cst.Name(name),
            value=cst.parse_expression(value),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
            comma=comma,
        )
        args.insert(max(len(args) - 1, 0), new_arg)
    node = node.with_changes(args=args)
    if edit.callee:
        node = node.with_changes(func=cst.parse_expression(edit.callee))
    return node


def _last_comma(cst: Any, node: Any, alias: Any) -> Any:
    """The comma after what has become the last name of an import."""
    last = node.names[-1]
    if alias is last:
        return alias.comma
    closing = getattr(last.comma, "whitespace_after", None)
    if closing is None or not isinstance(closing, cst.ParenthesizedWhitespace):
        return cst.MaybeSentinel.DEFAULT
    own = alias.comma.whitespace_after
    if isinstance(own, cst.ParenthesizedWhitespace):
        own = own.with_changes(last_line=closing.last_line, indent=closing.indent)
        return alias.comma.with_changes(whitespace_after=own)
    return cst.Comma(whitespace_after=closing.with_changes(first_line=cst.TrailingWhitespace()))


def change_import(
    cst: Any, node: Any, changes: Sequence[ChangeImport]
) -> tuple[list[Any], list[Any]]:
    """What is left of an import statement, and the statements to add after it."""
    from compat.migrate._imports import dotted, import_statement

    wanted = {change.old: change.new for change in changes}
    kept, new = [], {}
    for alias in node.names:
        name = dotted(cst, alias.name)
        if name not in wanted:
            kept.append(alias)
            continue
        local = alias.asname.name.value if alias.asname is not None else ""
        if wanted[name]:
            if isinstance(node, cst.ImportFrom):
                package, _, last = wanted[name].rpartition(".")
                alias_local = local or name
                new.setdefault(package, []).append((last, alias_local))
            else:
                new.setdefault("", []).append((wanted[name], local))
    if kept:
        kept[-1] = kept[-1].with_changes(comma=_last_comma(cst, node, kept[-1]))
        left = [node.with_changes(names=kept)]
    else:
        left = []
    extra = [import_statement(cst, package, names) for package, names in new.items()]
    return left, extra
