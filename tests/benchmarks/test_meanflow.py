"""benchmarks.meanflow: every attention trains alike, what the loss asks for, and the command."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("equinox")
pytest.importorskip("optax")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from checks import compiling_quickly

import jflash
from benchmarks import meanflow

pytestmark = pytest.mark.whole

TINY = meanflow.Options(steps=2, size=8, patch=2, batch=3, layers=1, width=8, heads=2)
NAIVE = functools.partial(jflash.attention, implementation="naive")


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with compiling_quickly():
        yield


def errors_of(implementation: str) -> list[float]:
    (state, step), errors = meanflow.compiled(TINY, implementation), []
    for n in range(TINY.steps):
        state, error = step(state, jax.random.key(n))
        errors.append(float(error))
    return errors


def test_attentions_train_alike():
    naive, xla = errors_of("naive"), errors_of("xla")
    assert naive[0] != naive[1]
    assert np.isfinite(naive).all()
    np.testing.assert_allclose(xla, naive, rtol=1e-5)


def test_digits_are_drawn():
    """Ink on an empty ground; each digit is another, and so are two keys' images of one."""
    images = np.asarray(meanflow.draw_all(jax.random.key(0), jnp.array([*range(10), 0]), 16))
    assert images.min() == -1
    assert images.max() == 1
    inked = (images > 0).mean((1, 2))
    assert inked.min() > 0.05
    assert inked.max() < 0.5
    apart = np.abs(images[:, None] - images).mean((2, 3))
    assert apart[~np.eye(11, dtype=bool)].min() > 0.05


def test_loss_knows_the_straight_path(monkeypatch):
    """Where all images are one, the velocity is (z - image) / t: its mean is the same, and the loss of that u vanishes."""
    image = jax.random.normal(jax.random.key(0), (5, 5))
    u = lambda z, r, t, digits, attend: (z - image) / t[:, None, None]
    images, digits = jnp.broadcast_to(image, (8, 5, 5)), jnp.zeros(8, int)
    for share in (0.0, 1.0):
        monkeypatch.setattr(meanflow, "SAME", share)
        assert meanflow.loss(u, jax.random.key(1), images, digits, NAIVE)[1] < 1e-9
        off = lambda *inputs: u(*inputs) + 1
        np.testing.assert_allclose(meanflow.loss(off, jax.random.key(1), images, digits, NAIVE)[1], 1, rtol=1e-5)
    np.testing.assert_allclose(meanflow.sample(u, jax.random.key(2), digits, 5, NAIVE), images, atol=1e-6)


def test_command_runs(tmp_path, capsys):
    output = tmp_path / "new" / "meanflow.png"
    options = ["--steps=2", "--size=8", "--batch=3", "--layers=1", "--width=8", "--heads=2", "--turns=1", "--longer=5"]
    meanflow.main([*options, "--implementation=naive", "--out", str(output)])
    told = capsys.readouterr().out
    assert "16 tokens an image" in told
    assert "3 images of 16 tokens" in told
    assert "1 images of 25 tokens" in told
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--steps=0", "steps must be at least 1, got 0"),
        ("--patch=3", "size must be a multiple of patch = 3, got 16"),
        ("--heads=3", "width must be a multiple of 2 * heads = 6, got 64"),
    ],
)
def test_command_explains(wrong, message, capsys):
    with pytest.raises(SystemExit):
        meanflow.main([wrong])
    assert message in capsys.readouterr().err
