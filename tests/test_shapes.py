"""The shapes that signatures state: they are looked at in tests, and nowhere else."""

import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from checks import normal

from jflash import tile
from jflash.kernels import Triton
from jflash.reference import naive_attention, online_attention
from jflash.score.score import Score


def test_a_tile_of_other_shapes_is_refused():
    rows, too_many = jnp.ones(4), jnp.ones(5)
    chunk = jnp.ones((4, 8))
    of_rows = functools.partial(tile.rows, (chunk,), (chunk,), tile.Norm(rows, rows), slope=1.0, split=True)
    of_rows(rows)
    with pytest.raises(jaxtyping.TypeCheckError, match="dlse"):
        of_rows(too_many)


@pytest.mark.parametrize("attend", [naive_attention, online_attention, Triton(interpret=True).forward])
def test_keys_and_values_of_different_lengths_are_refused(attend):
    q, k, v = normal(1, 8, 2, 16), normal(1, 8, 2, 16), normal(1, 9, 2, 16)
    of = lambda v: jax.eval_shape(attend, q, k, v, Score.of(q, k))
    assert of(v[:, :8])[0].shape == q.shape
    with pytest.raises(jaxtyping.TypeCheckError, match="kv_len"):
        of(v)


def test_nothing_looks_at_them_without_being_asked():
    code = """
import jflash, jax.numpy as jnp
from jflash.reference import naive_attention
from jflash.score.score import Score
x = jnp.ones((1, 3, 2, 4))
o, _ = naive_attention(x, x, x[..., 0], Score.of(x, x))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[1])
    assert "ValueError" in run.stderr
    assert "TypeCheckError" not in run.stderr
