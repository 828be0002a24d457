"""benchmarks.text: the text is cut without overlap, and batches come from all of it."""

from __future__ import annotations

import itertools
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from benchmarks import text as corpus


@pytest.mark.parametrize(("size", "length"), [(1000, 16), (34, 16), (35, 16), (2, 0)])
def test_split_does_not_overlap(size, length):
    text = np.arange(size)  # so that a value says where it comes from
    train_text, held_out = corpus.split(text, length)
    np.testing.assert_array_equal(np.concatenate([train_text, held_out]), text)
    assert len(held_out) == max(size // corpus.HELD_OUT, length + 1)
    assert len(train_text) > length


def test_split_explains():
    with pytest.raises(ValueError, match=r"text must have at least 34 bytes.*got 33"):
        corpus.split(np.arange(33), 16)


def test_batches_come_from_all_of_their_text():
    text, batch, length = np.arange(20), 3, 4
    random = np.stack(list(itertools.islice(corpus.random_batches(text, batch, length, seed=0), 100)))
    even = np.stack(corpus.even_batches(text, batch, length, count=8))
    for batches in (random, even):
        assert batches.shape[1:] == (batch, length + 1)
        assert batches.dtype == np.int32
        assert (np.diff(batches, axis=-1) == 1).all()
        assert set(batches.ravel()) == set(text)


def test_random_batches_follow_the_seed():
    first = lambda seed: next(corpus.random_batches(np.arange(1000), 4, 8, seed))
    np.testing.assert_array_equal(first(1), first(1))
    assert (first(1) != first(2)).any()


def test_random_batches_begin_anywhere():
    batches = lambda first, count: list(itertools.islice(corpus.random_batches(np.arange(1000), 4, 8, 0, first), count))
    np.testing.assert_array_equal(batches(3, 2), batches(0, 5)[3:])
    assert (batches(0, 1)[0] != batches(1, 1)[0]).any()


def test_standard_library():
    text = corpus.read().tobytes()
    assert len(text) > 1_000_000
    assert Path(json.__file__).read_bytes() in text


def test_standard_library_is_in_order_and_without_tests(tmp_path, monkeypatch):
    for name in ("b.py", "a.py", "notes.txt", "z/d.py", "c/e.py", "c/test/f.py", "site-packages/g.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name + "\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert corpus.read().tobytes().decode().split() == ["a.py", "b.py", "c/e.py", "z/d.py"]
