"""The structured step: its state, its gradients, its update."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from .. import _jaxapi, _spec, _tree
from .._distribute import Distributed, describe, spec_leaves
from . import _guard
from ._gather import Remat
from ._gradients import sums
from ._loss import checked
from ._optimizer import check_scalar_rates
from ._options import Options
from ._plan import Plan
from ._precision import as_called, batch_for, compute_types, kept
from ._reduce import squares
from ._remat import layers, policy_of
from ._state import TrainState
from ._trains import only, which
from ._watch import Named, Traced, Watch

# `split` counts from 0, so a number that large is no sibling of the model's own keys.
RUN = 2**31 - 1

# Smaller parameters are updated whole on every device: nothing would be saved.
MIN_SHARD = 2**12


class TrainStep(Distributed):
    """A training step on a mesh; made by `make_train_step`, which documents it."""

    def __init__(self, options: Options, **placement: Any):
        super().__init__(options.loss_fn, **placement)
        # The loss function's own signature is not the step's.
        self.__dict__.pop("__signature__", None)
        self._options, self._placement = options, placement
        self._probe: TrainStep | None = None
        self._said: set[str] = set()
        self._checked = False
        self._watch = Watch(self._name(), options.stop_after, options.skip)

    def init(self, make_model: Callable, key: Any, *args: Any) -> TrainState:
        """Makes the state on the mesh, each leaf in its place from the start.

        The model is `make_model(key, *args)`, the same numbers as on one device; no leaf is
        ever whole on one device unless its spec replicates it. The optimizer's state is made
        likewise, for the arrays that train.

        **Arguments:**

        - `make_model`: returns any pytree: an Equinox module, a dict of arrays, ...; of a
            stateful model, `(model, model_state)`.
        - `key`: a PRNG key, typed or raw. The step's own keys are folded out of it too, and
            differ from what `jax.random.split` makes of it.
        - `args`: further arguments of `make_model`; arrays are traced, the rest is static.
        """
        o = self._options

        def make(key, *args):
            model, carried = make_model(key, *args), None
            if o.stateful:
                if not (isinstance(model, tuple) and len(model) == 2):
                    raise ValueError(
                        "With stateful=True make_model returns (model, model_state), but it "
                        f"returned {describe(model)}. Use eqx.nn.make_with_state(Model)(key)."
                    )
                model, carried = model
            model = kept(model, o.precision)
            arrays, structure = _tree.split(model, "model")
            trained = which(model, o.trains)
            params = only(structure, trained, [arrays[i] for i in trained])
            return TrainState(
                model,
                o.optimizer.init(params),
                jnp.zeros((), jnp.int32),
                jax.random.fold_in(key, RUN),
                guard=_guard.first(o.scales) if o.skip else None,
                model_state=carried,
            )

        return super().init(make, key, *args)

    def with_arrays(self, state: TrainState) -> TrainState:
        """As it is: the numbers of a model are its settings."""
        return state

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step: `(state, metrics)`, both still on the devices."""
        names = lambda: self._trained_paths(state)
        self._watch.before(names)
        state, metrics = super().__call__(state, batch)
        self._watch.after(state, metrics, batch, names)
        return state, metrics

    def _trained_paths(self, state: TrainState) -> list[str]:
        paths = _tree.split(state.model, "model")[1].paths()
        return [paths[i] for i in which(state.model, self._options.trains)]

    @property
    def options(self) -> Options:
        """What the step was made with."""
        return self._options

    def gradients(self, state: TrainState, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The gradient of the mean loss and the metrics, without a step.

        The gradients come as the model does, with `None` for what does not train, each laid
        out as the optimizer gets it; not clipped. Nothing is donated; the step does not count.
        """
        if self._probe is None:
            self.shardings(state)  # and so a mesh is chosen
            self._probe = _Gradients(self._options, **self.elsewhere(self.mesh))
        return Distributed.__call__(self._probe, state, batch)[1]

    @property
    def placement(self) -> dict[str, Any]:
        """Where and how the step runs: its mesh, layout, batch spec and donation."""
        return {**self._placement, "mesh": self.mesh}

    @property
    def batch_spec(self) -> P:
        return self._batch

    def elsewhere(self, mesh) -> dict[str, Any]:
        """How to make the same step on another mesh, such that it donates nothing."""
        return {**self._placement, "mesh": mesh, "donate": False}

    def _prepare(self, state, batch, args, keywords):
        # A state that was put together by hand, or by a step that skips nothing.
        by_hand = isinstance(state, TrainState) and state._flat is None
        if by_hand and self._options.skip and state.guard is None:
            state = state.replace(guard=_guard.first(self._options.scales))
        return super()._prepare(state, batch, args, keywords)

    def _compiler_options(self):
        if not policy_of(self._options.remat)[0]:
            return None
        return _jaxapi.keeps_barriers(self.mesh.devices.flat[0].platform)

    def _join(self, structure, arrays):
        return TrainState.from_flat(arrays, structure)

    def _specs(self, tree: TrainState):
        """As the layout says, and ZeRO-1 splits the optimizer's state over `"data"` too."""
        check_state(tree)
        # The rest is no parameter: scalars, and what has to be the same everywhere.
        whole = lambda t: jax.tree.map(lambda x: P() if _tree.is_array(x) else None, t)
        rest = {n: getattr(tree, n) for n in ("step", "key", "guard", "model_state")}
        found = super()._specs(tree.replace(**dict.fromkeys(rest)))
        opt_state = jax.tree.map(
            lambda x, s: s if s is None else self._grad_spec(s, x),
            tree.opt_state,
            found.opt_state,
        )
        return found.replace(opt_state=opt_state, **{n: whole(t) for n, t in rest.items()})

    def _body(self, state: TrainState, batch: Any):
        return self._update(state, *self._differentiate(state, batch))

    def _differentiate(self, state: TrainState, batch: Any):
        """The gradients of what trains, as a list; what the model carries on; the metrics."""
        check_state(state)
        o = self._options
        model, structure = _tree.split(state.model, "model")
        carried, carried_structure = _tree.split(state.model_state, "model_state")
        plan = self._plan(state)
        self._check_rows(batch)
        rows, rest = _tree.split(batch, "batch", dynamic=_tree.is_array_or_number)

        def loss(arrays, carried, rows, keys):
            model = as_called(structure.join(arrays), o.precision)
            batch = rest.join(batch_for(rows, model, o.precision))
            if not o.stateful:
                return *checked(o.loss_fn(model, batch, keys), self._name()), carried
            before = carried_structure.join(carried)
            out = o.loss_fn(model, batch, keys, before)
            if not (isinstance(out, tuple) and len(out) == 2):
                raise ValueError(
                    f"With stateful=True {self._name()} returns (Mean, model_state) or "
                    f"((Mean, aux), model_state), but it returned {describe(out)}."
                )
            after, found = _tree.split(out[1], "model_state")
            if found != carried_structure:
                raise ValueError(
                    f"{self._name()} returned a model_state of another structure than it was "
                    f"given:\n  it was {carried_structure.treedef}\n  it is  {found.treedef}"
                )
            return *checked(out[0], self._name()), after

        watch = Traced(self._name(), state.model, o.remat, rest.paths(), self._said)
        key = jax.random.fold_in(state.key, state.step)
        # Per example, as in a mean: sums over many would leave the range of float16.
        share = rows[0].shape[0] if o.scales else 1
        scale = state.guard.scale / share if o.scales else jnp.ones(())
        grads, mean, aux, outside, carried = sums(
            loss, plan, self.mesh, model, carried, rows, key, scale, watch
        )
        # Where no example counts there is nothing to learn: a gradient of 0, not 0 / 0.
        factor = jnp.where(mean.weight == 0, 0.0, 1 / (mean.weight * scale))
        grads = [g * factor.astype(g.real.dtype) for g in grads]
        parts = squares(grads, plan.trained, self.mesh)
        metrics: dict[str, Any] = {
            "loss": mean.value(),
            "weight": mean.weight,
            "grad_norm": jnp.sqrt(parts.sum()),
            **{name: m.value() for name, m in aux.items()},
        }
        if outside is not None:
            counts = jnp.append(state.step, outside.astype(state.step.dtype))
            metrics["watch"] = (None, None, watch.named, counts)
        return grads, parts, carried_structure.join(carried), metrics

    def _update(self, state: TrainState, grads, parts, carried, metrics):
        o = self._options
        model, structure = _tree.split(state.model, "model")
        trained, plan = which(state.model, o.trains), self._plan(state)
        if o.clip is not None:
            # Not finite stays not finite, whatever it is multiplied by.
            factor = jnp.minimum(1.0, o.clip / jnp.maximum(metrics["grad_norm"], 1e-30))
            grads = [g * factor.astype(g.real.dtype) for g in grads]
        as_tree = lambda values: only(structure, trained, values)
        old = [
            lax.with_sharding_constraint(model[i], s) if s != plan.weights[i] else model[i]
            for i, s in zip(trained, plan.trained, strict=True)
        ]
        if not self._checked:
            check_scalar_rates(o.optimizer, as_tree(grads))
            self._checked = True
        updates, opt_state = o.optimizer.update(
            as_tree(grads), state.opt_state, as_tree(old), value=metrics["loss"]
        )
        new = jtu.tree_leaves(optax.apply_updates(as_tree(old), updates))
        guard = state.guard
        if o.skip:
            learnt = jnp.isfinite(metrics["grad_norm"]) & jnp.isfinite(metrics["loss"])
            finite = learnt & _guard.updated(new, plan.trained)
            new = _guard.choose(finite, new, old)
            opt_state = _guard.choose(finite, opt_state, state.opt_state)
            carried = _guard.choose(finite, carried, state.model_state)
            guard = _guard.follow(state.guard, finite, metrics["loss"], parts, o.scales)
            guard = guard._replace(leaf=jnp.where(learnt & ~finite, parts.size + 1, guard.leaf))
            metrics = {**metrics, "skipped": guard.skipped}
            if o.scales:
                metrics["loss_scale"] = state.guard.scale
            if o.stop_after is not None:
                _, _, *outside = metrics.get("watch", (None, None, Named(), None))
                metrics["watch"] = (state.step, guard, *outside)
        for i, x in zip(trained, new, strict=True):
            model[i] = x
        model = structure.join(model)
        return TrainState(model, opt_state, state.step + 1, state.key, guard, carried), metrics

    def _plan(self, state: TrainState) -> Plan:
        o = self._options
        arrays, structure = _tree.split(state.model, "model")
        found = self._specs(state)
        weights = [s for s in spec_leaves(state.model, found.model) if s is not None]
        trained = set(which(state.model, o.trains))
        types = compute_types(state.model, o.precision)
        on, policy = policy_of(o.remat)
        rows = layers(structure.paths(), [x.shape for x in arrays])
        return Plan(
            sizes=tuple(self.mesh.shape.items()),
            weights=tuple(weights),
            trains=tuple(i in trained for i in range(len(arrays))),
            grads=tuple(self._grad_spec(s, x) for s, x in zip(weights, arrays, strict=True)),
            batch=self._batch,
            accumulate=o.accumulate,
            types=tuple(types[i] for i in structure.positions),
            layers=tuple(rows if on else [None] * len(arrays)),
            remat=Remat(policy) if on else None,
            reduce=self._reduce_type(),
            stateful=o.stateful,
            gather=o.gather,
        )

    def _reduce_type(self):
        if self._options.precision is None:
            return None
        shape = self.mesh.shape
        others = any(n > 1 for a, n in shape.items() if a not in ("data", "fsdp"))
        automatic = others or self._options.stateful
        if automatic and _jaxapi.low_sums_abort(self.mesh.abstract_mesh):
            return jnp.float32
        return self._options.precision.reduce

    def _grad_spec(self, spec: P, x: Any) -> P:
        """The spec of a gradient and of its share of the optimizer's state and work."""
        n = self.mesh.shape["data"]
        if not self._options.shard_update or n == 1 or x.size < MIN_SHARD:
            return spec
        return widen(spec, x.shape, "data", self.mesh.shape)

    def _check_rows(self, batch):
        ways, count = 1, self._options.accumulate
        for axis in _spec.entries(self._batch, 1)[0]:
            ways *= self.mesh.shape[axis]
        k = ways * count
        for path, x in jtu.tree_leaves_with_path(batch):
            if not _tree.is_array_or_number(x):
                continue
            if jnp.ndim(x) == 0:
                raise ValueError(
                    f"batch{jtu.keystr(path)} is a scalar. Every array of a training batch has "
                    "the examples along its first dimension; give constants to the loss by "
                    "functools.partial."
                )
            rows = x.shape[0]
            if rows % k:
                fit = f"{rows // k * k} or {(rows // k + 1) * k}" if rows > k else f"{k}"
                raise ValueError(
                    f"batch{jtu.keystr(path)} has {rows} examples (global), which do not "
                    f"divide into accumulate={count} microbatches on {ways} devices: "
                    f"{rows} % {k} = {rows % k}. Give {fit}, or pad with "
                    f"meshdp.pad_batch(batch, {k}) and put the mask into the loss."
                )


class _Gradients(TrainStep):
    """Computes gradients and takes none of them."""

    def _body(self, state, batch):
        grads, _, _, metrics = self._differentiate(state, batch)
        metrics.pop("watch", None)
        structure = _tree.split(state.model, "model")[1]
        trained = which(state.model, self._options.trains)
        return state, (only(structure, trained, grads), metrics)


class Updates(TrainStep):
    """Takes the update of given gradients: `step(state, rows, grads, carried, metrics)`."""

    def __call__(self, state, batch, *args):
        return Distributed.__call__(self, state, batch, *args)

    def _body(self, state, batch, grads, carried, metrics):
        flat = jtu.tree_leaves(grads)
        parts = squares(flat, [P()] * len(flat), self.mesh)
        return self._update(state, flat, parts, carried, metrics)


def check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"This step takes a TrainState, not {describe(state)}. "
            "Make one with step.init(make_model, key)."
        )


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
