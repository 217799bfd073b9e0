"""When are two functions the same? So that `pmap(f)(x)` in a loop compiles once.

What is compiled belongs to the function and dies with it. A `partial` is the same as another
one of the same function with equal arguments, a bound method as another one of the same
object. Functions are compared by identity, never by their code: two lambdas of one line can
mean different things once a global variable has changed.
"""

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

VARIANTS = 64
"""How many variants (axes, arguments of a partial, ...) one function keeps."""

_programs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class _ById:
    """An array as a key: the array itself, which stays alive, never its value."""

    def __init__(self, x: Any):
        self.x = x

    def __hash__(self):
        return id(self.x)

    def __eq__(self, other: object):
        return isinstance(other, _ById) and self.x is other.x


def freeze(x: Any) -> Hashable:
    """A key for a value: equal keys, equal values. Raises `TypeError` where there is none."""
    if isinstance(x, jax.Array):
        return _ById(x)  # cannot change, so identity is enough
    if isinstance(x, (np.ndarray, np.generic)):
        if x.dtype.hasobject:
            raise TypeError
        return (np.ndarray, type(x), x.shape, x.dtype, x.tobytes())
    if isinstance(x, functools.partial):
        return (functools.partial, freeze(x.func), freeze(x.args), freeze(x.keywords))
    if type(x) in (tuple, list):
        return (type(x), *map(freeze, x))
    if type(x) is dict:
        return (dict, *((k, freeze(v)) for k, v in x.items()))
    hash(x)
    if isinstance(x, float) and not x:
        return (type(x), str(x))  # 0.0 == -0.0
    return (type(x), x)  # 1, 1.0 and True are equal, but not the same to a tracer


def split(fun: Callable) -> tuple[Any, Hashable, Callable[[Any], Callable]]:
    """`(root, key, rebuild)`: an object to hang a cache on, what distinguishes `fun` among
    those of the same root, and how to make `fun` again from its root.

    Raises `TypeError` where a function cannot be compared with others.
    """
    if type(fun) is functools.partial:
        root, key, rebuild = split(fun.func)
        args, keywords = fun.args, fun.keywords
        return (
            root,
            ("partial", key, freeze(args), freeze(keywords)),
            lambda r: functools.partial(rebuild(r), *args, **keywords),
        )
    if isinstance(fun, types.MethodType):
        if type(fun.__self__).__hash__ is not object.__hash__:
            raise TypeError
        function = fun.__func__
        return fun.__self__, ("method", function), lambda r: types.MethodType(function, r)
    if isinstance(fun, types.FunctionType) or type(fun).__hash__ is object.__hash__:
        return fun, "itself", lambda r: r
    raise TypeError


def shared(fun: Callable, variant: Hashable, make: Callable[[Callable[[], Callable]], Any]):
    """The program of `fun` in this variant, made by `make(get_fun)` when it is new.

    `get_fun` holds the function weakly: the program must not keep its own key alive.
    """
    try:
        root, key, rebuild = split(fun)
        hash((key, variant))
        ref = weakref.ref(root)
        variants = _programs.setdefault(root, OrderedDict())
    except TypeError:
        return make(lambda: fun)
    found = variants.get((key, variant))
    if found is None:
        found = variants[key, variant] = make(lambda: rebuild(ref()))
        while len(variants) > VARIANTS:
            variants.popitem(last=False)
    else:
        variants.move_to_end((key, variant))
    return found
