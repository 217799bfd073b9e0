"""The collectives, with an error that explains an axis nobody bound."""

import functools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax import lax

from compat._bodies import frames


def in_pmap(axis_name: Hashable) -> bool:
    """Tells whether this runs inside a map whose axis has this name.

    True inside `pmap(f, axis_name)`, `jax.vmap(f, axis_name=...)` and `jax.shard_map` alike.
    Libraries used to ask `jax.core.axis_frame(axis_name)`.
    """
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True


class UnboundAxis(NameError):
    """A collective over an axis that no map around it has: the `NameError` that JAX raises,
    in other words."""


def explain(error: NameError, around: Sequence[tuple[Hashable, bool]]) -> NameError:
    """Says what to write. `around`: (axis name, whether the user gave it) of each map."""
    found = re.search(r"unbound axis name: (.+?)(?:\. To fix|$)", str(error))
    if isinstance(error, UnboundAxis) or not found:
        return error
    name = found[1]
    text = f"no pmap in sight has an axis called {name!r}; "
    given = [repr(axis) for axis, was_given in around if was_given]
    if not around:
        text += "collectives work only inside a function that is mapped: "
    elif not given:
        text += "this pmap was made without axis_name: "
    else:
        text += f"the axes in sight are called {', '.join(given)}: use one of these, or "
    return UnboundAxis(text + f"write pmap(f, axis_name={name!r})")


def _explained(collective: Callable) -> Callable:
    @functools.wraps(collective)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return collective(*args, **kwargs)
        except NameError as e:
            around = [(f.name, f.given) for f in frames()]
            raise explain(e, around).with_traceback(e.__traceback__) from None

    return wrapper


psum = _explained(lax.psum)
pmean = _explained(lax.pmean)
pmax = _explained(lax.pmax)
pmin = _explained(lax.pmin)
all_gather = _explained(lax.all_gather)
all_to_all = _explained(lax.all_to_all)
ppermute = _explained(lax.ppermute)
pshuffle = _explained(lax.pshuffle)
pswapaxes = _explained(lax.pswapaxes)
psum_scatter = _explained(lax.psum_scatter)
axis_index = _explained(lax.axis_index)


def axis_size(axis_name: Hashable) -> int:
    """The number of replicas along an axis, as a Python int: what `psum(1, axis)` gives."""
    return _explained(lax.axis_size)(axis_name)


def groups_need_devices(error: NotImplementedError, replicas: int, devices: int) -> Exception:
    if "axis_index_groups" not in str(error):
        return error
    return NotImplementedError(
        f"axis_index_groups need one device for each replica, but here {replicas} replicas "
        f"share {devices} devices (or are vectorised). Map over at most {devices} replicas, or "
        "map twice: pmap over the groups' axis and over the axis within each group."
    )
