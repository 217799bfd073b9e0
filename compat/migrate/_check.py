"""All findings of one module."""

import re

from compat.migrate._find_calls import find_calls
from compat.migrate._find_maps import find_maps
from compat.migrate._find_names import find_names
from compat.migrate._find_values import find_values
from compat.migrate._finding import Context, Finding
from compat.migrate._maps import Maps
from compat.migrate._renames import Mode
from compat.migrate._scopes import Module
from compat.migrate._versions import NEWEST

_NOQA = re.compile(r"#\s*noqa(?P<codes>:\s*[A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*)?", re.I)
_WORTH_READING = ("jax", "flax", "compat", "device_buffer")


def worth_reading(source: str) -> bool:
    """Whether anything can be found: a text search that saves parsing most files."""
    return any(word in source for word in _WORTH_READING)


def check_source(
    source: str, mode: Mode = "compat", version: tuple[int, int] = NEWEST
) -> list[Finding]:
    """Finds what is wrong with `source` on JAX `version`, in the order of the text.

    **Arguments:**

    - `source`: a Python module.
    - `mode`: what the edits of each finding aim at.
    - `version`: major and minor number of the JAX judged against.

    **Raises:**

    - `SyntaxError`: if `source` is not Python.
    """
    if not worth_reading(source):
        return []
    return check_module(Module(source), mode, version)


def check_module(module: Module, mode: Mode, version: tuple[int, int]) -> list[Finding]:
    """As `check_source`, of a module that has been parsed."""
    context = Context(module, Maps(module), mode, version)
    found: dict[tuple[str, tuple[int, ...]], Finding] = {}
    for finding in (
        *find_names(context),
        *find_calls(context),
        *find_maps(context),
        *find_values(context),
    ):
        place = (finding.rule.code, finding.span)
        # Two finders may see one fault; the one that can mend it knows more.
        if place not in found or (finding.edits and not found[place].edits):
            found[place] = finding
    kept = [f for f in found.values() if not silenced(module, f.span[0], f.rule.code)]
    return sorted(kept, key=lambda f: (f.span[:2], f.rule.code))


def silenced(module: Module, line: int, code: str) -> bool:
    """Whether a `# noqa` of that line covers `code`."""
    match = _NOQA.search(module.lines[line - 1])
    if match is None:
        return False
    codes = match["codes"]
    return codes is None or code in codes.upper()
