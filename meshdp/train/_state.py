"""What a training run carries from step to step."""

from typing import Any

import jax
import jax.tree_util as jtu

from .. import _tree
from ._guard import Guard

_FIELDS = ("model", "opt_state", "guard", "model_state", "step", "key")


@jtu.register_pytree_with_keys_class
class TrainState(_tree.Flat):
    """The model, the optimizer's state, the number of steps taken and the PRNG key.

    A pytree. One that comes out of a step is built only when somebody asks for its model or
    its `opt_state`: until then it is a list of arrays, so that passing it to the next step
    costs no Python per layer.

    - `model`: the pytree that the loss gets, sharded by the layout.
    - `opt_state`: of optax; each leaf lies as its parameter does.
    - `step`: int32 scalar, the number of steps taken, skipped ones included.
    - `key`: the PRNG key of the run. It never changes; a step's keys are folded out of it.
    - `guard`: a `Guard`, what is remembered of steps that were not finite; replicated.
    - `model_state`: what a stateful model carries on, such as running averages; replicated.
        `None` for other models.
    """

    __slots__ = ("_fields",)

    def __init__(
        self,
        model: Any,
        opt_state: Any,
        step: Any,
        key: Any,
        guard: Guard | None = None,
        model_state: Any = None,
    ):
        self._fields = (model, opt_state, guard, model_state, step, key)
        self._flat = None

    @classmethod
    def from_flat(cls, arrays: list[Any], structure: _tree.Structure) -> "TrainState":
        """The state of this structure, not yet built."""
        self = object.__new__(cls)
        self._fields, self._flat = None, (arrays, structure)
        return self

    def _built(self) -> tuple[Any, ...]:
        flat = self._flat
        if flat is not None:
            arrays, structure = flat
            self._fields = structure.join(arrays)._fields
            # What has been handed out can be changed in place, as optax's hyperparameters are.
            self._flat = None
        return self._fields

    def _last(self, i: int) -> Any:
        flat = self._flat
        return self._fields[i] if flat is None else flat[0][i]

    model = property(lambda self: self._built()[0])
    opt_state = property(lambda self: self._built()[1])
    guard = property(lambda self: self._built()[2])
    model_state = property(lambda self: self._built()[3])
    # The last two leaves, for loops that read the step each time.
    step = property(lambda self: self._last(-2))
    key = property(lambda self: self._last(-1))

    def replace(self, **fields: Any) -> "TrainState":
        """A copy with other fields."""
        unknown = sorted(set(fields) - set(_FIELDS))
        if unknown:
            raise ValueError(
                f"A TrainState has no {', '.join(unknown)}; it has {', '.join(_FIELDS)}."
            )
        return TrainState(**{**dict(zip(_FIELDS, self._built(), strict=True)), **fields})

    def __repr__(self) -> str:
        model, _, _, _, step, _ = self._built()
        shapes = [x for x in jax.tree.leaves(model) if _tree.is_array(x)]
        count = sum(x.size for x in shapes)
        when = step if isinstance(step, (int, jax.ShapeDtypeStruct)) else "..."
        return f"TrainState({type(model).__name__} of {count:,} numbers, step={when})"

    def tree_flatten_with_keys(self):
        fields = self._built()
        return tuple((jtu.GetAttrKey(n), f) for n, f in zip(_FIELDS, fields, strict=True)), None

    def tree_flatten(self):
        return self._built(), None

    @classmethod
    def tree_unflatten(cls, _, fields):
        self = object.__new__(cls)
        self._fields, self._flat = tuple(fields), None
        return self
