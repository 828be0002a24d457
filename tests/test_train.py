"""benchmarks.train: the attentions train alike, and the text is cut without overlap."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("rich")

from benchmarks import text as corpus
from benchmarks import train

# Long enough for more than one tile of implementation="xla", and no multiple of a power of two.
TINY = train.Options(steps=20, length=520, batch=1, layers=1, width=16, heads=2, learning_rate=1e-2)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Compiling is what takes the time here, and then the held-out losses."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "HELD_OUT_BATCHES", 1)
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def texts():
    return corpus.split(np.frombuffer(Path(__file__).read_bytes() * 4, np.uint8), TINY.length)


def _train(texts, attention: str) -> train.Result:
    return train.train(dataclasses.replace(TINY, attention=attention), *texts)


@pytest.fixture(scope="module")
def result(texts):
    return _train(texts, "jflash")


def test_loss_falls_from_that_of_a_uniform_guess(result):
    assert result.losses[0] == pytest.approx(math.log(train.BYTES), abs=1e-3)
    assert result.held_out[0] == pytest.approx(math.log(train.BYTES), abs=1e-3)
    assert result.held_out[TINY.steps] < 5
    assert len(result.losses) == TINY.steps


@pytest.mark.parametrize("attention", ["naive", "jax"])
def test_attentions_train_alike(texts, result, attention):
    other = _train(texts, attention)
    np.testing.assert_allclose(other.losses, result.losses, rtol=0, atol=1e-3)
    assert other.held_out[TINY.steps] == pytest.approx(result.held_out[TINY.steps], abs=1e-3)


def test_another_attention_trains_otherwise(texts, result, monkeypatch):
    """The losses do depend on the attention: without this, the test above might compare nothing."""
    monkeypatch.setitem(train.ATTENTIONS, "jax", jax.nn.dot_product_attention)  # not causal
    assert np.abs(np.subtract(_train(texts, "jax").losses, result.losses)).max() > 1e-2


def test_rotation_depends_on_the_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    turned_q, turned_k = (np.asarray(train.rotate(jnp.repeat(x, 20, axis=1)))[0, :, 0] for x in (q, k))
    products = turned_q @ turned_k.T
    np.testing.assert_allclose(products[5:, 2:-3], products[3:-2, :-5], atol=1e-5)
    assert abs(products[5, 0] - products[0, 0]) > 1e-2


def test_command_runs(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)  # rich would take the captured output for a terminal
    small = ["--steps=3", "--length=32", "--batch=2", "--layers=1", "--width=16", "--heads=2"]
    train.main(["--attention", "jax", "--text", __file__, *small])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4 + 1
    assert lines[2] == "step     0  held-out loss 5.5452"
    assert re.fullmatch(
        r"jax: held-out loss \d\.\d+ nats a byte, [\d,]+ tokens a second, \d+\.\d MiB of temporary memory",
        lines[-1],
    )


def test_command_explains(tmp_path, capsys):
    file = tmp_path / "short.txt"
    file.write_bytes(b"x" * 100)
    with pytest.raises(SystemExit):
        train.main(["--text", str(file), "--length", "64"])
    assert "text must have at least 130 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attention": "fast"}, "attention must be one of jflash, naive, jax, got 'fast'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"width": 12, "heads": 4}, "width must be a multiple of 2 * heads = 8, got 12"),
    ],
)
def test_options_explain(wrong, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        train.Options(**wrong)


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
