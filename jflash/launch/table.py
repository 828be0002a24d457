"""Tables of launches: what a launch is chosen for, what is known of it, and the files that hold both."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

# dkv is dk and dv in one kernel; dscore is dbias and dargs.
KERNELS = ("forward", "delta", "dkv", "dk", "dv", "dq", "dscore")
# Of derivatives beyond the gradient: of the forward, and of each kernel of the backward but delta.
TANGENT_KERNELS = ("tangent", *(f"{kernel}_tangent" for kernel in KERNELS[2:]))


@dataclasses.dataclass(frozen=True)
class Launch:
    """How one kernel is launched."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


def check(name: str, value: Any, expected: str = "an int") -> None:
    """Raises unless `value` may be the parameter of a Launch that `name` begins with, after its last dot if it has any."""
    parameter = name.rpartition(".")[2]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be {expected}, got {value!r}")
    least = 16 if parameter.startswith("block") else 1
    if value < least or (not parameter.startswith("num_stages") and value & (value - 1)):
        kind = "at least 1" if parameter.startswith("num_stages") else f"a power of two, at least {least}"
        raise ValueError(f"{name} must be {kind}, got {value}")


@dataclasses.dataclass(frozen=True)
class Key:
    """What a launch is chosen for.

    float16 and bfloat16 take the same tiles: `bits` is 16 for both. `options` is Score.options_class. Lengths are in
    classes, see length_class; None, in an entry, holds for all.
    """

    kernel: str
    bits: int
    head_dim: int
    v_dim: int
    options: str = "plain"
    q_len: int | None = None
    kv_len: int | None = None


def length_class(length: int) -> int:
    """The power of two nearest to a length, by ratio."""
    return 1 << round(math.log2(max(length, 1)))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A launch, what it is for, and how it is known to be good."""

    key: Key
    launch: Launch
    origin: str  # "machine code", "measured", "rule" or "block_sizes"
    gpu: str | None = None  # what it was compiled for, or measured on
    date: str | None = None
    versions: str | None = None
    spill_bytes: int = 0  # what the compiler of these versions says, for this GPU
    microseconds: float | None = None  # of the kernel alone, where it was measured
    table: str | None = None  # where it was found; not in the file

    def __str__(self) -> str:
        key, launch = self.key, self.launch
        lengths = "" if key.q_len is None else f", {key.q_len} x {key.kv_len}"
        known = ", ".join(str(x) for x in (self.origin, self.gpu, self.date, self.versions) if x is not None)
        return (
            f"{key.kernel} ({key.bits} bits, head_dim {key.head_dim}, v_dim {key.v_dim}, {key.options}{lengths}): "
            f"{launch.block_q} x {launch.block_kv}, {launch.num_warps} warps, {launch.num_stages} stages; {known}"
            + (f", {self.microseconds:.1f} µs" if self.microseconds is not None else "")
            + (f"; {self.table}" if self.table else "")
        )


_KEY, _LAUNCH = ([field.name for field in dataclasses.fields(of)] for of in (Key, Launch))
_KNOWN = ["origin", "gpu", "date", "versions", "spill_bytes", "microseconds"]
_OPTIONAL = {"q_len", "kv_len", "spill_bytes", "microseconds"}  # left out where they have their defaults
_CHOICES = {
    "kernel": KERNELS,
    "bits": (16, 32),
    "options": ("plain", "general"),
    "origin": ("machine code", "measured"),
}


def of_json(line: dict[str, Any], table: str | None = None) -> Entry:
    """The entry that a line of a file holds; raises ValueError or TypeError where it holds none."""
    if not isinstance(line, dict):
        raise TypeError(f"an entry must be an object, got {line!r}")
    names = {*_KEY, *_LAUNCH, *_KNOWN}
    if missing := names - _OPTIONAL - set(line):
        raise ValueError(f"an entry must have {', '.join(sorted(missing))}, got {line}")
    if unknown := set(line) - names:
        raise ValueError(f"an entry must not have {', '.join(sorted(unknown))}, got {line}")
    for name, choices in _CHOICES.items():
        if line[name] not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {line[name]!r}")
    for name in ("head_dim", "v_dim", "q_len", "kv_len"):
        if name in line and (type(line[name]) is not int or line[name] < 1):
            raise ValueError(f"{name} must be an integer of at least 1, got {line[name]!r}")
    for name in _LAUNCH:
        check(name, line[name])
    part = lambda names: {name: line[name] for name in names if name in line}
    return Entry(Key(**part(_KEY)), Launch(**part(_LAUNCH)), **part(_KNOWN), table=table)


def to_json(entry: Entry) -> dict[str, Any]:
    values = dataclasses.asdict(entry.key) | dataclasses.asdict(entry.launch) | {name: getattr(entry, name) for name in _KNOWN}
    return {name: x for name, x in values.items() if not (name in _OPTIONAL and (x is None or x == 0))}


def read(text: str, table: str) -> tuple[Entry, ...]:
    """The entries of a file: a JSON list of objects. `table` names the file, in errors and in the entries."""
    try:
        lines = json.loads(text)
        if not isinstance(lines, list):
            raise TypeError(f"a table must be a list of entries, got {type(lines).__name__}")
        entries = tuple(of_json(line, table) for line in lines)
        if len({entry.key for entry in entries}) < len(entries):
            raise ValueError("a table must hold one entry for each key")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{table} is not a table of launches: {error}") from error
    return entries


def write(entries: Iterable[Entry], path: pathlib.Path) -> None:
    """Replaces a file as a whole, so that nobody ever reads half of it. One entry is one line."""

    def order(entry: Entry):
        key = entry.key
        return (
            KERNELS.index(key.kernel),
            key.bits,
            key.head_dim,
            key.v_dim,
            key.options != "plain",
            key.q_len or 0,
            key.kv_len or 0,
        )

    lines = ",\n".join("  " + json.dumps(to_json(entry)) for entry in sorted(entries, key=order))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(f"[\n{lines}\n]\n")
    os.replace(file.name, path)


def tuned_for(entries: Iterable[Entry], key: Key) -> Entry | None:
    """The entry for this key, at the nearest lengths that there are."""
    same = [entry for entry in entries if dataclasses.replace(entry.key, q_len=key.q_len, kv_len=key.kv_len) == key]
    return min(same, key=lambda entry: _distance(entry.key, key), default=None)


def large_enough_for(entries: Iterable[Entry], key: Key) -> Entry | None:
    """The entry with the least widths that are large enough.

    Among entries of the same widths that for the options of the key, else "plain"; then that for the nearest lengths.
    """

    def fits(entry: Entry) -> bool:
        own = entry.key
        return (
            (own.kernel, own.bits) == (key.kernel, key.bits)
            and own.options in (key.options, "plain")
            and own.head_dim >= key.head_dim
            and own.v_dim >= key.v_dim
        )

    def order(entry: Entry):
        own = entry.key
        return own.head_dim + own.v_dim, own.options != key.options, _distance(own, key)

    return min(filter(fits, entries), key=order, default=None)


def _distance(a: Key, b: Key) -> float:
    """How far lengths are from each other, in powers of two. Those of no class are nearer than those of another class."""
    pairs = (a.q_len, b.q_len), (a.kv_len, b.kv_len)
    return sum(0.5 if x is None or y is None else abs(math.log2(x / y)) for x, y in pairs)
