"""benchmarks.train: attentions, libraries and devices train alike, and a stopped run goes on bit for bit."""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from checks import compiling_quickly
from rich.console import Console

from benchmarks import compare, devices, models, train, training
from benchmarks import text as corpus
from benchmarks.checkpoint import Checkpoint

pytestmark = pytest.mark.whole

# Long enough for more than one tile of implementation="xla", and no multiple of a power of two.
TINY = training.Options(steps=20, length=520, batch=1, layers=1, width=16, heads=2, learning_rate=1e-2)
SHORT = dataclasses.replace(TINY, steps=6, length=64, batch=2)
TEXTS = training.Texts(*corpus.split(corpus.read(Path(__file__)), TINY.length))
QUIET = Console(quiet=True)
of = dataclasses.replace


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Compiling is what takes the time here, and then the held-out losses."""
    with compiling_quickly(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "HELD_OUT_BATCHES", 1)
        yield


@functools.cache
def trained(options: training.Options) -> tuple[training.Trainer, training.Result]:
    return training.train(options, TEXTS, QUIET)


def losses_of(options: training.Options) -> list[float]:
    return trained(options)[1].losses


# ------------------------------------------------------------------------------------------- attentions and libraries


def test_loss_falls_from_that_of_a_uniform_guess():
    result = trained(TINY)[1]
    assert result.losses[0] == pytest.approx(math.log(models.BYTES), abs=1e-3)
    assert result.held_out["0"] == pytest.approx(math.log(models.BYTES), abs=1e-3)
    assert result.held_out[str(TINY.steps)] < 5
    assert len(result.losses) == TINY.steps


@pytest.mark.parametrize("attention", ["naive", "jax.nn"])
def test_attentions_train_alike(attention):
    np.testing.assert_allclose(losses_of(of(TINY, attention=attention)), losses_of(TINY), rtol=0, atol=1e-3)


def test_another_attention_trains_otherwise(monkeypatch):
    """The losses do depend on the attention: without this, the test above might compare nothing."""
    monkeypatch.setitem(devices.ATTENTIONS, "jax.nn", jax.nn.dot_product_attention)  # not causal
    _, other = training.train(of(TINY, attention="jax.nn"), TEXTS, QUIET)
    assert np.abs(np.subtract(other.losses, losses_of(TINY))).max() > 1e-2


def path_of(path) -> tuple[str, ...]:
    """Where a parameter is, in the words that the libraries share: "blocks_0" here is "blocks", 0 there."""
    return tuple(re.findall(r"[a-z]+|\d+", jax.tree_util.keystr(path).removesuffix(".value").replace("_norm", "norm"))[:-1])


def turned(library: str, path: tuple[str, ...], x):
    """A parameter in the orientation of Flax, or back from it: Equinox's weights are [out, in]."""
    return x.T if library == "equinox" and path != ("embed",) else x


def test_libraries_compute_the_same():
    """The same numbers as parameters give the same logits; and what the libraries draw themselves spreads alike."""
    random, size = np.random.default_rng(0), models.Size(layers=2, width=32, heads=2)
    tokens, positions = random.integers(models.BYTES, size=(2, 20)), np.arange(20)
    values, spreads, logits = {}, {}, {}
    for library in models.NAMES:
        model = models.make(library, size)
        leaves, tree = jax.tree_util.tree_flatten_with_path(jax.jit(model.init)(jax.random.key(0)))
        params = {path_of(path): turned(library, path_of(path), x) for path, x in leaves}
        values = values or {path: jnp.asarray(random.normal(x, 0.1), jnp.float32) for path, x in params.items()}
        assert {path: x.shape for path, x in params.items()} == {path: x.shape for path, x in values.items()}
        spreads[library] = [float(params[path].std()) for path in values]
        filled = jax.tree.unflatten(tree, [turned(library, path, values[path]) for path in params])
        logits[library] = jax.jit(model.apply, static_argnums=3)(filled, tokens, positions, devices.ATTENTIONS["naive"])
    for library in models.NAMES:
        np.testing.assert_allclose(logits[library], logits["flax-nnx"], rtol=1e-4, atol=1e-4, err_msg=library)
        np.testing.assert_allclose(spreads[library], spreads["flax-nnx"], rtol=0.1, atol=1e-6, err_msg=library)


def test_rotation_depends_on_the_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    turn = lambda x: np.asarray(models.rotated(jnp.repeat(x, 20, axis=1), jnp.arange(20)))[0, :, 0]
    products = turn(q) @ turn(k).T
    np.testing.assert_allclose(products[5:, 2:-3], products[3:-2, :-5], atol=1e-5)
    assert abs(products[5, 0] - products[0, 0]) > 1e-2


# ------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("model", "batch", "attention", "shape"),
    [
        ("flax-linen", 2, "jflash", {"data": 2, "sequence": 2}),
        ("equinox", 1, "jflash", {"data": 1, "sequence": 4}),
        ("flax-nnx", 4, "jax.nn", {"data": 4, "sequence": 1}),
    ],
)
def test_four_devices_train_like_one(model, batch, attention, shape):
    options = of(SHORT, model=model, batch=batch)
    many = of(options, devices=4, attention=attention)
    layout = devices.Layout.of(4, batch, options.length)
    assert dict(layout.mesh.shape) == shape
    part = layout.batch(np.zeros((batch, options.length + 1), np.int32)).tokens.addressable_shards[0].data
    assert part.size == batch * options.length // 4
    np.testing.assert_allclose(losses_of(many), losses_of(options), rtol=1e-5)


