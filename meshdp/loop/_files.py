"""Checkpoints as folders: which there are, which to keep, what to do with damaged ones."""

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("meshdp")

SIZES = "sizes.json"
STEP = re.compile(r"\d+")
UNFINISHED = re.compile(r"\d+\.orbax-checkpoint-tmp.*")


def steps(directory: Path) -> list[int]:
    """Of the checkpoints that were written to their end, in order."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if STEP.fullmatch(p.name))


def unfinished(directory: Path) -> list[Path]:
    """Checkpoints that were not written to their end, in order."""
    if not directory.is_dir():
        return []
    return sorted(p for p in directory.iterdir() if UNFINISHED.fullmatch(p.name))


def path(directory: Path, step: int) -> Path:
    return directory / f"{step:08d}"


def information(directory: Path, step: int) -> dict[str, Any]:
    """What was saved beside the arrays.

    **Raises:**

    - `OSError`, `ValueError`: it cannot be read.
    """
    found = json.loads((path(directory, step) / "meta" / "metadata").read_text())
    if not isinstance(found, dict) or not {"step", "tree", "checksums"} <= set(found):
        raise ValueError(f"{path(directory, step) / 'meta'} is no description of a state")
    return found


def note_sizes(directory: Path, step: int) -> None:
    """Writes down the size of each file of a checkpoint that is complete."""
    folder = path(directory, step)
    sizes = {
        str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()
    }
    half = folder / f"{SIZES}.tmp"
    half.write_text(json.dumps(sizes))
    os.replace(half, folder / SIZES)


def wrong_sizes(directory: Path, step: int) -> str:
    """What is missing or has another size than was written down; empty if nothing.

    Orbax would stumble over it too, but leave its other reads to complain later, each by
    itself. A run that was killed just after saving has written down nothing.
    """
    folder = path(directory, step)
    if not (folder / SIZES).exists():
        return ""
    for name, size in json.loads((folder / SIZES).read_text()).items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"the file {name} is missing"
        if found != size:
            return f"the file {name} has {found} bytes, of {size}"
    return ""


def metric(information: Mapping[str, Any], name: str) -> float | None:
    """Of the evaluation at this checkpoint; `None` if there was none, or it is not finite."""
    value = (information.get("evaluation") or {}).get(name)
    finite = isinstance(value, (int, float)) and value - value == 0
    return value if finite else None


def superfluous(
    scores: Mapping[int, float | None], keep: int, best: int, lower_is_better: bool
) -> list[int]:
    """The steps whose checkpoints need not be kept, of those with these scores."""
    ordered = sorted(scores)
    kept = set(ordered[len(ordered) - keep :] if keep < len(ordered) else ordered)
    scored = [(s if lower_is_better else -s, n) for n, s in scores.items() if s is not None]
    kept |= {n for _, n in sorted(scored)[:best]}
    return [n for n in ordered if n not in kept]


def remove(directory: Path, step: int) -> threading.Thread:
    """Removes a checkpoint; half removed it has another name."""
    aside = path(directory, step).with_suffix(".deleting")
    os.rename(path(directory, step), aside)
    thread = threading.Thread(target=shutil.rmtree, args=(aside, True), daemon=True)
    thread.start()
    return thread


def set_aside(old: Path, suffix: str) -> Path | None:
    """Gives a checkpoint another name, and tells it; `None` if that is not allowed."""
    for n in range(1, 1000):
        new = old.with_name(f"{old.name.partition('.')[0]}{suffix}{f'-{n}' if n > 1 else ''}")
        if new.exists():
            continue
        try:
            os.rename(old, new)
        except OSError:
            return None
        return new
    return None
