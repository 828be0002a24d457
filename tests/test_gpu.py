"""What only a real GPU shows: repeatability, JAX's transformations on it, memory, very large arrays, and whole programs.

test_device.py compares the kernels with float64 there too. Whole programs run in processes of their own, where the GPU is
the default as it is for its users.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import normal
from devices import gpus, on
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jflash import attention
from jflash.proof import accuracy
from jflash.proof.cases import CASES

pytestmark = pytest.mark.xdist_group("device")
ROOT = pathlib.Path(__file__).parents[1]
GIB = 2**30


@pytest.fixture(autouse=True)
def gpu():
    with on("gpu"):  # skips where there is none
        yield gpus()[0]


def needs_memory(gpu, size):
    stats = gpu.memory_stats() or {}
    if stats.get("bytes_limit", 0) < size:
        pytest.skip(f"needs {size / GIB:.0f} GiB of GPU memory")


def program(code):
    """The JSON that a program prints in its last line, run where the GPU is the default."""
    environment = os.environ | {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def qkv(batch=2, length=300, heads=4, kv_heads=2, head_dim=64):
    of = lambda heads, seed: normal(batch, length, heads, head_dim, seed=seed, dtype=jnp.bfloat16)
    return of(heads, 0), of(kv_heads, 1), of(kv_heads, 2)


def loss(q, k, v, **options):
    return jnp.sum(attention(q, k, v, causal=True, implementation="triton", **options).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.name)
def test_two_runs_give_the_same_bits(case):
    compiled, arguments = accuracy.program(case, case.arrays(), implementation="triton")
    first, second = (jax.tree.map(np.asarray, compiled(*arguments)) for _ in range(2))
    for (name, x), (_, y) in zip(first.items(), second.items(), strict=True):
        assert x.tobytes() == y.tobytes(), name


def test_by_default_kernels_run(gpu):
    assert all(x.devices() == {gpu} for x in qkv())
    default, named = (jax.jit(lambda *x, how=how: attention(*x, implementation=how))(*qkv()) for how in (None, "triton"))
    chex.assert_trees_all_equal(default, named)
    assert "jflash_forward" in jax.jit(attention).lower(*qkv()).compile().as_text()


def test_jit_grad_and_vmap():
    arrays = qkv()
    grad = jax.grad(loss, (0, 1, 2))
    eager, jitted = grad(*arrays), jax.jit(grad)(*arrays)
    chex.assert_trees_all_equal(eager, jitted)
    one_by_one = jax.tree.map(lambda *x: jnp.stack(x), *(grad(*(x[n : n + 1] for x in arrays)) for n in range(2)))
    mapped = jax.jit(jax.vmap(grad))(*(x[:, None] for x in arrays))
    chex.assert_trees_all_equal(mapped, one_by_one)
    chex.assert_tree_all_finite(jitted)
    naive = jax.grad(lambda *x: jnp.sum(attention(*x, causal=True, implementation="naive").astype(jnp.float32) ** 2), (0, 1, 2))
    chex.assert_trees_all_close(jitted, jax.jit(naive)(*arrays), rtol=0.05, atol=0.05)


def test_divided_over_the_gpus_of_this_machine():
    """Batch over as many as divide it; with one GPU, a mesh of one."""
    count = max(n for n in (1, 2, 4, 8) if n <= len(gpus()))
    arrays = qkv(batch=8)
    mesh = Mesh(gpus()[:count], ("data",))
    divided = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in arrays]
    value_and_grad = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    with jax.set_mesh(mesh):
        value, grads = value_and_grad(*divided)
    assert all(len(x.sharding.device_set) == count for x in grads)
    wanted, wanted_grads = value_and_grad(*arrays)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, grads), jax.tree.map(np.asarray, wanted_grads))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ arrays beyond 32 bits


def test_more_than_2_to_the_31_elements(gpu):
    """q, o and their cotangents have 2**31 + 2**16 elements, 2**32 bytes and more: the last batch elements are right too."""
    batch, length, heads, head_dim = 2**15 + 1, 64, 16, 64
    needs_memory(gpu, 40 * GIB)
    make = jax.jit(lambda key, heads: jax.random.normal(key, (batch, length, heads, head_dim), jnp.bfloat16), static_argnums=1)
    q, k, v = make(jax.random.key(0), heads), make(jax.random.key(1), 1), make(jax.random.key(2), 1)
    assert q.size > 2**31
    assert q.nbytes > 2**32
    grad = jax.jit(jax.grad(loss, (0, 1, 2)))
    got = jax.tree.map(lambda x: np.asarray(x[-2:]), grad(q, k, v))
    wanted = jax.tree.map(np.asarray, grad(q[-2:], k[-2:], v[-2:]))
    chex.assert_tree_all_finite(wanted)
    chex.assert_trees_all_equal(got, wanted)


@pytest.mark.parametrize("option", ["mask", "bias"])
def test_an_array_of_pairs_of_more_than_2_to_the_31_elements(gpu, option):
    """46400 x 46400: the last queries see what the last rows say."""
    length, some = 46400, 128
    needs_memory(gpu, 40 * GIB)
    q, k, v = qkv(batch=1, length=length, heads=1, kv_heads=1)
    draw = lambda: jax.random.normal(jax.random.key(3), (length, length), jnp.bfloat16)
    pairs = jax.jit(lambda: draw() > 0)() if option == "mask" else jax.jit(draw)()
    assert pairs.size > 2**31
    options = {"causal": True, "implementation": "triton"}
    attend = jax.jit(lambda q, k, v, x, offset: attention(q, k, v, q_offset=offset, **options, **{option: x}))
    got = np.asarray(attend(q, k, v, pairs, 0)[:, -some:], np.float32)
    wanted = np.asarray(attend(q[:, -some:], k, v, pairs[-some:], length - some), np.float32)
    chex.assert_tree_all_finite(wanted)
    chex.assert_trees_all_close(got, wanted, rtol=0, atol=0.01)


# ---------------------------------------------------------------------------------------------------------- programs

PEAKS = """
import json, jax, jax.numpy as jnp, jflash
grad = jax.jit(jax.grad(lambda q, k, v: jflash.attention(q, k, v, causal=True).astype(jnp.float32).sum(), (0, 1, 2)))
peaks = []
for length in (8192, 16384, 32768, 65536):
    q, k, v = (jax.random.normal(jax.random.key(n), (1, length, 4, 64), jnp.bfloat16) for n in range(3))
    jax.block_until_ready(grad(q, k, v))
    peaks.append(jax.devices()[0].memory_stats()["peak_bytes_in_use"])
    del q, k, v
