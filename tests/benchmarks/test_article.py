"""What the article says of softmax and of tiling, as benchmarks.softmax and benchmarks.matmul_tiling show it."""

from __future__ import annotations

import csv
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich")

from checks import needs_compiler

from benchmarks import matmul_tiling, softmax
from benchmarks.matmul_tiling import NAIVE, Blocks, matmul
from jflash import machine_code

TILED = Blocks(32, 64, 16)


def run(program, monkeypatch, output, *options: str) -> list[dict[str, str]]:
    """The lines that a program writes."""
    monkeypatch.setattr(sys, "argv", ["program", *options, "--output", str(output)])
    program.main()
    with output.open(newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------------- softmax


def test_softmax_command(monkeypatch, tmp_path, capsys):
    options = ("--rows=3", "--columns=17", "--repeats=1", "--largest-logits", "10", "80", "100", "1000")
    lines = run(softmax, monkeypatch, tmp_path / "new" / "softmax.csv", *options)
    assert "NaN" in capsys.readouterr().out
    passes = {line["softmax"]: (line["reads"], line["writes"]) for line in lines}
    assert passes == {"naive": ("2", "1"), "safe": ("3", "1"), "online": ("2", "1")}
    for line in lines:
        errors = np.array([float(line[f"error_at_{largest}"]) for largest in (10, 80, 100, 1000)])
        np.testing.assert_array_equal(np.isnan(errors), [False, False, *2 * [line["softmax"] == "naive"]])
        assert (errors[~np.isnan(errors)] < 1e-6).all()
        assert float(line["milliseconds"]) > 0
        assert float(line["GB_per_second"]) > 0
        assert line["device"] == jax.devices()[0].device_kind
        assert line["jax"] == jax.__version__


def test_passes_are_counted():
    x = jnp.ones((2, 5))
    total = lambda x: jnp.sum(x, -1, keepdims=True)
    assert softmax.passes(jnp.exp, x) == (1, 1)
    assert softmax.passes(lambda x: x / total(x) + jnp.max(x), x) == (2, 1)  # neither reduction waits for the other
    assert softmax.passes(lambda x: x / total(jax.jit(softmax.naive_softmax)(x)), x) == (3, 1)
    assert softmax.passes(lambda x: (x / total(x), x), x) == (2, 2)
    with pytest.raises(ValueError, match=r"shape of x, \(2, 5\), got \[\(2, 1\)\]"):
        softmax.passes(total, x)


# -------------------------------------------------------------------------------------------------------- tiling


@pytest.mark.whole
@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 1e-6), (jnp.float16, 2**-11), (jnp.bfloat16, 2**-8)])
@pytest.mark.parametrize("blocks", [NAIVE, TILED], ids=str)
@pytest.mark.parametrize("shape", [(32, 64, 16), (64, 128, 48)])
def test_products_agree_with_float64(shape, blocks, dtype, most):
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(size), dtype) for size in ((m, k), (k, n)))
    assert matmul(a, b, blocks, interpret=True).dtype == dtype
    # The sum is exact to float32; what is left is the product's rounding to its dtype.
    assert matmul_tiling.largest_error(functools.partial(matmul, blocks=blocks, interpret=True), a, b) <= most


@pytest.mark.parametrize("side", [16, 32, 128])
def test_tiles_load_each_element_once_for_each_tile_beside_it(side):
    n = 256
    assert Blocks(side, side, 16).loaded(n, n, n) == 2 * n**3 // side


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((48, 16), (16, 64), "m must be a positive multiple of block_m = 32, got 48"),
        ((32, 16), (16, 96), "n must be a positive multiple of block_n = 64, got 96"),
        ((32, 24), (24, 64), "k must be a positive multiple of block_k = 16, got 24"),
        ((0, 16), (16, 64), "m must be a positive multiple of block_m = 32, got 0"),
        ((32, 16), (32, 64), "b must have as many rows as a has columns, 16, got 32"),
    ],
)
def test_sizes_explain(a, b, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        matmul(jnp.zeros(a), jnp.zeros(b), TILED, interpret=True)


@pytest.mark.parametrize("size", [8, 24])
def test_blocks_explain(size):
    with pytest.raises(ValueError, match=f"^block_n must be a power of two of at least 16, got {size}$"):
        Blocks(16, size, 16)


def test_tiling_command(monkeypatch, tmp_path, capsys):
    options = ("--sizes", "32", "64", "--block-m=32", "--block-n=32", "--block-k=16", "--repeats=1")
    lines = run(matmul_tiling, monkeypatch, tmp_path / "matmul.csv", *options)
    assert [(line["product"], line["size"]) for line in lines] == [
        (name, size) for size in ("32", "64") for name in ("naive", "tiled", "jnp.dot")
    ]
    assert [line["times_less_than_naive"] for line in lines] == 2 * ["1", "2", ""]
    assert all(float(line["error"]) < 1e-3 for line in lines)
    interpreted = jax.default_backend() == "cpu"
    assert ("milliseconds" not in lines[0]) == interpreted
    assert ("says nothing of a GPU" in capsys.readouterr().out) == interpreted


def test_tiling_command_explains(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(matmul_tiling, monkeypatch, tmp_path / "matmul.csv", "--sizes", "200")
    assert "m must be a positive multiple of block_m = 128, got 200" in capsys.readouterr().err


def test_times_are_those_of_one_product(monkeypatch):
    """As where there is a GPU, whose place known times take."""
    monkeypatch.setattr(
        matmul_tiling, "median_seconds", lambda programs, *_: dict(zip(programs, (40.0, 20.0, 10.0), strict=True))
    )
    monkeypatch.setattr(matmul_tiling, "matmul", lambda a, b, blocks, interpret: a @ b)
    naive, tiled, dot = matmul_tiling.compare(16, jnp.float32, NAIVE, repeats=1, interpret=False)
    assert [line["milliseconds"] for line in (naive, tiled, dot)] == [4e3, 2e3, 1e3]
    assert [line["times_as_fast_as_naive"] for line in (naive, tiled, dot)] == [1, 2, 4]
    assert dot["TFLOPS"] == pytest.approx(2 * 16**3 / 1e12)


def test_chain_is_of_that_many_products():
    a, b = 2 * jnp.eye(2), 3 * jnp.eye(2)
    np.testing.assert_allclose(matmul_tiling.chained(jnp.dot)(a, b), 2 * 3.0**matmul_tiling.CHAINED * np.eye(2))


@needs_compiler
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_kernels_compile_and_use_tensor_cores(dtype):
    x = jax.ShapeDtypeStruct((256, 256), dtype)
    tiled = Blocks(128, 128, 32)
    program = machine_code.compile_for(lambda a, b: matmul(matmul(a, b, NAIVE), b, tiled), x, x, gpu="h100")
    naive, tiled = (program[f"matmul_{blocks}"] for blocks in (NAIVE, tiled))
    assert naive.grid[:2] == (16, 16)
    assert tiled.grid[:2] == (2, 2)
    for kernel in (naive, tiled):
        assert kernel.tensor_cores
        assert kernel.spill_bytes == 0
