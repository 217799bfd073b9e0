"""What `distributed` and its steps say when they cannot do as asked."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import meshdp

X = np.ones((16, 4), np.float32)


def step_on(body, **options):
    body.__qualname__ = "train"
    return meshdp.distributed(body, mesh=meshdp.make_mesh(data=4, fsdp=2), **options)


def words(error, call, *args, **options):
    with pytest.raises(error) as e:
        call(*args, **options)
    return str(e.value)


def test_options_of_the_wrong_type_are_named_together():
    message = words(TypeError, meshdp.distributed, mesh={"data": 8}, layout=P(), batch="data")
    assert message == (
        "These options have the wrong type:\n"
        "  mesh: {'data': 8}; it takes a Mesh: meshdp.make_mesh(data=4, fsdp=2)\n"
        f"  layout: {P()}; it takes a Layout: meshdp.fsdp()\n"
        '  batch: \'data\'; it takes a PartitionSpec: P(("data", "fsdp"))'
    )


def test_a_mesh_without_the_axes_of_the_batch_is_refused_at_once():
    own = Mesh(np.array(jax.devices()), ("rows",), axis_types=(AxisType.Auto,))
    assert words(ValueError, meshdp.distributed, lambda w, x: (w, x), mesh=own) == (
        f"batch={P(('data', 'fsdp'))} names 'data', 'fsdp', but the mesh has 'rows'. Take a "
        "mesh of meshdp.make_mesh, which has every axis, or give batch=P('rows')."
    )


def test_what_is_no_function_is_refused():
    assert words(TypeError, meshdp.distributed, meshdp.make_mesh(data=8)) == (
        "distributed takes a function step(state, batch, ...), not a Mesh. Options go by name: "
        "@meshdp.distributed(mesh=mesh)."
    )


def test_a_coroutine_or_a_generator_is_refused():
    async def train(w, x):
        return w, x

    def stream(w, x):
        yield w, x

    name = "test_a_coroutine_or_a_generator_is_refused.<locals>."
    assert [words(TypeError, meshdp.distributed, f) for f in (train, stream)] == [
        f"{name}train must be a plain function, so that JAX can trace it.",
        f"{name}stream must be a plain function, so that JAX can trace it.",
    ]


def test_a_method_is_refused_where_it_is_decorated():
    class Trainer:
        def train(self, w, x):
            return w, x

    name = "test_a_method_is_refused_where_it_is_decorated.<locals>.Trainer.train"
    assert words(TypeError, meshdp.distributed, Trainer.train) == (
        f"{name} is a method, and a step has the state as its first argument. Decorate the "
        "bound method, in __init__: self.train = meshdp.distributed(self.train)."
    )
    step = meshdp.distributed(Trainer().train)
    assert step(jnp.zeros(1), X)[0].shape == (1,)


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda w: f(w).sum())]
)
def test_a_step_inside_a_transformation_is_refused(transform):
    def train(w, x):
        return w, x

    step = step_on(train)
    assert words(TypeError, transform(lambda w: step(w, X)[0]), jnp.zeros(1)) == (
        "train is a step on a mesh and was called inside jit, grad, vmap or a loop of JAX. "
        "Call it from plain Python, where it is compiled by itself; step.lower(state, batch) "
        "has its program and the shapes of what it returns."
    )


def test_there_is_no_mesh_before_a_state_has_been_seen():
    def train(w, x):
        return w, x

    step = meshdp.distributed(train)
    name = "test_there_is_no_mesh_before_a_state_has_been_seen.<locals>.train"
    assert words(ValueError, lambda: step.mesh) == (
        f"{name} was given no mesh, and chooses one when it first sees a state. Call "
        ".init(...) first, or give distributed(mesh=...)."
    )


@pytest.mark.parametrize(
    "result, what",
    [
        (lambda w: w, "an array of shape (3,)"),
        (lambda w: (w, 1, 2), "a tuple of 3"),
        (lambda w: [w, 1], "a list"),
        (lambda w: None, "a NoneType"),
    ],
    ids=["state_only", "three", "list", "nothing"],
)
def test_a_step_that_does_not_return_two_things(result, what):
    message = words(ValueError, step_on(lambda w, x: result(w)), jnp.zeros(3), X)
    assert message == (
        "train must return (state, aux), a tuple of two, but it returned "
        f"{what}. Write `return new_state, loss`."
    )


HEAD = (
    "The step must return a state of the structure, shapes and dtypes that it was given, so "
    "that it can be called again; {} differ:\n"
)
TAIL = "\nReturn (new_state, aux) with the state first, and cast back what changed."
STATE = {"w": np.zeros((4, 2), np.float32), "b": np.zeros(2, np.float32), "n": 3, "mode": "a"}
CHANGES = {
    "structure": (
        lambda s: {"w": s["w"], "n": 3, "bias": s["b"], "mode": "a"},
        "  state['b']: gone in the new state\n  state['bias']: only in the new state",
    ),
    "shape_and_dtype_and_kind": (
        lambda s: {**s, "w": s["w"].T, "b": s["b"].astype(jnp.bfloat16), "mode": jnp.zeros(1)},
        (
            "  state['b']: was float32[2], is bfloat16[2]\n"
            "  state['w']: was float32[4, 2], is float32[2, 4]\n"
            "  state['mode']: a str became float32[1]"
        ),
    ),
    "array_to_number_of_another_dtype": (
        lambda s: {**s, "b": 1.5, "w": "lost"},
        "  state['b']: was float32[2], is float32[]\n  state['w']: was float32[4, 2], is a str",
    ),
    "number_of_another_dtype": (
        lambda s: {**s, "n": s["n"] + 0.5},
        "  state['n']: was int32[], is float32[]",
    ),
    "number_that_becomes_none": (
        lambda s: {**s, "n": None},
        "  state['n']: gone in the new state",
    ),
    "list_that_becomes_a_tuple": (
        lambda s: tuple(s.values()),
        (
            "  state['b']: gone in the new state\n"
            "  state['mode']: gone in the new state\n"
            "  state['n']: gone in the new state\n"
            "  state['w']: gone in the new state\n"
            "  state[0]: only in the new state\n"
            "  state[1]: only in the new state\n"
            "  state[2]: only in the new state\n"
            "  state[3]: only in the new state"
        ),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_state_that_cannot_be_the_next_is_described_leaf_by_leaf(case):
    change, faults = CHANGES[case]
    message = words(ValueError, step_on(lambda s, x: (change(s), None)), STATE, X)
    assert message == HEAD.format(faults.count("\n") + 1) + faults + TAIL


class Setting(eqx.Module):
    n: int


@pytest.mark.parametrize(
    "more, became",
    [
        (1, "the Python number 4, and would compile the step anew each time"),
        (jnp.int32(1), "int32[]"),
    ],
    ids=["number", "array"],
)
def test_a_number_in_a_module_is_a_setting_and_does_not_count(more, became):
    step = step_on(lambda s, x: (Setting(s.n + more), None))
    assert words(ValueError, step, Setting(3), X) == (
        f"{HEAD.format(1)}  state.n: the Python number 3 became {became}; make it an array, "
        f"jnp.asarray(3){TAIL}"
    )


def test_numbers_that_no_array_can_hold_are_named():
    step = step_on(lambda s, x: (s, None))
    assert words(ValueError, step, {"a": 2**40, "b": [1, -(2**33)], "c": 1}, X) == (
        "These Python numbers cannot be arrays:\n"
        "  state['a']: 1099511627776 is out of the range of int32\n"
        "  state['b'][1]: -8589934592 is out of the range of int32\n"
        'Make each smaller, or set jax.config.update("jax_enable_x64", True).'
    )


def test_a_structure_that_differs_in_what_has_no_path_is_printed():
    tree = jax.tree.structure
    message = words(ValueError, step_on(lambda s, x: (tuple(s), None)), [jnp.zeros(1)], X)
    faults = f"  it was {tree([0])}\n  it is  {tree((0,))}"
    assert message == HEAD.format(2) + faults + TAIL


def test_swapped_state_and_aux_are_found_out():
    message = words(ValueError, step_on(lambda w, x: (x.mean(), w)), jnp.zeros(3), X)
    assert message == HEAD.format(1) + "  state: was float32[3], is float32[]" + TAIL


def test_a_donated_state_is_refused_by_name_before_anything_runs():
    step = step_on(lambda s, x: ({**s, "w": s["w"] + 1}, None))
    old, _ = step({"w": np.zeros((4, 2), np.float32), "f": jnp.tanh}, X)
    step(old, X)
    assert words(ValueError, step, old, X) == (
        "1 of 1 arrays of the state were deleted, or donated to an earlier step, whose new "
        "state has their memory:\n"
        "  state['w']: float32[4, 2]\n"
        "Go on with the state that train returned, or give donate=False."
    )


def test_of_many_donated_arrays_the_first_eight_are_named():
    step = step_on(lambda s, x: ([w + 1 for w in s], None))
    old, _ = step([np.zeros(1, np.float32)] * 10, X)
    step(old, X)
    fresh = [*old[:9], np.zeros(1, np.float32)]
    message = words(ValueError, step, fresh, X)
    assert message.startswith("9 of 10 arrays of the state")
    assert message.splitlines()[-3:-1] == ["  state[7]: float32[1]", "  and 1 more"]


def test_leaves_that_can_be_neither_given_nor_compiled_for_are_named():
    step = step_on(lambda s, x: (s, {"names": {"a"}}))
    state = {"w": jnp.zeros(1), "seen": {"a"}, "raw": bytearray(b"b")}
    assert words(ValueError, step, state, X) == (
        "2 leaves are neither arrays nor hashable, so a program can be neither given them nor "
        "compiled for them:\n"
        "  state['raw']: a bytearray\n"
        "  state['seen']: a set\n"
        "Make each an array, or something hashable such as a tuple or a string."
    )
    assert words(ValueError, step, {"w": jnp.zeros(1)}, X).splitlines()[1] == (
        "  aux['names']: a set"
    )
    batch = {"x": X, "seen": {"a"}}
    assert words(ValueError, step, {"w": jnp.zeros(1)}, batch).splitlines()[1] == (
        "  batch['seen']: a set"
    )
    assert words(ValueError, step, {"w": jnp.zeros(1)}, X, {"a"}).splitlines()[1] == (
        "  argument 2: a set"
    )


class Opaque:
    def __init__(self, w):
        self.w, self.name = w, "opaque"


def test_arrays_inside_objects_that_jax_does_not_look_into_are_named():
    says = (
        "JAX does not look into these objects, whose arrays would be constants of the program:"
        "\n  state['a']: a Opaque, with w\n"
        "Make each class a pytree: an equinox.Module, or @jax.tree_util.register_dataclass on "
        "a dataclass."
    )
    step = step_on(lambda s, x: (s, Opaque(x)))
    make = lambda: {"a": Opaque(jnp.zeros(1)), "b": jnp.zeros(1)}
    assert words(ValueError, step, make(), X) == says
    assert words(ValueError, step.init, make) == says
    assert words(ValueError, step, jnp.zeros(1), X) == says.replace("state['a']", "aux")


def test_a_batch_that_does_not_divide_says_by_how_much():
    step = step_on(lambda w, x: (w, None))
    assert words(ValueError, step, jnp.zeros(1), {"x": np.ones((12, 2))}).splitlines()[0] == (
        "The batch has 12 rows, which do not divide over data*fsdp=8: 12 % 8 = 4."
    )


def test_a_layout_that_does_not_fit_names_the_step_and_its_mesh():
    step = step_on(lambda w, x: (w, None), layout=meshdp.by_path({"w": P("fsdp")}))
    with pytest.raises(ValueError) as e:
        step({"w": np.zeros(3)}, X)
    assert e.value.__notes__ == ["This was the state of train on a mesh of data=4, fsdp=2."]
    assert "3 % 2 = 1" in str(e.value)
