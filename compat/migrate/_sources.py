"""Python files and notebooks: found, read, and written back whole or not at all."""

import dataclasses
import io
import json
import os
import pathlib
import re
import tempfile
import tokenize
from collections.abc import Iterable

_SKIPPED = {"__pycache__", ".git", ".hg", ".ipynb_checkpoints", ".tox", ".venv", "node_modules"}
# Shell commands and magics of IPython, which are not Python.
_MAGIC = re.compile(r"^(\s*)([%!?].*|[\w.*]+\?{1,2}\s*|[\w, ]+=\s*[%!].*)$")
# Magics of a whole cell that is Python all the same.
_PYTHON_CELLS = ("%%time", "%%capture", "%%prun")
_MARK = "#__meshdp_cell__"
_MASK = "#__meshdp_magic__"


class Unreadable(Exception):
    """A file that cannot be taken as Python; the message says where and why."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The Python text of a file.

    A notebook is one module here, its code cells one after another, so that what one cell
    imports is known in the next.
    """

    path: pathlib.Path
    text: str
    encoding: str
    notebook: dict | None = None

    def place(self, line: int) -> tuple[int | None, int]:
        """The cell (counted from 1, code cells only) and the line in it; no cell in a file."""
        if self.notebook is None:
            return None, line
        cell, start = 0, 0
        for number, text in enumerate(self.text.split("\n")[:line], 1):
            if text.startswith(_MARK):
                cell, start = cell + 1, number
        return cell, line - start

    def shown(self, text: str) -> str:
        """`text` for people: magics as they are written, each cell under its number."""
        if self.notebook is None:
            return text
        first, *cells = re.split(rf"^{_MARK}\n", text, flags=re.MULTILINE)
        numbered = [f"# cell {i}\n{cell}" for i, cell in enumerate(cells, 1)]
        return _unmask("".join([first, *numbered]))

    def output(self, text: str) -> str:
        """The content of the file with `text` as its Python."""
        if self.notebook is None:
            return text
        notebook = json.loads(json.dumps(self.notebook))
        parts = re.split(rf"^{_MARK}\n?", text + "\n", flags=re.MULTILINE)
        # What was put before the first mark (an import) belongs to the first cell.
        bodies = [_unmask(p).strip("\n") for p in parts]
        cells = _code_cells(notebook)
        bodies = ["\n".join(b for b in bodies[:2] if b), *bodies[2:]]
        for cell, old, new in zip(cells, _code_cells(self.notebook), bodies, strict=True):
            if new != _cell_text(old).strip("\n"):
                listed = isinstance(old["source"], list)
                cell["source"] = re.findall(r"[^\n]*\n|[^\n]+", new) if listed else new
        raw = self.path.read_bytes().decode("utf-8")
        indent = _indent(raw)
        end = "\n" if raw.endswith("\n") else ""
        written = json.dumps(notebook, indent=indent, ensure_ascii=raw.isascii()) + end
        return written.replace("\n", "\r\n") if "\r\n" in raw else written


def find_sources(paths: Iterable[str]) -> list[pathlib.Path]:
    """Every Python file and notebook at or under `paths`, each once, sorted.

    **Raises:**

    - `FileNotFoundError`: if some of `paths` do not exist; all are named.
    """
    paths = list(paths)
    missing = [p for p in paths if not pathlib.Path(p).exists()]
    if missing:
        raise FileNotFoundError(
            f"no such file or folder: {', '.join(missing)}. "
            "Give files (.py, .ipynb) or folders that hold them."
        )
    found: dict[pathlib.Path, None] = {}
    for path in map(pathlib.Path, paths):
        if path.is_file():
            found[path] = None
            continue
        for folder, folders, files in os.walk(path):
            if "pyvenv.cfg" in files and folder != str(path):
                folders[:] = []  # a virtual environment holds other people's code
                continue
            folders[:] = sorted(f for f in folders if f not in _SKIPPED)
            for name in sorted(files):
                if name.endswith((".py", ".ipynb")):
                    found[pathlib.Path(folder, name)] = None
    # One file may have several names.
    first: dict[str, pathlib.Path] = {}
    for path in found:
        first.setdefault(os.path.realpath(path), path)
    return list(first.values())


def read_source(path: pathlib.Path) -> Source:
    """Reads a Python file in its declared encoding, or the code cells of a notebook.

    **Raises:**

    - `Unreadable`: if the file is not text, or not a notebook.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".ipynb":
            return _read_notebook(path, data)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return Source(path, data.decode(encoding), encoding)
    except (OSError, UnicodeDecodeError, SyntaxError) as e:
        raise Unreadable(f"{path}: cannot be read: {e}") from None


def write_source(source: Source, text: str) -> None:
    """Puts `text` in place of the Python of `source`, in one step.

    A reader sees the old file or the new one; a failure leaves the old one.
    """
    target = source.path.resolve()
    content = source.output(text).encode(source.encoding)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, target.stat().st_mode)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _read_notebook(path: pathlib.Path, data: bytes) -> Source:
    try:
        notebook = json.loads(data.decode("utf-8"))
        cells = [_mask(_cell_text(c)) for c in _code_cells(notebook)]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise Unreadable(f"{path}: not a Jupyter notebook (version 4): {e}") from None
    text = "".join(f"{_MARK}\n{cell.rstrip(chr(10))}\n" for cell in cells)
    return Source(path, text, "utf-8", notebook)


def _code_cells(notebook: dict) -> list[dict]:
    return [c for c in notebook["cells"] if c["cell_type"] == "code"]


def _cell_text(cell: dict) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _mask(cell: str) -> str:
    """Hides magics in comments; a cell that starts with `%%` is hidden whole."""
    lines = cell.split("\n")
    start = cell.lstrip()
    whole = start.startswith("%%") and not start.startswith(_PYTHON_CELLS)
    masked: list[str] = []
    for line in lines:
        magic = _MAGIC.match(line)
        if whole:
            masked.append(f"{_MASK}{line}")
        elif magic and not _is_open("\n".join(masked)):
            # `pass`, so that a block which holds nothing else is still a block.
            masked.append(f"{magic[1]}pass  {_MASK}{line[len(magic[1]) :]}")
        else:
            masked.append(line)
    return "\n".join(masked)


def _is_open(text: str) -> bool:
    """Whether a bracket or a string of `text` is still open at its end."""
    try:
        list(tokenize.generate_tokens(io.StringIO(text + "\n").readline))
    except tokenize.TokenError:
        return True
    except SyntaxError:  # dedents and the like, which the parser will name
        pass
    return False


def _unmask(cell: str) -> str:
    cell = re.sub(rf"^(\s*)pass  {_MASK}", r"\1", cell, flags=re.MULTILINE)
    return re.sub(rf"^{_MASK}", "", cell, flags=re.MULTILINE)


def _indent(raw: str) -> int | str | None:
    match = re.match(r"\{\r?\n(\s+)", raw)
    if match is None:
        return None
    return match[1] if "\t" in match[1] else len(match[1])
