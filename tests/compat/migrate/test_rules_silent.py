"""What the rules must leave alone: ordinary code, and code that asks for the JAX version."""

import textwrap

import pytest

from compat.migrate._check import check_source

SILENT = [
    # names that are not JAX's, or are there
    "import jax\njax.tree.map(f, x); jax.tree_util.tree_map(f, x)",
    "from mylib import tree_map, pmap\ntree_map(f, x)",
    "from .jax import device_put_sharded",
    "class jax: tree_map = 1\njax.tree_map",
    "import jax\ndef f(jax): return jax.tree_map",
    "import jax\njax = other\njax.tree_map",
    "import jax\njax.device_put(x, s)",
    "from jax.interpreters import ad, batching, mlir, pxla, xla",
    "from jax import core\ncore.ShapedArray; core.Tracer; core.eval_jaxpr",
    "from jax.extend.core import Primitive",
    "import jax\njax.process_index()",
    # written for several versions
    "import jax\nmap = jax.tree.map if hasattr(jax, 'tree') else jax.tree_map",
    ("try:\n    from jax import shard_map\n"
    "except ImportError:\n    from jax.experimental.shard_map import shard_map"),
    "import jax\nif jax.__version_info__ < (0, 6):\n    f = jax.tree_map",
    "import jax\nhasattr(jax, 'pxla') and isinstance(x, jax.pxla.ShardedDeviceArray)",
    "import jax\ngetattr(jax, 'tree_map')",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jax.random import KeyArray",
    # silenced
    "import jax\njax.tree_map(f, x)  # noqa: MD102",
    "import jax\njax.tree_map(f, x)  # noqa",
    "import jax\njax.tree_map(f, x)  # noqa: E501, MD102",
    # arguments and contexts
    "import jax\njax.jit(f, in_shardings=s)",
    "import jax\njax.shard_map(f, mesh=m, in_specs=p, out_specs=p, check_vma=False)",
    "import jax\njax.shard_map(f)",
    "import jax\nwith open('f') as f: pass\nwith jax.set_mesh(m): pass",
    "with mesh: pass  # jax",
    "import jax\njax.config.update('jax_enable_x64', True)",
    "import jax\njax.make_mesh((8,), ('x',), axis_types=t)",
    "import jax\njax.make_mesh((8,), ('x',), t)",
    "import jax\nclass A:\n    def device_buffers(self): pass\na.device_buffers",
    # maps
    "import compat\ncompat.pmap(f, out_axes=-1)",
    "import compat\ncompat.pmap(compat.pmap(f))",
    "import compat\ncompat.pmap(f)(jax.device_put(x, jax.devices()[0]))",
    "import compat\ncompat.pmap(lambda x, s: x, static_broadcasted_argnums=1)",
    "import compat\ncompat.pmap(lambda *a: a, static_broadcasted_argnums=7)",
    ("import compat\nclass A:\n    def f(self, x): pass\n    def g(self):\n"
    "        return compat.pmap(self.f, static_broadcasted_argnums=0)"),
    ("import compat\nfrom functools import partial\ndef f(a, b, c): pass\n"
    "compat.pmap(partial(f, 1), static_broadcasted_argnums=1)"),
    "import jax\ndef f(x): return x\nf = jax.pmap(  # noqa: MD123\n    f,\n    'i')",
    # results
    "import compat\np = compat.pmap(f, donate_argnums=0)\nfor b in bs:\n    s = p(s, b)",
    "import compat\np = compat.pmap(f, donate_argnums=0)\ns, m = p(s, b)\nprint(s)",
    "import compat\np = compat.pmap(f, donate_argnums=0)\ns = p(s, b)\nprint(1)\nprint(s)",
    "import compat\np = compat.pmap(f, donate_argnums=1)\nt = p(s, b)\nprint(s)",
    "import compat\nx = [1]\nprint(x[0])",
    "import compat\ny = compat.pmap(f, out_axes=None)(x)\nprint(float(y[0]))",
    "import compat\ny = compat.pmap(f, out_axes=1)(x)\nprint(float(y[0]))",
    "import compat\ny = compat.pmap(f)(x)\ny = g(y)\nprint(float(y[0]))",
    "import compat\ny = compat.pmap(lambda x: (x, x))(x)\nprint(y[0])",
    "import compat\ns = compat.pmap(f)(x)\nopt = s[0]",
    "import compat\ns = compat.pmap(f)(x)\nopt = s.norm[0]",
    "import jax\njax.tree.map(lambda x: x[0], batch)",
    "import compat, jax\ns = compat.pmap(f)(x)\njax.tree.map(lambda x: x[0] * 2, s)",
    "import compat, jax\ns = compat.unreplicate(compat.pmap(f)(x))\ns['a'][0]",
    "import compat, jax.numpy as jnp\ny = compat.pmap(f)(x)\njnp.shape(y)",
    ("import compat, jax, jax.numpy as jnp\ny = compat.pmap(f)(x)\n"
    "jnp.mean(jax.device_get(y))"),
    "import compat\na = compat.pmap(f)(x)\nb = compat.pmap(g)(x)\na + b",
    ("import compat\nfrom flax.training import checkpoints\ns = compat.replicate(s)\n"
    "checkpoints.save_checkpoint(folder, compat.unreplicate(s), 1)"),
    # axes
    "import compat, jax\ncompat.pmap(lambda x: jax.lax.pmean(x, 'i'), 'i')",
    "import compat, jax\ncompat.pmap(lambda x: jax.lax.pmean(x, 'i'), axis_name=name)",
    "import compat, jax\ncompat.pmap(lambda x: jax.lax.pmean(x, name), axis_name='i')",
    ("import compat, jax\n"
    "compat.pmap(jax.vmap(lambda x: jax.lax.pmean(x, ('i', 'j')), axis_name='j'), 'i')"),
    ("import compat, jax\nclass A:\n    def f(self, x):\n        if self.axis:\n"
    "            x = jax.lax.pmean(x, 'i')\n        return x\n    def g(self):\n"
    "        return compat.pmap(self.f)"),
    "import jax\ndef layer(x): return jax.lax.pmean(x, 'model')",
    ("from functools import partial\nimport jax, compat\n"
    "@partial(compat.pmap, axis_name='i')\n@partial(compat.pmap, axis_name='j')\n"
    "def f(x): return jax.lax.psum(x, ('i', 'j'))"),
    # means
    "from jax import lax\nimport jax.numpy as jnp\nlax.pmean(x / jnp.sum(x), 'i')",
    "from jax import lax\nimport jax.numpy as jnp\nlax.pmean(jnp.mean(x), 'i')",
    "import jax, jax.numpy as jnp\njax.lax.pmean(jnp.sum(a, axis=1) / jnp.sum(b, axis=1), 'i')",
    ("from jax import lax\nimport jax.numpy as jnp\n"
    "lax.psum(jnp.sum(l * m), 'i') / lax.psum(jnp.sum(m), 'i')"),
    ("import jax, compat\ndef step(w, x):\n    def loss_fn(w):\n"
    "        return jax.lax.pmean((w * x).mean(), 'i')\n    return jax.grad(loss_fn)(w)\n"
    "compat.pmap(step, 'i')"),
    "import jax\njax.grad(lambda w: jax.lax.psum(w, 'i'))",
]  # fmt: skip


def codes(source):
    return [f.rule.code for f in check_source(textwrap.dedent(source))]


@pytest.mark.parametrize("source", SILENT)
def test_no_rule_fires(source):
    assert codes(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import jax\nknown = {jax.jit, jax.pmap}",
        "import jax\nmock.patch(jax.pmap)\nisinstance(f, jax.pmap)",
        "import jax, functools\n@functools.wraps(jax.pmap)\ndef fake(f): pass",
        "import jax\njax.pmap.__doc__",
    ],
)
def test_a_mention_of_jax_pmap_is_not(source):
    assert codes(source) == []