def test_layout_explains():
    there = len(jax.devices())
    with pytest.raises(ValueError, match=f"^devices must be at most {there}, all cpu devices, got {there + 1}$"):
        devices.Layout.of(there + 1, 1, 64)
    with pytest.raises(ValueError, match=r"^length must be a multiple of 8, two chunks for each of the 4 devices.*got 68$"):
        devices.Layout.of(4, 1, 68)
    with pytest.raises(ValueError, match=r"^attention must be 'jflash' where 2 devices share a sequence, got 'naive'"):
        devices.Layout.of(4, 2, 64).attention("naive")


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("how", [*({"model": name} for name in models.NAMES), {"devices": 4}], ids=str)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, monkeypatch, how):
    options = of(SHORT, **how)
    settings, step = dataclasses.asdict(options), training.Trainer.step
    whole_trainer, whole = trained(options)

    taken = []

    def until_the_fifth(trainer, sequences):
        if len(taken) == 4:
            raise KeyboardInterrupt
        taken.append(sequences)
        return step(trainer, sequences)

    monkeypatch.setattr(training.Trainer, "step", until_the_fifth)
    with pytest.raises(KeyboardInterrupt), Checkpoint(tmp_path, 3, settings) as checkpoint:
        training.train(options, TEXTS, QUIET, checkpoint)

    taken.clear()  # three steps are left: the fourth was not saved
    with Checkpoint(tmp_path, 3, settings) as checkpoint:
        trainer, result = training.train(options, TEXTS, QUIET, checkpoint)
    assert len(taken) == 3
    assert result.losses == whole.losses
    assert result.held_out == whole.held_out
    jax.tree.map(np.testing.assert_array_equal, trainer.state, whole_trainer.state)
    with (
        Checkpoint(tmp_path, 3, settings | {"seed": 1}) as checkpoint,
        pytest.raises(ValueError, match=r"^seed must be 0, as in the run that the checkpoint is of, got 1$"),
    ):
        checkpoint.restore(trainer.state)


# ---------------------------------------------------------------------------------------------------------- comparison


def test_comparison(tmp_path):
    lines = compare.compare(SHORT, TEXTS, QUIET, tmp_path / "compared.csv")
    assert [line["attention"] for line in lines] == ["jflash", "jax.nn"]
    with (tmp_path / "compared.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(SHORT.steps))
    for name in compare.COMPARED:
        np.testing.assert_allclose([float(row[f"{name}_loss"]) for row in rows], losses_of(SHORT), rtol=1e-5)
        assert float(rows[0][f"{name}_temporary_MiB"]) > 0
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def _optimized():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.usefixtures("_optimized")
def test_memory_is_at_most_a_third_at_length_4096():
    ours, theirs = (training.Trainer(of(TINY, length=4096, attention=name)).temp_bytes for name in compare.COMPARED)
    assert ours <= theirs / 3


# --------------------------------------------------------------------------------------------------------- the command

SMALL = ["--steps=3", "--length=32", "--batch=2", "--layers=1", "--width=16", "--heads=2", "--text", __file__]


def test_command_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("FORCE_COLOR", raising=False)  # rich would take the captured output for a terminal
    train.main(["--attention", "jax.nn", "--checkpoint", str(tmp_path), *SMALL])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4 + 1
    assert lines[2] == "step     0  held-out loss 5.5452"
    assert re.fullmatch(
        r"jax.nn: held-out loss \d\.\d+ nats a byte, [\d,]+ tokens a second, \d+\.\d MiB of temporary memory",
        lines[-1],
    )
    train.main(["--attention", "jax.nn", "--checkpoint", str(tmp_path), *SMALL])
    assert capsys.readouterr().out.splitlines()[2:] == ["goes on after step 3", *lines[-2:]]  # nothing is left to do
    with pytest.raises(SystemExit):
        train.main(["--attention", "naive", "--checkpoint", str(tmp_path), *SMALL])
    assert "attention must be 'jax.nn', as in the run that the checkpoint is of, got 'naive'" in capsys.readouterr().err


def test_command_makes_its_devices():
    command = [sys.executable, "-m", "benchmarks.train", "--devices=2", "--model=equinox", *SMALL]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "compiled for {'data': 2, 'sequence': 1}" in done.stdout


def test_command_explains(tmp_path, capsys):
    file = tmp_path / "short.txt"
    file.write_bytes(b"x" * 100)
    with pytest.raises(SystemExit):
        train.main(["--text", str(file), "--length", "64"])
    assert "text must have at least 130 bytes" in capsys.readouterr().err
    for wrong, message in (
        ("--every=0", "every must be at least 1, got 0"),
        ("--compare", "checkpoint must not be given with"),
    ):
        with pytest.raises(SystemExit):
            train.main([*SMALL, "--checkpoint", str(tmp_path), wrong])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attention": "fast"}, "attention must be one of jflash, jax.nn, naive, got 'fast'"),
        ({"model": "haiku"}, "model must be one of flax-linen, flax-nnx, equinox, got 'haiku'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"width": 12, "heads": 4}, "width must be a multiple of 2 * heads = 8, got 12"),
    ],
)
def test_options_explain(wrong, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        training.Options(**wrong)
