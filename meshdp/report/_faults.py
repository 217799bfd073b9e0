"""What is wrong with what a report is given."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from meshdp.report._devices import Device

ROLES = ("parameters", "optimizer state", "batch", "other")
_SPEEDS = ("flops", "memory", "link", "network")


def check_options(
    mesh: Any, device: Any, roles: Mapping[str, str] | None, seconds: float | None
) -> None:
    """Checks the options of `report` and `report_compiled`.

    **Raises:**

    - `TypeError`: `mesh` is no mesh, or `device` no `Device`.
    - `ValueError`: a role, a pattern, a speed or a time that cannot be.
    """
    kinds, values = [], []
    if mesh is not None and not isinstance(mesh, Mesh):
        kinds.append(f"  `mesh` must be a jax.sharding.Mesh, or None; got {mesh!r}")
    if device is not None and not isinstance(device, Device):
        kinds.append(
            "  `device` must be a meshdp.Device(kind=..., flops=..., memory=..., link=..., "
            f"network=...), or None; got {device!r}"
        )
    elif device is not None:
        for name in _SPEEDS:
            speed = getattr(device, name)
            if not speed > 0:
                values.append(f"  `device.{name}` must be above 0; got {speed!r}")
    for pattern, role in (roles or {}).items():
        try:
            re.compile(pattern)
        except re.error as e:
            values.append(f"  `roles`: {pattern!r} is not a regular expression: {e}")
        if role not in ROLES:
            values.append(
                f"  `roles`: {pattern!r} has the role {role!r}; there are {', '.join(ROLES)}"
            )
    if seconds is not None and not seconds > 0:
        values.append(f"  `seconds` must be a measured time above 0; got {seconds!r}")
    if kinds or values:
        raise (TypeError if kinds else ValueError)(
            "The options of the report are wrong:\n" + "\n".join(kinds + values)
        )


def report_fields(text: str, kind: type) -> dict[str, Any]:
    """The fields of the dataclass `kind` that `Report.to_json` wrote.

    **Raises:**

    - `ValueError`: if the text is anything else.
    """
    why = ""
    fields: Any = None
    try:
        fields = json.loads(text)
    except ValueError as e:
        why = str(e)
    else:
        if not isinstance(fields, dict):
            why = f"a report is an object; this is {type(fields).__name__}"
        else:
            missing = [
                f.name
                for f in dataclasses.fields(kind)
                if f.name not in fields and f.default is dataclasses.MISSING
            ]
            why = f"it has no {', '.join(map(repr, missing))}" if missing else ""
    if why:
        raise ValueError(
            f"This text is not what Report.to_json wrote: {why}. Write it again with "
            "path.write_text(report.to_json())."
        )
    return fields
