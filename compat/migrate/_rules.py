"""Every finding that `check` can make, one `Rule` each."""

import dataclasses
from typing import Literal

Severity = Literal["breaks", "differs", "slow", "old"]

SEVERITIES: dict[Severity, str] = {
    "breaks": "breaks on today's JAX",
    "differs": "runs, and means something else than it says or once did",
    "slow": "right, and slower or larger than it need be",
    "old": "works today, and is on its way out",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """A kind of finding.

    `what` says what happens on today's JAX and `do` what to do about it, a sentence each.
    `{name}` stands for the offending name, `{hint}` for the replacement of a removed name,
    `{version}` for a JAX version, and other fields for what the rule found.
    """

    code: str
    severity: Severity
    title: str
    what: str
    do: str


_ALL = [
    # --- names and arguments that are gone, or going
    Rule("MD101", "breaks", "device_put_sharded and device_put_replicated are gone",
         "{name} is not in JAX 0.10 or later: it raises AttributeError.",
         "Use {short} of compat, or jax.device_put with a NamedSharding."),
    Rule("MD102", "breaks", "old tree functions are gone",
         "{name} is not in JAX {version} or later: it raises AttributeError.",
         "{hint}"),
    Rule("MD103", "breaks", "tree_multimap is gone",
         "{name} is not in JAX {version} or later: it raises AttributeError.",
         "Use jax.tree.map, which takes several trees."),
    Rule("MD104", "old", "hosts are called processes",
         "{name} warns that it will be removed.",
         "{hint}"),
    Rule("MD105", "breaks", "jax.tools.colab_tpu is gone",
         "{name} is not in JAX 0.10 or later: importing it raises ModuleNotFoundError.",
         "Remove it: a TPU runtime needs no set-up call any more."),
    Rule("MD106", "breaks", "xmap and jax.experimental.maps are gone",
         "{name} is not in JAX {version} or later.",
         "{hint}"),
    Rule("MD107", "breaks", "pjit's in_axis_resources and out_axis_resources are gone",
         "pjit raises TypeError for the argument {name}.",
         "Use jax.jit with in_shardings and out_shardings."),
    Rule("MD108", "breaks", "sharding classes are gone",
         "{name} is not in JAX {version} or later.",
         "{hint}"),
    Rule("MD109", "breaks", "names of jax.interpreters are gone",
         "{name} is not in JAX {version} or later.",
         "{hint}"),
    Rule("MD110", "breaks", "names of jax.core are gone",
         "{name} is not in JAX {version} or later.",
         "{hint}"),
    Rule("MD111", "old", "jax.experimental.shard_map is deprecated",
         "{name} works with a DeprecationWarning.",
         "Use jax.shard_map, with check_vma in place of check_rep and the mesh as a keyword."),
    Rule("MD112", "breaks", "jax.shard_map has other arguments",
         "jax.shard_map raises TypeError for {name}.",
         "Pass mesh, in_specs and out_specs as keywords, and check_vma in place of check_rep."),
    Rule("MD113", "old", "`with mesh:` is deprecated",
         "Entering a Mesh warns, and jax.jit does not take its PartitionSpecs from it.",
         "Write `with jax.set_mesh(mesh):`."),
    Rule("MD114", "breaks", "configuration options are gone",
         "The option {name} does not exist and raises AttributeError.",
         "Remove the line: the old behaviour is not to be had."),
    Rule("MD115", "breaks", "array classes are gone",
         "{name} is not in JAX {version} or later.",
         "Use jax.Array, the one class of all arrays."),
    Rule("MD116", "breaks", ".device_buffers is gone",
         "Reading .{name} of an array raises AttributeError.",
         "Use .addressable_data(i), or [s.data for s in x.addressable_shards]."),
    Rule("MD117", "breaks", "pmap lost an argument",
         "jax.pmap raises TypeError for the argument {name}.",
         "Leave it out: shapes are taken from the arguments."),
    Rule("MD118", "breaks", "soft_pmap is gone",
         "{name} is not in JAX {version} or later.",
         "Use compat.pmap, which vectorises what exceeds the number of devices."),
    Rule("MD119", "breaks", "core.axis_frame is gone",
         "{name} is not in JAX {version} or later: it raises AttributeError, not the NameError "
         "that code which probes for an axis expects.",
         "{hint}"),
    Rule("MD120", "old", "pjit is jit",
         "{name} works with a DeprecationWarning.",
         "Use jax.jit, which is the same function."),
    Rule("MD121", "breaks", "a public name is gone",
         "{name} is not in JAX {version} or later.",
         "{hint}"),
    Rule("MD122", "old", "a public name goes with a later JAX",
         "{name} is not in JAX {version} or later.",
         "{hint}"),
    Rule("MD123", "old", "jax.pmap is in maintenance",
         "jax.pmap is now a shim: it refuses inputs placed otherwise, nested maps, and more "
         "replicas than devices.",
         "Use compat.pmap, which takes them, or jax.shard_map, or meshdp.make_train_step."),
    # --- what changed meaning
    Rule("MD201", "differs", "a negative in_axes or out_axes",
         "jax.pmap with {name} gives a result of the wrong shape or an error about sharding.",
         "Count from the front, or use compat.pmap, which counts from the back."),
    Rule("MD202", "breaks", "a static argument number out of range",
         "{name} names argument {number}, and the function takes {count} positional "
         "argument{s}: ValueError at the first call.",
         "Give the place of an argument that exists, counted from 0."),
    Rule("MD203", "breaks", "a pmap inside a pmap",
         "jax.pmap refuses to run inside another pmap: ValueError about the context mesh.",
         "Use compat.pmap for both, or one mesh with two axes."),
    Rule("MD204", "breaks", "results of different devices are mixed",
         "{name} live on different device sets, and JAX refuses to combine them: ValueError.",
         "Bring both to the host first: compat.local(x), or jax.device_get(x)."),
    Rule("MD205", "breaks", "an input is committed elsewhere",
         "{name} is tied to a placement that this pmap does not want, which jax.pmap refuses: "
         "ValueError.",
         "Use compat.pmap, which moves it, or jax.device_get it first."),
    Rule("MD206", "differs", "make_mesh without axis types",
         "jax.make_mesh makes Explicit axes by default, where it once made Auto ones: "
         "shardings become part of types, and operations on them may ask for out_sharding.",
         "State axis_types, or use meshdp.make_mesh, whose axes are Auto."),
    Rule("MD207", "breaks", "a donated argument is used again",
         "{name} is donated to a mapped function and used again: its buffers are deleted.",
         "Rebind the name to the result, or copy before the call, or do not donate."),
    # --- slow
    Rule("MD301", "slow", "indexing a mapped result",
         "{name} takes a row of an array that is spread over devices: a program over all of "
         "them, some 50 times slower than reading one shard.",
         "Use compat.unreplicate(x), or x.addressable_data(0)."),
    Rule("MD302", "slow", "a tree of rows of mapped results",
         "tree_map with x[0] runs a program over all devices for each leaf of {name}.",
         "Use compat.unreplicate(tree), which reads one shard of each."),
    Rule("MD303", "slow", "flax's unreplicate",
         "flax.jax_utils.unreplicate runs an operation for each leaf, and its result stays "
         "tied to a device.",
         "Use compat.unreplicate, which reads one shard of each leaf and ties it to nothing."),
    Rule("MD304", "slow", "replicated state in a checkpoint",
         "{name} has a copy for each device, and all of them are written.",
         "Save compat.unreplicate({name})."),
    Rule("MD305", "slow", "eager operations on mapped results",
         "{name} runs eagerly on an array that is spread over devices: a program over all of "
         "them for each operation.",
         "Read the values first, with jax.device_get, or reduce inside the mapped function."),
    Rule("MD306", "slow", "flax's replicate",
         "flax.jax_utils.replicate first stacks a copy for each device on one of them.",
         "Use compat.replicate, which puts one copy on each device directly."),
    # --- wrong on any version
    Rule("MD401", "breaks", "a collective over an axis that nothing binds",
         "{name} is over axis {axis!r}, and the pmap around it binds {bound}: NameError, on "
         "any JAX.",
         "Use one name in both places."),
    Rule("MD402", "breaks", "a collective in a pmap without axis_name",
         "{name} is over axis {axis!r}, and the pmap around it has no axis_name: NameError, on "
         "any JAX.",
         "Write pmap(f, axis_name={axis!r})."),
    Rule("MD403", "differs", "a mean of means with unequal counts",
         "pmean averages a mean whose count differs between devices, on any JAX: examples "
         "weigh more on devices that have fewer.",
         "Divide psum(total) by psum(count)."),
    Rule("MD404", "differs", "the gradient of a psum-ed loss",
         "{name} is differentiated and returns a psum, on any JAX: under pmap each device's "
         "gradient comes out multiplied by the number of devices.",
         "Differentiate the local loss and psum (or pmean) the gradients."),
]  # fmt: skip

RULES: dict[str, Rule] = {rule.code: rule for rule in _ALL}
