"""What a loss function returned, or an error that says what it is."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._distribute import describe
from ._mean import Mean

# What a step reports by itself.
METRICS = ("loss", "weight", "grad_norm", "skipped", "loss_scale", "watch")


def checked(out: Any, name: str) -> tuple[Mean, dict[str, Mean]]:
    """What a loss returned, as `(Mean, auxiliary Means)`.

    **Raises:**

    - `ValueError`: if it is anything else; every fault is named.
    """
    mean: Any = out
    aux: Any = {}
    if isinstance(out, tuple) and len(out) == 2:
        mean, aux = out
    problems = []
    if not isinstance(mean, Mean):
        problems.append(
            f"  the loss is {describe(mean)}; return meshdp.Mean.of(losses, mask), with one "
            "loss per example or token, so that sums and weights can be added up before "
            "dividing"
        )
        aux = {} if not isinstance(aux, dict) else aux
    if not isinstance(aux, dict):
        problems.append(
            f"  the auxiliary result is {describe(aux)}; return (Mean, {{name: Mean}})"
        )
        aux = {}
    for key, m in aux.items():
        if not isinstance(m, Mean):
            problems.append(
                f"  the auxiliary {key!r} is {describe(m)}; make it a meshdp.Mean too, since "
                "each device has only its own examples"
            )
        elif key in METRICS:
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
