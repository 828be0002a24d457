"""A word of warning where one function is defined again and again, each time to be compiled anew."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from jax.errors import ConcretizationTypeError
from jax.extend.core import concrete_or_error

ENOUGH = 4  # so many functions of one place are no accident

_logger = logging.getLogger("jflash")


def look_out(name: str, fn: Callable | None, x: Any) -> None:
    """Warns, once for each place, when attention() meets the same function as a new object for the ENOUGH-th time.

    Only in calls on an array `x` that is there: what jax.jit traces is compiled once, whatever is defined in it. Functions
    that close over other values are other functions; and nothing is said of what is no plain function.
    """
    if isinstance(fn, FunctionType) and _is_there(x):
        code = fn.__code__
        _place(name, fn.__module__, fn.__qualname__, code.co_filename, code.co_firstlineno, _values(fn)).meet(fn)


class _Place:
    """Where a function is defined, and how many there have been of it. Keeps none of them alive."""

    def __init__(self, name: str, where: str):
        self.name, self.where = name, where
        self.count, self.alive = 0, weakref.WeakSet()

    def meet(self, fn: Callable) -> None:
        if fn in self.alive:
            return
        self.alive.add(fn)
        self.count += 1
        if self.count == ENOUGH:
            _logger.warning(
                "%s=%s has been defined %d times, and attention() compiled for each: define it once, outside of the loop or "
                "the function that calls attention()",
                self.name, self.where, self.count,
            )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _place(name: str, module: str, qualname: str, file: str, line: int, values: int) -> _Place:
    return _Place(name, f"{module}.{qualname} ({file}:{line})")


def _values(fn: FunctionType) -> int:
    """A number for what a function closes over and its defaults."""
    known = inspect.getclosurevars(fn).nonlocals.values()
    return hash(tuple(map(_number, (*known, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()))))


def _number(value: Any) -> int:
    try:
        return hash(value)
    except TypeError:
        return id(value)


def _is_there(x: Any) -> bool:
    """Whether x has a value, outside of jax.jit; inside jax.grad it has one too."""
    try:
        concrete_or_error(None, x)
    except ConcretizationTypeError:
        return False
    return True
