"""`make_train_step`: the structured step, exact on any mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .. import _spec, _tree
from .._distribute import BATCH, Distributed, _describe, check_options, spec_leaves
from .._layout import Layout, fsdp
from ._gradients import sums
from ._mean import Mean
from ._plan import Plan
from ._reduce import norm
from ._state import TrainState

GATHER = ("microbatch", "step")


def trainable(x: Any) -> bool:
    """Whether a leaf of a model gets a gradient: floating or complex arrays do."""
    return _tree.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


class TrainStep(Distributed):
    """A training step on a mesh; made by `make_train_step`, which documents it."""

    def __init__(self, loss_fn, optimizer, *, accumulate, gather, shard_update, **options):
        super().__init__(loss_fn, **options)
        self.__dict__.pop("__signature__", None)
        self._loss_fn, self._optimizer = loss_fn, optimizer
        self._accumulate, self._gather = accumulate, gather
        self._shard_update = shard_update
        self._options = {**options, "donate": False}
        self._probe: _Gradients | None = None

    def init(self, make_model: Callable, key: Any, *args: Any) -> TrainState:
        """Makes the state on the mesh, each leaf in its place from the start.

        The model is `make_model(key, *args)`, the same numbers as on one device; no leaf is
        ever whole on one device unless its spec replicates it. The optimizer's state is made
        likewise, for the floating-point arrays of the model.

        **Arguments:**

        - `make_model`: returns any pytree: an Equinox module, a dict of arrays, ...
        - `key`: a PRNG key, typed or raw. The step's own keys are folded out of it too, and
            differ from what `jax.random.split` makes of it.
        - `args`: further arguments of `make_model`; arrays are traced, the rest is static.
        """

        def make(key, *args):
            model = make_model(key, *args)
            opt_state = self._optimizer.init(trained(model))
            # `split` counts from 0, so a number that large is no sibling of the model's keys.
            run_key = jax.random.fold_in(key, 2**31 - 1)
            return TrainState(model, opt_state, jnp.zeros((), jnp.int32), run_key)

        return super().init(make, key, *args)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return self._optimizer

    def gradients(self, state: TrainState, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The gradient of the mean loss and the metrics, without a step.

        The gradients come as the model does, with `None` for what does not train, each laid
        out as the optimizer gets it. Nothing is donated; the step does not count.
        """
        if self._probe is None:
            self._probe = _Gradients(self)
        _, (grads, metrics) = self._probe(state, batch)
        return grads, metrics

    def _join(self, structure, arrays):
        return TrainState.from_flat(arrays, structure)

    def _specs(self, tree: TrainState, layout):
        """As the layout says, and ZeRO-1 splits the optimizer's state over `"data"` too."""
        found = super()._specs(tree, layout)
        opt_state = jax.tree.map(
            lambda x, s: s if s is None else self._grad_spec(s, x),
            tree.opt_state,
            found.opt_state,
        )
        return found.replace(opt_state=opt_state)

    def _body(self, state: TrainState, batch: Any):
        model, structure = _tree.split(state.model, "model")
        which, grads, grad_specs, model_specs, metrics = self._differentiate(state, batch)
        params = [
            lax.with_sharding_constraint(model[i], grad_specs[i])
            if grad_specs[i] != model_specs[i]
            else model[i]
            for i in which
        ]
        as_tree = lambda values: only(structure, which, values)
        updates, opt_state = self._optimizer.update(
            as_tree(grads), state.opt_state, as_tree(params)
        )
        new = jtu.tree_leaves(optax.apply_updates(as_tree(params), updates))
        for i, x in zip(which, new, strict=True):
            model[i] = x
        return TrainState(structure.join(model), opt_state, state.step + 1, state.key), metrics

    def _differentiate(self, state: TrainState, batch: Any):
        if not isinstance(state, TrainState):
            raise TypeError(
                f"This step takes a TrainState, not {_describe(state)}. "
                "Make one with step.init(make_model, key)."
            )
        model, structure = _tree.split(state.model, "model")
        trains = [trainable(x) for x in model]
        model_specs = self._flat_specs(state)
        grad_specs = [self._grad_spec(s, x) for s, x in zip(model_specs, model, strict=True)]
        plan = Plan(
            sizes=tuple(self.mesh.shape.items()),
            weights=tuple(model_specs),
            trains=tuple(trains),
            grads=tuple(grad_specs),
            batch=self._batch,
            accumulate=self._accumulate,
            gather=self._gather,
        )
        self._check_rows(batch)

        def loss(arrays, batch, keys):
            return checked(self._loss_fn(structure.join(arrays), batch, keys), self._name())

        key = jax.random.fold_in(state.key, state.step)
        grads, mean, aux = sums(loss, plan, self.mesh, model, batch, key)

        # Where no example counts there is nothing to learn: a gradient of 0, not 0 / 0.
        scale = jnp.where(mean.weight == 0, 0.0, 1 / mean.weight)
        grads = [(g * scale.astype(g.real.dtype)) for g in grads]
        which = [i for i, t in enumerate(trains) if t]
        metrics = {
            "loss": mean.value(),
            "weight": mean.weight,
            "grad_norm": norm(grads, [grad_specs[i] for i in which], self.mesh),
            **{name: m.value() for name, m in aux.items()},
        }
        return which, grads, grad_specs, model_specs, metrics

    def _flat_specs(self, state):
        """The spec of each array of the model."""
        found = self._specs(state, self._layout or fsdp())
        return [s for s in spec_leaves(state.model, found.model) if s is not None]

    def _grad_spec(self, spec: P, x: Any) -> P:
        n = self.mesh.shape["data"]
        if not self._shard_update or n == 1 or x.size < MIN_SHARD:
            return spec
        return widen(spec, x.shape, "data", self.mesh.shape)

    def _check_rows(self, batch):
        ways = 1
        for axis in _spec.entries(self._batch, 1)[0]:
            ways *= self.mesh.shape[axis]
        for path, x in jtu.tree_leaves_with_path(batch):
            if x.ndim == 0:
                raise ValueError(
                    f"batch{jtu.keystr(path)} is a scalar. Every array of a training batch has "
                    "the examples along its first dimension; give constants to the loss by "
                    "functools.partial."
                )
            rows = x.shape[0]
            if rows % (ways * self._accumulate):
                k = ways * self._accumulate
                raise ValueError(
                    f"batch{jtu.keystr(path)} has {rows} examples (global), which do not "
                    f"divide into accumulate={self._accumulate} microbatches on {ways} "
                    f"devices: {rows} % {k} = {rows % k}. Give {rows // k * k or k} or "
                    f"{(rows // k + 1) * k}, or pad with meshdp.pad_batch(batch, {k}) and "
                    "put the mask into the loss."
                )


