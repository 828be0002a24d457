"""Real kernels with one instruction broken: does the emulator see it?

Each mutant is one of jflash's own kernels, in which the PTX that a pattern finds is left out or changed. Right results, no
problem and no note, as of the kernel that is not broken, would mean that nobody would see the same fault in the compiler.
"""

import functools
import re

import jax
import numpy as np
import pytest
from checks import judged, needs_compiler, references

from emulator import Fault
from emulator.under_jflash import emulated
from jflash.proof import accuracy
from jflash.proof.cases import Case

pytestmark = [needs_compiler, pytest.mark.whole]
CASE = Case(130, 130, head_dim=32, heads=1, kv_heads=1, batch=1, causal=True, dtype="float16")
KERNELS = ("jflash_forward", "jflash_dkv", "jflash_dq")

# name: what it finds, and what becomes of it.
FENCES_AND_WAITS = {
    "no wait for asynchronous copies": (r"cp\.async\.wait_group\s+\d+;", ""),
    "a wait for fewer copies": (r"cp\.async\.wait_group\s+(\d+);", lambda found: f"cp.async.wait_group {int(found[1]) + 1};"),
    "no barrier": (r"bar\.sync\s+0;", ""),
}
BOUNDS = {
    "a bound of lengths loosened by one": (
        r"(setp\.l[te](?:\.and)?\.[us]32\s+%p\d+, %r\d+, )(129|130)\b",
        lambda found: f"{found[1]}{int(found[2]) + 1}",
    ),
}
ONLY_A100 = {
    "a matrix loaded transposed": (r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared", "ldmatrix.sync.aligned.m8n8.x4.trans.shared"),
    "a swizzle of other rows": (
        r"(ldmatrix\.\S+ \{[^}]*\}, \[%rd\d+)(?:\+(\d+))?\]",
        lambda found: f"{found[1]}+{int(found[2] or 0) ^ 16}]",
    ),
}
ONLY_H100 = {
    "no wait for products": (r"wgmma\.wait_group\.sync\.aligned \d+;", ""),
    "no fence before products": (r"fence\.proxy\.async\.shared::cta;", ""),
}
MUTATIONS = {"a100": FENCES_AND_WAITS | BOUNDS | ONLY_A100, "h100": FENCES_AND_WAITS | BOUNDS | ONLY_H100}


@functools.cache
def program(gpu):
    """(forward and backward of CASE, what to call it with, the PTX of each kernel, and what is noted of it)"""
    seen = {}
    with emulated(gpu, lambda name, ptx: seen.setdefault(name, ptx)) as log:
        compiled, arguments = accuracy.program(CASE, references(CASE)[0], implementation="triton")
        judged(CASE, jax.tree.map(np.asarray, compiled(*arguments)))
    assert not log.problems
    return compiled, arguments, seen, notes_of(log)


def notes_of(log):
    return {note for _, report in log.launches for note in report.notes}


def noticed(gpu, kernel, ptx):
    """What the emulator finds in CASE when a kernel has this PTX instead, or None."""
    compiled, arguments, _, notes = program(gpu)
    with emulated(gpu, lambda name, original: ptx if name == kernel else original) as log:
        try:
            judged(CASE, jax.tree.map(np.asarray, compiled(*arguments)))
        except AssertionError as error:
            return f"wrong: {error}"
        except Exception as error:
            if Fault.__name__ not in str(error):
                raise
            return f"fault: {error}"
    return next(iter((*log.problems, *(notes_of(log) - notes))), None)


def mutants(gpu, kernel, mutation):
    """The kernel's PTX with one place of it changed, for each place."""
    pattern, becomes = MUTATIONS[gpu][mutation]
    original = program(gpu)[2][kernel]
    for found in re.finditer(pattern, original):
        new = becomes if isinstance(becomes, str) else becomes(found)
        yield original[: found.start()] + new + original[found.end() :]


@pytest.mark.parametrize(
    ("gpu", "kernel", "mutation"),
    [
        pytest.param(gpu, kernel, mutation, id=f"{gpu} {kernel}: {mutation}", marks=pytest.mark.xdist_group(f"mutants {gpu}"))
        for gpu in MUTATIONS
        for mutation in MUTATIONS[gpu]
        for kernel in KERNELS
    ],
)
def test_a_mutant_is_noticed(gpu, kernel, mutation):
    """In one place of several at least: compilers wait more often than they must."""
    some = list(mutants(gpu, kernel, mutation))
    assert some, "the kernel holds nothing that this mutation changes"
    assert any(noticed(gpu, kernel, ptx) for ptx in some)
