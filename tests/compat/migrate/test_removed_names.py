"""The tables of names against the JAX that runs these tests."""

import importlib
import warnings

import jax
import pytest

from compat.migrate._find_calls import GONE_OPTIONS
from compat.migrate._renames import COMPAT, HINTS, REMOVED_IN, SAME, hint, removed
from compat.migrate._versions import parse_version

RUNNING = parse_version(jax.__version__)


def look_up(name):
    """The object called `name`, as an import and attributes would find it."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def is_there(name):
    with warnings.catch_warnings():
        # What is deprecated is there.
        warnings.simplefilter("ignore")
        try:
            look_up(name)
        except (AttributeError, ImportError):
            return False
        return True


def test_what_is_listed_as_removed_by_this_jax_is_not_there():
    listed = [n for n, version in REMOVED_IN.items() if version <= RUNNING]
    assert len(listed) > 900
    assert [n for n in listed if is_there(n)] == []


def test_what_is_listed_as_removed_by_a_later_jax_is_there():
    later = [n for n, version in REMOVED_IN.items() if version > RUNNING]
    assert [n for n in later if not is_there(n)] == []


def test_names_that_are_there_are_not_listed_as_removed():
    # Found by walking the running JAX, not by reading our table.
    modules = [jax, jax.core, jax.lax, jax.numpy, jax.random, jax.tree_util, jax.sharding]
    present = [f"{m.__name__}.{n}" for m in modules for n in dir(m) if not n.startswith("_")]
    assert [n for n in present if (removed(n) or "") == n and REMOVED_IN[n] <= RUNNING] == []


@pytest.mark.filterwarnings("ignore:.*experimental.*:DeprecationWarning")
@pytest.mark.parametrize("rename", [*SAME.values(), *COMPAT.values()], ids=lambda r: r.old)
def test_a_replacement_is_there_and_not_itself_deprecated(rename):
    look_up(rename.new)
    look_up(".".join(rename.import_from))


def test_every_rename_and_hint_is_of_a_name_that_is_gone_or_deprecated():
    old = {"jax.host_count", "jax.host_id", "jax.host_ids"}
    hinted_before_its_time = {"jax.interpreters.pxla.thread_resources"}
    assert {n for n in SAME if not removed(n)} == old
    assert {n for n in HINTS if not removed(n)} == hinted_before_its_time


def test_every_option_listed_as_gone_is_gone():
    assert [o for o in sorted(GONE_OPTIONS) if o in jax.config.values] == []


def test_a_hint_reaches_what_is_below_its_name():
    assert hint("jax.tree_map") == "Write jax.tree.map."
    assert hint("jax.experimental.optimizers.adam") == (
        "Write jax.example_libraries.optimizers.adam."
    )
    assert (
        hint("jax.experimental.host_callback.call") == HINTS["jax.experimental.host_callback"]
    )
    assert hint("jax.core.gensym") == (
        "It has no public equal: see the JAX changelog for what took its place."
    )


def test_a_version_is_two_numbers_or_an_error():
    assert parse_version("0.12.0.1") == (0, 12)
    with pytest.raises(ValueError) as e:
        parse_version("newest")
    assert str(e.value) == (
        "not a JAX version: 'newest'. Write major and minor number, such as 0.12."
    )