# Smaller parameters are updated whole on every device: nothing would be saved.
MIN_SHARD = 2**12


class _Gradients(TrainStep):
    """A step that computes gradients and takes none of them."""

    def __init__(self, step: TrainStep):
        super().__init__(
            step._loss_fn,
            step._optimizer,
            accumulate=step._accumulate,
            gather=step._gather,
            shard_update=step._shard_update,
            **{**step._options, "mesh": step.mesh},
        )

    def _body(self, state, batch):
        which, grads, _, _, metrics = self._differentiate(state, batch)
        structure = _tree.split(state.model, "model")[1]
        return state, (only(structure, which, grads), metrics)


def widen(spec: P, shape: tuple[int, ...], axis: str, sizes) -> P:
    """Splits the first free dimension that divides over one more axis.

    The first, since a scatter along another one copies the gradient transposed on CPU.
    """
    dims = list(_spec.entries(spec, len(shape)))
    free = [d for d, e in enumerate(dims) if not e and shape[d] and shape[d] % sizes[axis] == 0]
    if not free:
        return spec
    dims[free[0]] = (axis,)
    return _spec.from_entries(dims)


def trained(model):
    return jax.tree.map(lambda x: x if trainable(x) else None, model)


def only(structure: _tree.Structure, which, values):
    leaves = [None] * (len(structure.positions) + len(structure.static))
    for i, x in zip(which, values, strict=True):
        leaves[structure.positions[i]] = x
    return jtu.tree_unflatten(structure.treedef, leaves)


def checked(out: Any, name: str) -> tuple[Mean, dict[str, Mean]]:
    """What a loss returned, as `(Mean, auxiliary Means)`, or an error that says what it is."""
    mean, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
    problems = []
    if not isinstance(mean, Mean):
        what = f"an array of shape {mean.shape}" if hasattr(mean, "shape") else _describe(mean)
        problems.append(
            f"  the loss is {what}; return meshdp.Mean.of(losses, mask), with one loss per "
            "example or token, so that sums and weights can be added up before dividing"
        )
        aux = {} if not isinstance(aux, dict) else aux
    if not isinstance(aux, dict):
        problems.append(
            f"  the auxiliary result is {_describe(aux)}; return (Mean, {{name: Mean}})"
        )
        aux = {}
    for key, m in aux.items():
        if not isinstance(m, Mean):
            problems.append(
                f"  the auxiliary {key!r} is {_describe(m)}; make it a meshdp.Mean too, since "
                "each device has only its own examples"
            )
        elif key in ("loss", "weight", "grad_norm"):
            problems.append(f"  the auxiliary {key!r} has the name of a metric; rename it")
    means = {"loss": mean, **aux} if isinstance(aux, dict) else {"loss": mean}
    for key, m in means.items():
        if isinstance(m, Mean):
            for field in ("total", "weight"):
                x = getattr(m, field)
                if x.shape != () or not jnp.issubdtype(x.dtype, jnp.number):
                    problems.append(
                        f"  the {field} of {key!r} is {x.dtype}{list(x.shape)}, not a real "
                        "scalar; Mean.of(values, mask) sums for you"
                    )
                elif jnp.issubdtype(x.dtype, jnp.complexfloating):
                    problems.append(f"  the {field} of {key!r} is complex; take its real part")
    if problems:
        raise ValueError(f"{name} must return a Mean:\n" + "\n".join(problems))
    wide = lambda x: lax.stop_gradient(x).astype(jnp.promote_types(x.dtype, jnp.float32))
    aux = {k: Mean(wide(m.total), wide(m.weight)) for k, m in aux.items()}
    total = mean.total.astype(jnp.promote_types(mean.total.dtype, jnp.float32))
    return Mean(total, wide(mean.weight)), aux


