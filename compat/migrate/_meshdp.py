"""Takes recognised training steps out of pmap, by way of `compat.global_view`.

A step is recognised when everything around it is: what its arguments come from (`replicate`,
`shard`, the step itself), what becomes of its results (`unreplicate`, `x[0]`, the step again),
and what its body does with the axis (means only). One that is not keeps its pmap, and a TODO
says what a person must decide. The maps of a module are taken together: they share state.
"""

import ast
import dataclasses
from collections.abc import Iterator

from compat.migrate._check import silenced
from compat.migrate._edits import DropStatement, Edit, EditCall, Keep, SetExpression, Todo
from compat.migrate._find_values import is_number
from compat.migrate._finding import Context
from compat.migrate._flow import is_first_row
from compat.migrate._maps import PMAPS, TREE_MAPS, UNREPLICATES, Mapped
from compat.migrate._scopes import UNKNOWN
from compat.migrate._shards import replicated_part, sharded_part
from compat.migrate._step_bodies import MEANS, body_reasons

_ARGUMENTS = {"axis_name", "donate_argnums", "in_axes", "out_axes"}


def plan_steps(context: Context) -> list[Edit]:
    """Edits that take every map of the module out of pmap, or that say why not."""
    steps = [_Step(context, m) for m in context.maps.all() if m.name in PMAPS]
    for step in steps:
        if step.silenced:
            step.reasons.append("a noqa says to leave it")
        else:
            step.read()
    if not steps:
        return []
    if not any(step.reasons for step in steps):
        return [edit for step in steps for edit in step.edits]
    edits: list[Edit] = []
    for step in steps:
        statement = context.module.statement(step.mapped.node)
        reasons = step.reasons or ["it shares its state with a map that has to stay"]
        text = "\n".join(["still a pmap, because", *(f"- {r}" for r in dict.fromkeys(reasons))])
        if not step.silenced and not _has_todo(context, statement):
            edits.append(Todo(span=context.span(statement), text=text))
    return edits


def _has_todo(context: Context, statement: ast.stmt) -> bool:
    first = statement.lineno
    for decorator in getattr(statement, "decorator_list", []):
        first = min(first, decorator.lineno)
    above = first - 2
    while above >= 0 and context.module.lines[above].lstrip().startswith("#"):
        if "TODO(meshdp)" in context.module.lines[above]:
            return True
        above -= 1
    return False


