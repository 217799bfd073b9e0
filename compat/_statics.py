"""Arguments of a mapped function that are constants of the program."""

import inspect
import operator
from collections.abc import Callable, Iterable


def _indices(nums: int | Iterable[int], what: str) -> tuple[int, ...]:
    try:
        return (operator.index(nums),)  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        return tuple(map(operator.index, nums))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{what} of pmap is {nums!r}. Give the position of an argument, an int, or a tuple "
            "of positions."
        ) from None


class Statics:
    """Takes static arguments out of a call, and puts them back inside the program.

    The constants of a call are `((place, type, value), ...)`, where a place is a position or
    a keyword.
    """

    def __init__(self, fun: Callable, nums: int | Iterable[int], names: str | Iterable[str]):
        self.nums = _indices(nums, "static_broadcasted_argnums")
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.parameters: list[str] = []
        self.count: int | None = None  # of positional arguments that `fun` takes, if known
        try:
            signature = inspect.signature(fun).parameters.values()
        except (TypeError, ValueError):
            pass
        else:
            kinds = {p.kind for p in signature}
            self.parameters = [p.name for p in signature if p.kind <= p.POSITIONAL_OR_KEYWORD]
            if inspect.Parameter.VAR_POSITIONAL not in kinds:
                self.count = len(self.parameters)
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                self._check_names({p.name for p in signature})
        self.nums = self._from_the_front()
        # An argument that was given by number may come by keyword, and the other way round.
        by_number = {self.parameters[i] for i in self.nums if i < len(self.parameters)}
        by_name = {i for i, name in enumerate(self.parameters) if name in self.names}
        self.key = (self.nums, self.names)
        self.nums = tuple(sorted({*self.nums, *by_name}))
        self.names = tuple(sorted({*self.names, *by_number}))
        self.any = bool(self.nums or self.names)

    def _check_names(self, known: set[str]) -> None:
        strange = [name for name in self.names if name not in known]
        if strange:
            raise ValueError(
                f"static_broadcasted_argnames of pmap names {strange}, but the function's "
                f"arguments are called {sorted(known)}. Use these names."
            )

    def _from_the_front(self) -> tuple[int, ...]:
        """`nums` with none negative, where it is known how many arguments there are."""
        n = self.count
        if n is None:
            return self.nums
        strange = [i for i in self.nums if not -n <= i < n]
        if strange:
            raise ValueError(
                f"static_broadcasted_argnums of pmap holds {strange}, but the function takes "
                f"{n} positional arguments. Count them from 0, or name them in "
                "static_broadcasted_argnames."
            )
        return tuple(i % n for i in self.nums)

    def donated(self, nums: int | Iterable[int]) -> tuple[int, ...]:
        # Positions that no argument has are let pass, as `jax.pmap` does: they change nothing.
        donate = tuple(
            i + self.count if i < 0 and self.count is not None else i
            for i in _indices(nums, "donate_argnums")
        )
        both = sorted(set(donate) & set(self.nums))
        if both:
            raise ValueError(
                f"Arguments {both} of pmap are in both static_broadcasted_argnums and "
                "donate_argnums. A constant has no memory to give away: take them out of one."
            )
        return donate

    def split(self, args: tuple, kwargs: dict) -> tuple[tuple, tuple, dict]:
        """`(constants, the other positional arguments, the other keywords)`."""
        if not self.any:
            return (), args, kwargs
        n = len(args)
        where = {i + n if i < 0 else i for i in self.nums}
        constants = [(i, type(args[i]), args[i]) for i in sorted(where) if 0 <= i < n]
        constants += [(k, type(kwargs[k]), kwargs[k]) for k in self.names if k in kwargs]
        faults = []
        for place, kind, value in constants:
            try:
                hash(value)
            except TypeError:
                faults.append(f"  {self._called(place)} is a {kind.__name__}")
        if faults:
            raise ValueError(
                f"{len(faults)} static arguments of pmap cannot be hashed:\n"
                + "\n".join(faults)
                + "\nstatic_broadcasted_argnums is for constants such as functions, strings "
                "and flags. To give every replica the same arrays, take the argument out of "
                "static_broadcasted_argnums and write None for it in in_axes."
            )
        args = tuple(x for i, x in enumerate(args) if i not in where)
        kwargs = {k: v for k, v in kwargs.items() if k not in self.names}
        return tuple(constants), args, kwargs

    def _called(self, place: int | str) -> str:
        if isinstance(place, int):
            if place >= len(self.parameters):
                return f"argument {place}"
            place = self.parameters[place]
        return f"`{place}`"

    def dynamic(self, constants: tuple, count: int) -> list[int] | None:
        """Where the other positional arguments, `count` of them, stood in the call."""
        taken = {place for place, *_ in constants}
        if not self.any:
            return None
        return [i for i in range(count + len(taken)) if i not in taken][:count]

    def join(self, constants: tuple, args: tuple, kwargs: dict) -> tuple[list, dict]:
        joined = list(args)
        for place, _, value in constants:
            if isinstance(place, int):
                joined.insert(place, value)
        return joined, {**kwargs, **{k: v for k, _, v in constants if isinstance(k, str)}}