def make_train_step(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    batch: P = BATCH,
    accumulate: int = 1,
    gather: str = "microbatch",
    shard_update: bool = True,
    donate: bool = True,
) -> TrainStep:
    """Makes a training step that gives the numbers of one device on any mesh.

    ```python
    def loss_fn(model, batch, keys):
        logits = jax.vmap(model)(batch["x"], key=keys)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return meshdp.Mean.of(losses, batch["mask"])

    step = meshdp.make_train_step(loss_fn, optax.adamw(3e-4), mesh=mesh, accumulate=4)
    state = step.init(make_model, key)
    state, metrics = step(state, batch)
    ```

    The loss of a step is the sum of all totals divided by the sum of all weights, over every
    example of the global batch. Totals, weights and gradients are summed over microbatches
    and devices and divided once, so that masks, padding and the number of devices change
    nothing. Gradients are reduced over `"data"` once per step. A weight that the layout
    splits over `"fsdp"` is gathered where it is used, freed, gathered again in the backward
    pass, and its gradient is reduce-scattered (ZeRO, Rajbhandari et al. 2020, section 5); in
    a `jax.lax.scan` over stacked layers, one layer at a time.

    **Arguments:**

    - `loss_fn`: `loss_fn(model, batch, keys) -> Mean`, or `(Mean, {name: Mean})` with further
        means to report. It sees some of the examples: a part `[n, ...]` of each array of the
        batch, and `keys` of shape `[n]`, one PRNG key per example that depends on the step
        and on the example's place in the global batch, not on the device. It must treat
        examples alike, wherever they lie. Inside, `"data"` and `"fsdp"` are manual axes;
        `meshdp.constrain` speaks of the others.
    - `optimizer`: any optax transformation. Its state lies as the parameters do. It runs on
        whole (global) arrays, so whole matrices and global norms mean what they say.
    - `mesh`, `layout`, `donate`: as for `distributed`.
    - `batch`: the spec of the batch; the first dimension must be split over `"data"` and
        `"fsdp"`, further ones over other axes as you like.
    - `accumulate`: into how many microbatches each device splits its share of the batch.
    - `gather`: `"microbatch"` gathers fsdp weights and reduce-scatters their gradients with
        each microbatch: the least memory. `"step"` does both once per step: the least
        traffic, but each device holds the whole weights and gradients for the step.
    - `shard_update`: whether the optimizer's state and its work are split over `"data"` as
        well (ZeRO-1): gradients are reduce-scattered, each device updates a share, and the
        weights are gathered. The numbers are the same.

    **Returns:**

    A `TrainStep`: `step(state, batch) -> (state, metrics)`, with `.init(make_model, key)`,
    `.lower(...)`, `.mesh` and `.shardings(...)`. `metrics` has float32 scalars, still on the
    devices: `"loss"`, `"weight"` (the sum of all weights), `"grad_norm"` (of the averaged
    gradient) and the auxiliary means.

    Arrays that are not floating-point get no gradient and are never changed. A parameter that
    the loss does not use gets a gradient of zero. If all weights are zero, `"loss"` is NaN,
    the gradient is zero and the optimizer is still called.

    **Raises:**

    - `ValueError`: when called, if the loss returns anything but `Mean`s of scalars, or the
        batch does not divide.
    """
    check_options(mesh, layout, batch)
    problems = []
    if not callable(loss_fn):
        problems.append(f"  loss_fn: {_describe(loss_fn)}; it takes a function")
    if not isinstance(optimizer, optax.GradientTransformation):
        problems.append(f"  optimizer: {_describe(optimizer)}; it takes optax.adamw(3e-4)")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        problems.append(f"  accumulate: {accumulate!r}; it takes a whole number from 1")
    if gather not in GATHER:
        problems.append(f'  gather: {gather!r}; it takes "microbatch" or "step"')
    if set(_spec.entries(batch, max(len(batch), 1))[0]) != {"data", "fsdp"}:
        problems.append(
            f'  batch: {batch}; its first dimension is split over ("data", "fsdp"): '
            'P(("data", "fsdp"))'
        )
    if problems:
        raise ValueError("make_train_step cannot use these arguments:\n" + "\n".join(problems))
    return TrainStep(
        loss_fn,
        optimizer,
        mesh=mesh,
        layout=layout,
        batch=batch,
        donate=donate,
        accumulate=accumulate,
        gather=gather,
        shard_update=shard_update,
    )
