"""What several tests share: small tiles, and the one comparison with float64."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import BlockSizes, machine_code
from jflash.proof import accuracy

MISSING = machine_code.missing_wheels()
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

TILED = ("xla", "interpret")
SMALL_TILES = BlockSizes(
    block_q=32, block_kv=16, block_q_dkv=16, block_kv_dkv=32, block_q_dq=32, block_kv_dq=16
)  # so that short sequences have many tiles


@contextlib.contextmanager
def compiling_quickly():
    """Where compiling for the CPU takes the time, and not what is compiled."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def references(case):
    arrays = case.arrays()
    with compiling_quickly():
        return arrays, accuracy.run(case, arrays, implementation="naive"), accuracy.exact(case, arrays)


def check(case, **how):
    """Of implementations only "xla" is compiled for a CPU as its users compile it: for the kernels that is no home."""
    arrays = references(case)[0]
    with contextlib.nullcontext() if how.get("implementation") in (None, "xla") else compiling_quickly():
        got = accuracy.run(case, arrays, **how)
    return judged(case, got)


def judged(case, got):
    """`got`, the outputs of a case, after the comparison with float64."""
    arrays, naive, x64 = references(case)
    for verdict in accuracy.verdicts(case, arrays, got, naive, x64):
        assert verdict.agrees, verdict
    empty = ~np.isfinite(x64.lse)
    for x in (got.o, got.dq):
        assert not np.asarray(x, np.float32).swapaxes(1, 2)[empty].any(), "a row that sees nothing is exactly zero"
    assert (np.asarray(got.lse)[empty] == -np.inf).all()
    return got


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)