@dataclasses.dataclass
class _Step:
    """One map, with what has been found out about it."""

    context: Context
    mapped: Mapped
    reasons: list[str] = dataclasses.field(default_factory=list)
    edits: list[Edit] = dataclasses.field(default_factory=list)
    batches: set[int] = dataclasses.field(default_factory=set)
    """Places of the arguments that are split over the devices."""
    count: int = 0
    """How many arguments a call has."""

    @property
    def silenced(self) -> bool:
        return silenced(self.context.module, self.mapped.callee.lineno, "MD123")

    def read(self) -> None:
        self._arguments()
        if self.mapped.function is None:
            self.reasons.append("the mapped function is not in this file")
        else:
            self.reasons += body_reasons(self.context, self.mapped.function)
        calls = self._calls()
        if not calls and not self.reasons:
            self.reasons.append("nothing in this file calls it")
        for call in calls:
            if not self.reasons:
                self._call(call)
        if not self.reasons:
            self._make()

    def _arguments(self) -> None:
        axis = self.mapped.axis_name(self.context.module)
        if axis is None or axis is UNKNOWN:
            self.reasons.append("it has no axis_name that can be read here")
        others = sorted(set(self.mapped.keywords) - _ARGUMENTS)
        if others:
            self.reasons.append(f"it has {' and '.join(others)}")
        for name in ("in_axes", "out_axes"):
            given = self.context.module.constant(self.mapped.argument(name))
            if self.mapped.argument(name) is not None and not _is_plain(given):
                self.reasons.append(f"its {name} are not all 0 or None")
        if self.mapped.given:
            self.reasons.append("partial supplies some of its arguments")

    def _calls(self) -> list[ast.Call]:
        """Every call of the map; a reason if it is used in another way."""
        module = self.context.module
        calls = []
        for node in module.nodes:
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            if not isinstance(node.ctx, ast.Load):
                continue
            made = self.context.maps.resolve(node)
            if made is None or made.node is not self.mapped.node:
                continue
            parent = module.parents[node]
            if isinstance(parent, ast.Call) and parent.func is node:
                calls.append(parent)
            else:
                self.reasons.append("it is passed on, not only called")
        return calls

    def _call(self, call: ast.Call) -> None:
        module = self.context.module
        statement = module.parents[call]
        if call.keywords or any(isinstance(a, ast.Starred) for a in call.args):
            self.reasons.append("it is called with keywords or *arguments")
        elif not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            self.reasons.append("its result is used on the spot, not given names")
        else:
            self._values(call, statement)

    def _values(self, call: ast.Call, statement: ast.Assign) -> None:
        targets = _names(statement.targets[0])
        if targets is None:
            self.reasons.append("its result goes to something else than names")
            return
        self.count = len(call.args)
        for place, argument in enumerate(call.args):
            if self._is_broadcast(place):
                continue
            part = sharded_part(self.context, argument)
            if part is not None:
                self.edits.append(self._keep(argument, part))
                self.batches.add(place)
            elif isinstance(argument, ast.Name):
                if self._variable(argument, call, goes_in=True):
                    self.batches.add(place)
            else:
                self.reasons.append(f"where {ast.unparse(argument)} is split cannot be seen")
        fed = {a.id for a in call.args if isinstance(a, ast.Name)}
        for place, name in enumerate(targets):
            if name.id not in fed:
                self._variable(name, call, goes_in=False)
                if not self._is_a_mean(place, len(targets)):
                    self.reasons.append(
                        f"{name.id} is returned without pmean, so that each replica has its own"
                    )

    def _is_broadcast(self, place: int) -> bool:
        axes = self.context.module.constant(self.mapped.argument("in_axes"))
        if isinstance(axes, tuple | list) and place < len(axes):
            return axes[place] is None
        return False

    def _variable(self, name: ast.Name, call: ast.Call, goes_in: bool) -> bool:
        """Reads all uses of a variable that has a row for each device.

        Returns whether the variable is split over the devices, rather than copied to them.
        """
        module = self.context.module
        scope = module.scopes[name]
        same = [
            n
            for n in module.nodes
            if isinstance(n, ast.Name) and n.id == name.id and _bound_in(module, n) is scope
        ]
        known = split = False
        first, last = call.lineno, len(module.lines)
        for node in same:
            if isinstance(node.ctx, ast.Store):
                edit, spreads = self._binding(node)
                # What goes in must be spread before the step spreads it.
                known |= spreads is not None and (spreads != "result" or not goes_in)
                split |= spreads == "split"
                if spreads is not None:
                    first = min(first, node.lineno)
                elif self._reads_one_row(node) and not self._repeats(node, call):
                    last = min(last, module.statement(node).end_lineno or last)
                self.edits += [edit] if edit is not None else []
        if not known:
            self.reasons.append(f"where {name.id} gets its device dimension cannot be seen")
            return False
        for node in same:
            if isinstance(node.ctx, ast.Load) and first <= node.lineno <= last:
                if not self._is_a_row_already(node, same):
                    self._use(node)
        return split

    def _reads_one_row(self, node: ast.Name) -> bool:
        """`x = unreplicate(x)` and the like: from here on the name has no device dimension."""
        statement = self.context.module.statement(node)
        return isinstance(statement, ast.Assign) and any(
            isinstance(n, ast.Name) and n.id == node.id for n in ast.walk(statement.value)
        )

    def _is_a_row_already(self, node: ast.Name, same: list[ast.Name]) -> bool:
        """Whether `x = unreplicate(x)` always comes before `node`, and nothing in between."""
        module = self.context.module
        start = module.statement(node).lineno
        stores = [n for n in same if isinstance(n.ctx, ast.Store) and n.lineno < start]
        last = max(stores, key=lambda n: n.lineno, default=None)
        if last is None or not self._reads_one_row(last):
            return False
        value = module.statement(last).value  # type: ignore[attr-defined]
        if isinstance(value, ast.Call) and self._is_a_step(value.func):
            return False
        if replicated_part(self.context, value) or sharded_part(self.context, value):
            return False
        block = module.parents.get(module.statement(last), module.tree)
        return block is module.tree or any(n is node for n in ast.walk(block))

    def _repeats(self, node: ast.AST, call: ast.AST) -> bool:
        """Whether a loop around `node` comes back to `call`."""
        loop = self.context.module.enclosing(node, ast.For | ast.While)
        while loop is not None:
            if any(n is call for n in ast.walk(loop)):
                return True
            loop = self.context.module.enclosing(loop, ast.For | ast.While)
        return False

    def _binding(self, node: ast.Name) -> tuple[Edit | None, str | None]:
        """The edit for an assignment to a variable, and how it adds a device dimension."""
        module = self.context.module
        statement = module.statement(node)
        value = statement.value if isinstance(statement, ast.Assign) else None
        if value is None:
            return None, None
        if isinstance(value, ast.Call) and self._is_a_step(value.func):
            return None, "result"
        copied, split = replicated_part(self.context, value), sharded_part(self.context, value)
        part, how = (copied, "copied") if copied is not None else (split, "split")
        if part is None:
            return None, None
        if isinstance(part, ast.Name) and part.id == node.id:
            return DropStatement(span=self.context.span(statement)), how
        return self._keep(value, part), how

    def _use(self, node: ast.Name) -> None:
        """Finds the edit for a read of a variable that has a row for each device."""
        context, module = self.context, self.context.module
        parent = module.parents[node]
        whole: ast.AST = node
        while isinstance(parent, ast.Subscript) and isinstance(
            module.constant(parent.slice), str
        ):
            whole, parent = parent, module.parents[parent]
        if isinstance(parent, ast.Call):
            name = module.qualified(parent.func)
            if self._is_a_step(parent.func):
                return
            first = name in TREE_MAPS and len(parent.args) == 2 and is_first_row(parent.args[0])
            if name in UNREPLICATES or first:
                self._unwrap(parent, whole)
                return
            if replicated_part(context, parent) is whole or (
                sharded_part(context, parent) is whole
            ):
                return
        if isinstance(parent, ast.Subscript) and module.constant(parent.slice) == 0:
            if whole is not node or is_number(context, parent):
                self._unwrap(parent, whole)
                return
        if self._is_inside_a_shard(node):
            return
        user = ast.unparse(parent if isinstance(parent, ast.expr) else whole)
        self.reasons.append(f"the use of {node.id} in `{user}` is not understood")

    def _is_inside_a_shard(self, node: ast.Name) -> bool:
        parent = self.context.module.parents.get(node)
        while parent is not None and not isinstance(parent, ast.stmt):
            part = sharded_part(self.context, parent)
            if isinstance(part, ast.Name) and part.id == node.id:
                return True
            parent = self.context.module.parents.get(parent)
        return False

    def _unwrap(self, node: ast.AST, part: ast.AST) -> None:
        module = self.context.module
        statement = module.parents[node]
        if isinstance(statement, ast.Assign) and isinstance(part, ast.Name):
            targets = statement.targets
            if len(targets) == 1 and ast.unparse(targets[0]) == part.id:
                self.edits.append(DropStatement(span=self.context.span(statement)))
                return
        self.edits.append(self._keep(node, part))

    def _keep(self, node: ast.AST, part: ast.AST) -> Keep:
        return Keep(span=self.context.span(node), part=self.context.span(part))

    def _is_a_step(self, node: ast.AST) -> bool:
        return self.context.maps.resolve(node) is not None

    def _is_a_mean(self, place: int, count: int) -> bool:
        """Whether the function's result at `place` is the same on every replica."""
        function = self.mapped.function
        returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)]  # type: ignore
        returns = [r for r in returns if self.context.module.enclosing(
            r, ast.FunctionDef) is function]  # fmt: skip
        if len(returns) != 1 or returns[0].value is None:
            return False
        value: ast.AST = returns[0].value
        if isinstance(value, ast.Tuple):
            if len(value.elts) != count:
                return False
            value = value.elts[place]
        return all(self._is_mean_value(v) for v in self._last_values(value))

    def _last_values(self, value: ast.AST) -> Iterator[ast.AST]:
        if not isinstance(value, ast.Name):
            yield value
            return
        assigned = [
            n.value
            for n in ast.walk(self.mapped.function)  # type: ignore[arg-type]
            if isinstance(n, ast.Assign)
            for t in n.targets
            if ast.unparse(t) == value.id
        ]
        # The last in the text is the last to run, in a body without branches.
        yield assigned[-1] if assigned else value

    def _is_mean_value(self, value: ast.AST) -> bool:
        if isinstance(value, ast.Dict):
            return all(self._is_mean_value(v) for v in value.values)
        if isinstance(value, ast.Name):
            found = list(self._last_values(value))
            return found[0] is not value and self._is_mean_value(found[0])
        return isinstance(value, ast.Call) and self.context.maps.collective(value) in MEANS

    def _make(self) -> None:
        context, mapped = self.context, self.mapped
        source, needs = context.reach(mapped.node, "compat.global_view")
        self.edits.append(
            SetExpression(span=context.span(mapped.callee), source=source, needs=needs)
        )
        drop = tuple(k for k in ("in_axes", "out_axes") if k in mapped.keywords)
        # By default global_view splits all arguments but the first.
        usual = self.batches == set(range(1, self.count))
        places = ", ".join(map(str, sorted(self.batches)))
        places = places if len(self.batches) == 1 else f"({places})"
        add = () if usual else (("batch_argnums", places),)
        if (drop or add) and isinstance(mapped.node, ast.Call):
            self.edits.append(EditCall(span=context.span(mapped.node), drop=drop, add=add))


def _is_plain(axes: object) -> bool:
    if isinstance(axes, tuple | list):
        return all(map(_is_plain, axes))
    return axes is None or (axes == 0 and not isinstance(axes, bool))


def _names(target: ast.AST) -> list[ast.Name] | None:
    """The names of an assignment's target, in order; nested ones are not understood."""
    if isinstance(target, ast.Name):
        return [target]
    if isinstance(target, ast.Tuple) and all(isinstance(e, ast.Name) for e in target.elts):
        return [e for e in target.elts if isinstance(e, ast.Name)]
    return None


def _bound_in(module, name: ast.Name):
    scope = module.scopes.get(name)
    while scope is not None and name.id not in scope.names:
        scope = scope.parent
    return scope
