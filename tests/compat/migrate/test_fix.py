"""What `fix` writes: before and after, and what it keeps."""

import textwrap

import pytest

from compat.migrate import _rewrite
from compat.migrate._fix import fix_source


def fixed(source, mode="compat"):
    return fix_source(textwrap.dedent(source).lstrip("\n"), mode)


# mode, before, after
CASES = {
    "a_use_keeps_the_alias_of_its_module": (
        "compat",
        "import jax as j\nj.tree_map(f, x)\n",
        "import jax as j\nj.tree.map(f, x)\n",
    ),
    "a_use_of_tree_util_stays_there": (
        "jax",
        "from jax import tree_util as tu\ntu.tree_multimap(f, x, y)\n",
        "from jax import tree_util as tu\ntu.tree_map(f, x, y)\n",
    ),
    "an_imported_name_is_imported_from_elsewhere": (
        "compat",
        "from jax import tree_map, jit\ntree_map(jit(f), x)\n",
        "from jax import jit\nfrom jax.tree_util import tree_map\ntree_map(jit(f), x)\n",
    ),
    "a_renamed_import_keeps_its_local_name": (
        "compat",
        "from jax.interpreters.xla import DeviceArray\nx: DeviceArray\n",
        "from jax import Array as DeviceArray\nx: DeviceArray\n",
    ),
    "an_import_is_added_once_and_after_jax": (
        "compat",
        (
            "import os\nos.environ['A'] = 'b'\nimport jax\n\n"
            "jax.device_put_sharded(x, d)\njax.device_put_replicated(x, d)\n"
        ),
        (
            "import os\nos.environ['A'] = 'b'\nimport jax\nimport compat\n\n"
            "compat.device_put_sharded(x, d)\ncompat.device_put_replicated(x, d)\njax\n"
        ),
    ),
    "an_import_follows_the_one_of_jax_itself": (
        "compat",
        "import flax\nimport jax\nimport os\nx = jax.pmap(flax.linen.jit(jax.jit))\n",
        (
            "import flax\nimport jax\nimport compat\nimport os\n"
            "x = compat.pmap(flax.linen.jit(jax.jit))\n"
        ),
    ),
    "an_import_that_is_no_longer_used_is_removed": (
        "compat",
        "import jax\nfrom flax import jax_utils\n\nx = jax_utils.replicate(jax.Array)\n",
        "import jax\nimport compat\n\nx = compat.replicate(jax.Array)\n",
    ),
    "an_import_that_was_never_used_is_kept": (
        "compat",
        "import jax, numpy\njax.tree_map(f, x)\n",
        "import jax, numpy\njax.tree.map(f, x)\n",
    ),
    "a_name_in_use_is_not_taken_for_an_import": (
        "compat",
        "import jax\ncompat = 1\njax.pmap(jax.jit(f))\n",
        "import jax\nimport compat as _compat\ncompat = 1\n_compat.pmap(jax.jit(f))\n",
    ),
    "a_future_import_and_a_docstring_stay_first": (
        "compat",
        (
            '"""Doc."""\nfrom __future__ import annotations\ndef f():\n    import jax\n'
            "    return jax.pmap(jax.jit(g))\n"
        ),
        (
            '"""Doc."""\nfrom __future__ import annotations\nimport compat\ndef f():\n'
            "    import jax\n"
            "    return compat.pmap(jax.jit(g))\n"
        ),
    ),
    "arguments_keep_their_comments_and_lines": (
        "compat",
        (
            "from jax.experimental.pjit import pjit\n"
            "f = pjit(\n    g,\n    in_axis_resources=a,  # rows\n"
            "    # columns\n    out_axis_resources = b,\n)\n"
        ),
        (
            "from jax import jit as pjit\n"
            "f = pjit(\n    g,\n    in_shardings=a,  # rows\n"
            "    # columns\n    out_shardings = b,\n)\n"
        ),
    ),
    "arguments_given_by_place_get_their_names": (
        "jax",
        (
            "from jax.experimental.shard_map import shard_map\n"
            "f = shard_map(g, mesh, P('x'), P(), check_rep=False)\n"
        ),
        (
            "from jax import shard_map\n"
            "f = shard_map(g, mesh=mesh, in_specs=P('x'), out_specs=P(), check_vma=False)\n"
        ),
    ),
    "a_shard_map_with_auto_axes_is_left_alone": (
        "jax",
        "from jax.experimental.shard_map import shard_map\nf = shard_map(g, m, a, b, auto=c)\n",
        "from jax.experimental.shard_map import shard_map\nf = shard_map(g, m, a, b, auto=c)\n",
    ),
    "a_context_mesh_that_no_spec_needs_is_left_alone": (
        "jax",
        "import jax\nm = jax.sharding.Mesh(d, 'x')\nwith m:\n    f(x)\n",
        "import jax\nm = jax.sharding.Mesh(d, 'x')\nwith m:\n    f(x)\n",
    ),
    "a_module_that_moved_is_imported_from_there": (
        "jax",
        "import jax.experimental.optimizers\njax.experimental.optimizers.adam(1)\n",
        "import jax.example_libraries.optimizers\njax.example_libraries.optimizers.adam(1)\n",
    ),
    "a_star_import_is_left_alone": (
        "compat",
        "from jax.experimental.maps import *\nMesh(d, n)\n",
        "from jax.experimental.maps import *\nMesh(d, n)\n",
    ),
    "shardings_given_by_place_get_their_names": (
        "jax",
        "from jax.experimental import pjit\nf = pjit.pjit(g, a, b)\n",
        ("import jax\nf = jax.jit(g, in_shardings=a, out_shardings=b)\n"),
    ),
    "a_removed_argument_goes_with_its_comma": (
        "compat",
        "from compat import pmap\npmap(f, devices=d, global_arg_shapes=s)\n",
        "from compat import pmap\npmap(f, devices=d)\n",
    ),
    "a_statement_that_goes_leaves_its_comments": (
        "compat",
        "import jax\nif tpu:\n    # Set up.\n    jax.config.update('jax_array', True)\njax\n",
        "import jax\nif tpu:\n    pass\n    # Set up.\njax\n",
    ),
    "a_comment_above_a_statement_that_goes_stays_above_the_next": (
        "compat",
        "import jax\n# Old flags.\njax.config.update('jax_array', True)\n\nx = jax\n",
        "import jax\n# Old flags.\n\nx = jax\n",
    ),
    "a_context_mesh_is_set": (
        "jax",
        (
            "import jax\nfrom jax.sharding import Mesh\nm = Mesh(d, 'x')\n"
            "with m, open(p) as f:\n    jax.jit(g, in_shardings=s)(f)\njax\n"
        ),
        (
            "import jax\nfrom jax.sharding import Mesh\nm = Mesh(d, 'x')\n"
            "with jax.set_mesh(m), open(p) as f:\n    jax.jit(g, in_shardings=s)(f)\njax\n"
        ),
    ),
    "a_context_mesh_around_a_map_is_left_alone": (
        "jax",
        (
            "import jax\nm = jax.sharding.Mesh(d, 'x')\np = jax.pmap(f)\n"
            "with m:\n    p(x, in_shardings=1)\n"
        ),
        (
            "import jax\nm = jax.sharding.Mesh(d, 'x')\np = jax.pmap(f)\n"
            "with m:\n    p(x, in_shardings=1)\n"
        ),
    ),
    "buffers_are_read_by_place": (
        "jax",
        (
            "import jax\ny = jax.jit(f)(x)\n"
            "b = y.device_buffers[0], y.device_buffers, y.device_buffer\n"
        ),
        (
            "import jax\ny = jax.jit(f)(x)\nb = y.addressable_data(0), "
            "[s.data for s in y.addressable_shards], y.addressable_data(0)\n"
        ),
    ),
    "edits_inside_edits_are_all_made": (
        "compat",
        (
            "import jax\np = jax.pmap(f)\n"
            "s = jax.tree_map(lambda x: x[0], p(jax.tree_map(g, x)))\njax\n"
        ),
        (
            "import jax\nimport compat\np = compat.pmap(f)\n"
            "s = compat.unreplicate(p(jax.tree.map(g, x)))\njax\n"
        ),
    ),
    "parentheses_and_odd_spacing_stay": (
        "compat",
        "import jax\nx = ( jax.tree_map )( f ,y )  ;z = 1\n",
        "import jax\nx = ( jax.tree.map )( f ,y )  ;z = 1\n",
    ),
    "a_probe_for_an_axis_becomes_a_question": (
        "compat",
        (
            "from jax import core\ndef f(x, name):\n    try:\n        # Are we inside?\n"
            "        core.axis_frame(name)\n        return g(x, name)  # yes\n"
            "    except NameError:\n        # No.\n        return x\n"
        ),
        (
            "import compat\ndef f(x, name):\n    if compat.in_pmap(name):\n"
            "        # Are we inside?\n"
            "        return g(x, name)  # yes\n"
            "    else:\n        # No.\n        return x\n"
        ),
    ),
    "a_probe_that_does_more_is_left_alone": (
        "compat",
        (
            "from jax import core\ntry:\n    core.axis_frame(n)\n    a()\n    b()\n"
            "except NameError:\n    c()\n"
        ),
        (
            "from jax import core\ntry:\n    core.axis_frame(n)\n    a()\n    b()\n"
            "except NameError:\n    c()\n"
        ),
    ),
    "an_element_of_a_tuple_is_not_taken_for_a_row": (
        "compat",
        (
            "import compat\np = compat.pmap(f)\ns, m = p(s, b)\nn = s.norm[0]\nl = m['a'][0]\n"
            "i = int(s.step[0])\n"
        ),
        (
            "import compat\np = compat.pmap(f)\ns, m = p(s, b)\nn = s.norm[0]\nl = m['a'][0]\n"
            "i = int(compat.unreplicate(s.step))\n"
        ),
    ),
    "a_core_name_finds_its_new_module": (
        "jax",
        "from jax import core\np = core.Primitive('p')\na = core.ShapedArray\n",
        (
            "from jax import core\nimport jax.extend.core\n"
            "p = jax.extend.core.Primitive('p')\na = core.ShapedArray\n"
        ),
    ),
    "code_for_several_versions_is_left_alone": (
        "compat",
        "import jax\nm = jax.tree.map if hasattr(jax, 'tree') else jax.tree_map\n",
        "import jax\nm = jax.tree.map if hasattr(jax, 'tree') else jax.tree_map\n",
    ),
    "silenced_code_is_left_alone": (
        "compat",
        "import jax\njax.tree_map(f, x)  # noqa: MD102\n",
        "import jax\njax.tree_map(f, x)  # noqa: MD102\n",
    ),
    "jax_mode_leaves_what_jax_has_no_equal_for": (
        "jax",
        "import jax\njax.device_put_replicated(jax.tree_map(f, x), d)\n",
        "import jax\njax.device_put_replicated(jax.tree.map(f, x), d)\n",
    ),
    "carriage_returns_stay": (
        "compat",
        "import jax\r\njax.tree_map(f, x)\r\nfrom jax import tree_leaves, jit\r\n",
        (
            "import jax\r\njax.tree.map(f, x)\r\nfrom jax import jit\r\n"
            "from jax.tree_util import tree_leaves\r\n"
        ),
    ),
    "what_is_imported_in_a_line_is_imported_there": (
        "jax",
        (
            "def f(x): from jax import tree_map; return tree_map(abs, x)\n"
            "from jax import tree_map, jit; g = tree_map\n"
        ),
        (
            "def f(x): from jax.tree_util import tree_map; return tree_map(abs, x)\n"
            "from jax import jit; from jax.tree_util import tree_map; g = tree_map\n"
        ),
    ),
    "an_import_is_added_before_its_first_use": (
        "compat",
        "from flax import jax_utils\nx = jax_utils.replicate(1)\nimport jax\ny = jax\n",
        "import compat\nx = compat.replicate(1)\nimport jax\ny = jax\n",
    ),
    "a_module_is_imported_before_its_first_use": (
        "jax",
        "from jax.lib import xla_bridge\nb = xla_bridge.get_backend()\nfrom jax import jit\n",
        (
            "import jax.extend.backend\nb = jax.extend.backend.get_backend()\n"
            "from jax import jit\n"
        ),
    ),
    "an_import_in_lines_keeps_lines_and_comments": (
        "jax",
        (
            "from jax import (\n    tree_map,  # trees\n    jit,  # compiled\n"
            "    tree_leaves,  # noqa: F401\n)\n"
        ),
        (
            "# trees\nfrom jax import (\n    jit,  # compiled\n)\n"
            "from jax.tree_util import tree_map, tree_leaves\n"
        ),
    ),
    "comments_inside_what_is_replaced_go_above_it": (
        "compat",
        (
            "import compat\np = compat.pmap(f)\nif x:\n"
            "    y = compat.tree_map(\n        lambda v: v[0],  # first\n        p(x),\n    )\n"
        ),
        (
            "import compat\np = compat.pmap(f)\nif x:\n"
            "    # first\n    y = compat.unreplicate(p(x))\n"
        ),
    ),
    "the_comment_beside_a_statement_that_goes_stays": (
        "compat",
        "import jax\njax.config.update('jax_array', True)  # new arrays\nx = jax\n",
        "import jax\n# new arrays\nx = jax\n",
    ),
    "a_name_that_may_be_none_instead_is_read": (
        "jax",
        "try:\n    import jax\nexcept ImportError:\n    jax = None\njax.tree_map(f, x)\n",
        "try:\n    import jax\nexcept ImportError:\n    jax = None\njax.tree.map(f, x)\n",
    ),
    "an_old_escape_is_no_error": (
        "jax",
        "import jax\nr = '\\d'\njax.tree_map(f, x)\n",
        "import jax\nr = '\\d'\njax.tree.map(f, x)\n",
    ),
    "an_import_stays_until_nothing_needs_it": (
        "jax",
        (
            "import jax\nfrom jax.experimental import maps\n"
            "with maps.Mesh(d, n):\n    jax.jit(f, in_shardings=s)\n"
        ),
        (
            "import jax\nwith jax.set_mesh(jax.sharding.Mesh(d, n)):\n"
            "    jax.jit(f, in_shardings=s)\n"
        ),
    ),
    "tabs_stay": (
        "compat",
        "import jax\nif x:\n\tjax.tree_map(f, x)\n",
        "import jax\nif x:\n\tjax.tree.map(f, x)\n",
    ),
    "a_file_without_jax_is_returned_as_it_is": ("compat", "def f( x ):pass", "def f( x ):pass"),
}


@pytest.mark.parametrize(("mode", "before", "after"), CASES.values(), ids=CASES.keys())
def test_fix(mode, before, after):
    # A trailing bare `jax` keeps the import in use on both sides.
    before += "" if not after.endswith("\njax\n") or before.endswith("\njax\n") else "jax\n"
    once = fix_source(before, mode)
    assert once == after
    assert fix_source(once, mode) == once


def test_without_libcst_the_error_says_how_to_install_it(monkeypatch):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(_rewrite.importlib, "import_module", refuse)
    with pytest.raises(ImportError) as e:
        fix_source("import jax\njax.tree_map(f, x)\n")
    assert str(e.value) == (
        "`python -m compat fix` rewrites with libcst, which is not installed. "
        "Install it with: pip install 'meshdp[migrate]'"
    )
