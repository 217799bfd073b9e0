"""`python -m compat doctor`: what is here, and what would break."""

import ast
import importlib.metadata as metadata
import platform
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from compat._install import REMOVED

# Still there, on every JAX we support, though deprecated.
_ALIVE = {"host_id", "host_ids", "host_count"}
_NAMES = {*REMOVED} - _ALIVE
_ELSEWHERE = {("jax.tools", "colab_tpu"), ("jax.tree_util", "tree_multimap")}
_HINT = re.compile("|".join([*_NAMES, "colab_tpu"]))


def removed_names(source: str) -> list[tuple[int, str]]:
    """`(line, name)` of everything a file uses that JAX no longer has."""
    if not _HINT.search(source):
        return []
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            if (base == "jax" and node.attr in _NAMES) or (base, node.attr) in _ELSEWHERE:
                found.append((node.lineno, f"{base}.{node.attr}"))
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                base = node.module
                if (base == "jax" and alias.name in _NAMES) or (base, alias.name) in _ELSEWHERE:
                    found.append((node.lineno, f"{base}.{alias.name}"))
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name == "jax.tools.colab_tpu"]
            found += [(node.lineno, name) for name in names]
    return sorted(set(found))


def packages() -> Iterator[tuple[str, str, list[tuple[Path, int, str]]]]:
    """`(package, version, [(file, line, name), ...])` of what is built on JAX."""
    for dist in sorted(metadata.distributions(), key=lambda d: d.name.lower()):
        needs = {re.split(r"[^A-Za-z0-9_-]", r)[0].lower() for r in dist.requires or ()}
        if not needs & {"jax", "jaxlib", "flax"} or dist.name in ("jax", "jaxlib", "meshdp"):
            continue
        found = []
        for file in dist.files or ():
            if file.suffix == ".py":
                path = Path(str(dist.locate_file(file)))
                try:
                    source = path.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue
                found += [(path, line, name) for line, name in removed_names(source)]
        yield dist.name, dist.version, found


def main() -> int:
    import jax

    print(f"Python   {platform.python_version()} on {platform.platform()}")
    for name in ("jax", "jaxlib", "meshdp", "numpy", "flax", "optax", "equinox"):
        try:
            print(f"{name:8s} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            why = "run from its sources" if name == "meshdp" else "not installed"
            print(f"{name:8s} {why}")
    try:
        kinds = Counter((d.platform, d.device_kind) for d in jax.devices())
    except RuntimeError as e:
        print(f"devices  none: {e}")
    else:
        told = ", ".join(f"{n} × {kind} ({on})" for (on, kind), n in kinds.items())
        print(f"devices  {told}")
        print(f"process  {jax.process_index()} of {jax.process_count()}")
    print("\nInstalled packages built on JAX that use names it removed:")
    guilty = [(name, version, found) for name, version, found in packages() if found]
    for name, version, found in guilty:
        print(f"  {name} {version}: {len(found)} uses")
        for path, line, what in found[:3]:
            print(f"    {path}:{line}: {what}")
    if not guilty:
        print("  none")
    else:
        print("They work under `python -m compat run` and after `compat.install()`.")
    return 0
