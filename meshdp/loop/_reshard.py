"""A state from one step's mesh and layout to another's, without a file."""

from typing import Any

from .. import _place
from .._distribute import Distributed


def reshard(tree: Any, to: Any, *, donate: bool = False) -> Any:
    """Moves placed arrays to another layout, another mesh, or to where another step wants them.

    ```python
    step2 = meshdp.make_train_step(loss_fn, optimizer, mesh=meshdp.make_mesh(fsdp=4, ...))
    state = meshdp.reshard(state, step2)
    ```

    Training goes on with the same numbers: the number of devices may change, as when a job
    gets more or fewer of them. Shards travel by way of host memory.

    **Arguments:**

    - `tree`: any pytree, such as a `TrainState`.
    - `to`: a step of `distributed` or `make_train_step`; or a pytree of `NamedSharding`s, which
        may be a prefix of `tree`; or a `Mesh`, on which every leaf keeps its spec.
    - `donate`: deletes each array of `tree` as soon as it has been moved, so that about
        1 GiB at a time is held twice, instead of all.

    **Returns:**

    The tree with arrays that share no memory with those it was given.

    **Raises:**

    - `ValueError`: a leaf cannot be split as asked, or was deleted; each is listed.
    """
    if isinstance(to, Distributed):
        to = to.shardings(tree)
    return _place.reshard(tree, to, donate=donate)
