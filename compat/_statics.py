"""Arguments of a mapped function that are constants of the program."""

import inspect
import operator
from collections.abc import Callable, Iterable


def _indices(nums: int | Iterable[int]) -> tuple[int, ...]:
    try:
        return (operator.index(nums),)  # type: ignore[arg-type]
    except TypeError:
        return tuple(map(operator.index, nums))  # type: ignore[arg-type]


class Statics:
    """Takes static arguments out of a call, and puts them back inside the program.

    The constants of a call are `((place, type, value), ...)`, where a place is a position or
    a keyword.
    """

    def __init__(self, fun: Callable, nums: int | Iterable[int], names: str | Iterable[str]):
        self.nums = _indices(nums)
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.parameters: list[str] = []
        try:
            parameters = inspect.signature(fun).parameters.values()
        except (TypeError, ValueError):
            pass
        else:
            self.parameters = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        # An argument that was given by number may come by keyword, and the other way round.
        by_number = {self.parameters[i] for i in self.nums if i < len(self.parameters)}
        by_name = {i for i, name in enumerate(self.parameters) if name in self.names}
        self.key = (self.nums, self.names)
        self.nums = tuple(sorted({*self.nums, *by_name}))
        self.names = tuple(sorted({*self.names, *by_number}))
        self.any = bool(self.nums or self.names)

    def donated(self, nums: int | Iterable[int]) -> tuple[int, ...]:
        donate = _indices(nums)
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
        constants = [(i, type(args[i]), args[i]) for i in sorted(where) if i < n]
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
