"""What several tests share: small tiles, and the one comparison with float64."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import BlockSizes, machine_code
from jflash.proof import accuracy
from jflash.proof.cases import CASES, Case

MISSING = machine_code.missing_wheels()
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

TILED = ("xla", "interpret")
SMALL_TILES = BlockSizes(
    block_q=32, block_kv=16, block_q_dkv=16, block_kv_dkv=32, block_q_dq=32, block_kv_dq=16
)  # so that short sequences have many tiles


def essentials(parameters, kept, several=False):
    """Parameters of a test, of which those that are not `kept` are of the whole proof alone; `several`: tuples of them."""
    return [x if kept(x) else pytest.param(*(x if several else [x]), marks=pytest.mark.whole) for x in parameters]


def cheapest_that_cover(cases, features):
    """The cheapest cases first, each that has a feature that none before it has."""
    seen, chosen = set(), []
    for case in sorted(cases, key=lambda case: case.q_len * case.kv_len * case.head_dim * case.heads):
        if new := features(case) - seen:
            seen |= new
            chosen.append(case)
    return chosen


FIELDS = {field.name: field.default for field in dataclasses.fields(Case) if field.name not in ("q_len", "kv_len", "batch")}


def options_of(case):
    """Each option that a case has, alone."""
    by_value = ("dtype", "score_fn")
    return {(name, getattr(case, name) if name in by_value else None) for name in FIELDS if getattr(case, name) != FIELDS[name]}


def fewest_that_cover(cases, features):
    """The case with the most features first, and then each time the one with the most that none before it has."""
    chosen, missing = [], set().union(*map(features, cases))
    while missing:
        chosen.append(max(cases, key=lambda case: len(features(case) & missing)))
        missing -= features(chosen[-1])
    return chosen


ESSENTIAL_CASES = fewest_that_cover(CASES, options_of)


@contextlib.contextmanager
def compiling_quickly(quickly=True):
    """Where compiling for the CPU takes the time, and not what is compiled; `quickly` False: as users compile, within it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quickly)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def tangent_references(case):
    """(naive's tangents, (outputs, tangents) in float64)"""
    arrays = case.arrays()
    with compiling_quickly():
        _, naive = accuracy.run(case, arrays, implementation="naive", tangents=True)
        return naive, accuracy.exact(case, arrays, tangents=True)


def check_tangents(case, **how):
    """The same as check() of the tangents of the outputs, and of the gradients."""
    with compiling_as_for_users(how.get("implementation")):
        _, got = accuracy.run(case, case.arrays(), tangents=True, **how)
    return judged_tangents(case, got)


def judged_tangents(case, got):
    naive, x64 = tangent_references(case)
    for verdict in accuracy.tangent_verdicts(case, case.arrays(), got, naive, x64):
        assert verdict.agrees, verdict
    empty = ~np.isfinite(x64[0].lse)
    for x in (got.o, got.dq):
        assert not np.asarray(x, np.float32).swapaxes(1, 2)[empty].any(), "nothing moves in a row that sees nothing"
    assert not np.asarray(got.lse)[empty].any()
    return got


@functools.cache
def exact(case):
    """What dense attention gives in float64."""
    with compiling_quickly():
        return accuracy.exact(case, case.arrays())


@functools.cache
def references(case):
    arrays = case.arrays()
    with compiling_quickly():
        return arrays, accuracy.run(case, arrays, implementation="naive"), exact(case)


def check(case, **how):
    with compiling_as_for_users(how.get("implementation")):
        got = accuracy.run(case, references(case)[0], **how)
    return judged(case, got)


def compiling_as_for_users(implementation):
    """Of implementations only "xla" is compiled for a CPU as its users compile it: for the kernels that is no home."""
    return compiling_quickly(implementation not in (None, "xla"))


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
