"""Text to train on, byte by byte: a file, or Python's own standard library, which every machine has."""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # other people's code, and data of tests
HELD_OUT = 10  # one byte in so many, at the end of the text


def read(path: Path | None = None) -> np.ndarray:
    """The bytes of a file, or of the standard library's sources: uint8 `[size]`."""
    return np.frombuffer(_standard_library() if path is None else path.read_bytes(), np.uint8)


def split(text: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, held out): the beginning and the end of a text, either at least length + 1 bytes long."""
    needed = length + 1  # the last byte of a sequence is only a target
    if len(text) < 2 * needed:
        raise ValueError(
            f"text must have at least {2 * needed} bytes, a sequence of length + 1 = {needed} to train on and one to hold "
            f"out, got {len(text)}"
        )
    end = len(text) - max(needed, len(text) // HELD_OUT)
    return text[:end], text[end:]


def random_batches(text: np.ndarray, batch: int, length: int, seed: int, first: int = 0) -> Iterator[np.ndarray]:
    """Sequences from anywhere in the text, without end: int32 `[batch, length + 1]`, the same for the same seed.

    `first` is the number of the batch to begin with: each depends on the seed and its number only.
    """
    for number in itertools.count(first):
        random = np.random.default_rng((seed, number))
        yield _sequences(text, random.integers(len(text) - length, size=batch), length)


def even_batches(text: np.ndarray, batch: int, length: int, count: int) -> list[np.ndarray]:
    """`count` batches of sequences spread evenly over the text: int32 `[batch, length + 1]`."""
    starts = np.linspace(0, len(text) - length - 1, count * batch, dtype=int)
    return [_sequences(text, part, length) for part in np.split(starts, count)]


def _sequences(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def _standard_library() -> bytes:
    """All its Python files, one behind the other, in an order that does not depend on the machine."""
    sources = []
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(set(folders) - SKIPPED)
        sources += [Path(folder, name).read_bytes() for name in sorted(files) if name.endswith(".py")]
    return b"".join(sources)
