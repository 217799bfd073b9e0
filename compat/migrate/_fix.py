"""Rewrites the text of one module until nothing is left to rewrite."""

from compat.migrate._check import check_module, worth_reading
from compat.migrate._edits import ChangeImport
from compat.migrate._finding import Context
from compat.migrate._imports import unused_imports
from compat.migrate._maps import Maps
from compat.migrate._meshdp import plan_steps
from compat.migrate._renames import Mode
from compat.migrate._rewrite import rewrite
from compat.migrate._scopes import Module, parse
from compat.migrate._versions import NEWEST

# An edit may uncover another one inside it; each pass goes one level deeper.
_PASSES = 20


def fix_source(
    source: str,
    mode: Mode = "compat",
    version: tuple[int, int] = NEWEST,
    *,
    keep_imports: bool = False,
) -> str:
    """Rewrites `source` for JAX `version`; fixing the result again changes nothing.

    **Arguments:**

    - `source`: a Python module.
    - `mode`: `"compat"` makes it run by the smallest change, `"jax"` uses only what JAX has,
        `"meshdp"` also takes recognised training steps out of pmap.
    - `version`: major and minor number of the JAX to run on.
    - `keep_imports`: leave imports that are no longer used (for modules that re-export them).

    **Raises:**

    - `SyntaxError`: if `source` is not Python.
    - `ImportError`: if something is to be rewritten and libcst is not installed.
    """
    if not worth_reading(source):
        return source
    module = Module(source)
    text = source
    if mode == "meshdp":
        context = Context(module, Maps(module), mode, version)
        edits = plan_steps(context)
        if edits:
            text = rewrite(text, edits)
    for _ in range(_PASSES):
        module = Module(text)
        edits = [e for f in check_module(module, mode, version) for e in f.edits]
        if not edits:
            break
        # Imports go last: an edit that has to wait for another may still need their names.
        going = [e for e in edits if isinstance(e, ChangeImport) and e.new in ("", "jax")]
        new = rewrite(text, [e for e in edits if e not in going] or going)
        if new == text:
            break
        text = new
    if text != source and not keep_imports:
        unused = unused_imports(source, text)
        if unused:
            text = rewrite(text, unused)
    parse(text)
    return text