print(json.dumps(peaks))
"""


def test_peak_memory_of_forward_and_backward_is_linear_in_the_length():
    peaks = program(PEAKS)
    growth = [after - before for before, after in itertools.pairwise(peaks)]
    for once, twice in itertools.pairwise(growth):
        assert 0 < twice <= 2.5 * once, peaks
    assert peaks[-1] < 2**16 * 2**16 * 2 / 8, "far from a matrix of all pairs"


TRAINING = """
import dataclasses, json
from benchmarks import text, training
from rich.console import Console
texts, losses = None, {}
for attention in ("jflash", "naive"):
    options = training.Options(attention=attention, steps=10)
    texts = texts or training.Texts(*text.split(text.read(None), options.length))
    losses[attention] = training.train(options, texts, Console(quiet=True))[1].losses
print(json.dumps(losses))
"""


def test_ten_steps_of_training_lose_what_naive_attention_loses():
    losses = program(TRAINING)
    assert len(losses["jflash"]) == 10
    chex.assert_trees_all_close(np.array(losses["jflash"]), np.array(losses["naive"]), rtol=0, atol=5e-3)


README = """
import json, pathlib, re, jax
names = {}
for example in re.findall(r"```python\\n(.*?)```", pathlib.Path("README.md").read_text(), re.S):
    exec(example, names)
print(json.dumps([jax.default_backend(), bool(jax.numpy.isfinite(names["o"].astype(float)).all())]))
"""


def test_the_examples_of_the_readme_run():
    assert program(README) == ["gpu", True]


def test_self_check_agrees():
    code = "import json; from jflash import __main__; print(json.dumps(__main__.main()))"
    assert program(code.replace("import json;", "import json, sys; sys.argv = ['jflash'];")) == 0
