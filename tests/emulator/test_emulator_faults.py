"""What the emulator must notice, in kernels made for each; and that it says nothing of those that are right."""

import numpy as np
import pytest

from emulator import Fault, Unknown
from emulator.by_hand import execute
from emulator.test_emulator_matrices import operands_of_wgmma, wgmma_body

X = np.arange(32, dtype=np.uint32)
ADDRESS = "add.s64 %d31, %d0, %d39; add.s64 %d32, %d1, %d39;"  # of a thread's element of the operand, and of the result
WRITTEN = ADDRESS + "st.global.b32 [%d32], %r99;"
SHARED = "mov.b64 %d20, shared_memory; add.s64 %d21, %d20, %d39;"


def run(body, threads=32, shared_bytes=128, grid=(1,), size=32):
    return execute(body, (X,), np.empty(size, np.uint32), threads=threads, shared_bytes=shared_bytes, grid=grid)


FAULTS = {
    "a load behind the end": (
        ADDRESS + "ld.global.b32 %r0, [%d31+4];",
        "thread 31 .* 4 bytes at 128 are out of bounds of operand 0",
    ),
    "a load before the start": (ADDRESS + "ld.global.b32 %r0, [%d31-4];", "thread 0 .* 4 bytes at -4 are out of bounds"),
    "a load by one thread": (
        ADDRESS + "setp.eq.u32 %p1, %r99, 7; @%p1 ld.global.b32 %r0, [%d31+128];",
        "thread 7 .* out of bounds",
    ),
    "a store behind the end": (ADDRESS + "st.global.b32 [%d32+4], %r99;", "out of bounds of result 0"),
    "a store to an operand": (ADDRESS + "st.global.b32 [%d31], %r99;", "operand 0 is written"),
    "no array": ("mov.b64 %d30, 64; ld.global.b32 %r0, [%d30];", "0x40 is the address of nothing"),
    "a misaligned pair": (
        ADDRESS + "setp.eq.u32 %p1, %r99, 3; @%p1 ld.global.v2.b32 {%r0, %r1}, [%d31];",
        "8 bytes at 12 of operand 0 are misaligned",
    ),
    "shared memory behind its end": (SHARED + "st.shared.b32 [%d21+4], %r99;", "thread 31 .* out of bounds of shared memory"),
    "misaligned shared memory": (
        SHARED + "setp.eq.u32 %p1, %r99, 3; @%p1 st.shared.b32 [%d21+2], %r99;",
        "thread 3 .* 4 bytes at 0xe are misaligned in shared memory",
    ),
    "an asynchronous copy from behind the end": (
        ADDRESS + SHARED + "cp.async.ca.shared.global [%d21], [%d31+4], 4;",
        "out of bounds of operand 0",
    ),
    "rows of a matrix behind the end": (
        "shl.b32 %r0, %r99, 4; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r0];",
        "thread 8 .* 16 bytes at 0x80 are out of bounds of shared memory",
    ),
    "two barriers": (
        "setp.lt.u32 %p1, %r99, 16; @%p1 bra there; bar.sync 0; bra done; there: bar.sync 0; done: mov.u32 %r0, 1;",
        "threads of a block wait for each other at different barriers",
    ),
    "a shuffle by half a warp": (
        "setp.lt.u32 %p1, %r99, 16; @%p1 bra there; shfl.sync.bfly.b32 %r0, %r99, 1, 31, -1; there: mov.u32 %r1, 0;",
        "not all threads of a warp are here",
    ),
    "a trap": ("setp.eq.u32 %p1, %r99, 5; @%p1 trap;", "thread 5 .* a trap"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_the_instruction_and_the_thread(fault):
    body, says = FAULTS[fault]
    with pytest.raises(Fault, match=f"by_hand: .*{says}"):
        run(body)


COPY = (
    "cp.async.ca.shared.global [%d21], [%d31], 4; cp.async.commit_group; {wait}"
    "ld.shared.b32 %r0, [%d21]; st.global.b32 [%d32], %r0;"
)


@pytest.mark.parametrize(
    ("wait", "arrives"),
    [("cp.async.wait_group 0;", True), ("cp.async.wait_all;", True), ("cp.async.wait_group 1;", False), ("", False)],
)
def test_a_copy_arrives_when_it_is_waited_for(wait, arrives):
    got, report = run(ADDRESS + SHARED + COPY.format(wait=wait))
    assert not report.problems
    np.testing.assert_array_equal(got, X if arrives else 0xFFFFFFFF)


def test_what_a_copy_ignores_is_zero():
    body = ADDRESS + SHARED + "setp.lt.u32 %p1, %r99, 9; selp.b32 %r5, 0, 4, %p1;" + COPY.format(wait="cp.async.wait_all;")
    got, _ = run(body.replace("[%d31], 4;", "[%d31], 4, %r5;"))
    np.testing.assert_array_equal(got, np.where(X < 9, 0, X))


def test_what_nobody_wrote_is_nan():
    got, _ = run(ADDRESS + SHARED + "ld.shared.b32 %r0, [%d21]; st.global.b32 [%d32], %r0;")
    assert np.isnan(got.view(np.float32)).all()


def problems(body, **how):
    return " ".join(run(body, **how)[1].problems)


def test_bytes_that_are_never_written():
    body = ADDRESS + "setp.lt.u32 %p1, %r99, 20; @%p1 st.global.b32 [%d32], %r99;"
    assert problems(body) == "48 bytes of result 0 are never written"
    assert problems(WRITTEN) == ""


def test_blocks_that_write_the_same_bytes():
    assert "two blocks write result 0" in problems(WRITTEN, grid=(2,))
    apart = "mov.u32 %r1, %ctaid.x; shl.b32 %r1, %r1, 7; cvt.u64.u32 %d30, %r1; add.s64 %d1, %d1, %d30;" + WRITTEN
    assert problems(apart, grid=(2,), size=64) == ""


def test_threads_that_write_one_place_at_once():
    assert "two threads write different values to one place" in problems(WRITTEN + "st.global.b32 [%d1], %r99;")
    assert problems(WRITTEN + "st.global.b32 [%d1], 7;") == ""


OTHER_WARP = "xor.b32 %r1, %r99, 32; mul.wide.u32 %d22, %r1, 4; add.s64 %d23, %d20, %d22;"


@pytest.mark.parametrize(
    ("first", "then", "what"),
    [
        ("st.shared.b32 [%d21], %r99;", "ld.shared.b32 %r0, [%d23];", "read after write"),
        ("ld.shared.b32 %r0, [%d23];", "st.shared.b32 [%d21], %r99;", "write after read"),
        ("st.shared.b32 [%d21], %r99;", "st.shared.b32 [%d23], %r99;", "write after write"),
    ],
)
def test_races_of_two_warps(first, then, what):
    how = {"threads": 64, "shared_bytes": 256, "size": 64}
    assert f"{what} by another warp" in problems(WRITTEN + SHARED + OTHER_WARP + first + then, **how)
    assert problems(WRITTEN + SHARED + OTHER_WARP + first + "bar.sync 0;" + then, **how) == ""


# ----------------------------------------------------------------------------------------------------------- wgmma


def wgmma(change=lambda body: body, **how):
    """A product that is right but for `change`."""
    _, _, memory, descriptors, of_a = operands_of_wgmma(16, 3, 0)
    body = change(wgmma_body(16, descriptors, "shared", 0, **how))
    return execute(body, (memory, of_a), np.empty((128, 8), np.float32), threads=128, shared_bytes=32768)


def test_registers_that_are_used_while_a_wgmma_is_under_way():
    got, report = wgmma(wait="wgmma.wait_group.sync.aligned 1;")
    assert any("ptxas must serialize" in note for note in report.notes)
    right, quiet = wgmma()
    assert not quiet.notes
    np.testing.assert_array_equal(got, right)  # for ptxas mends it


def test_a_wgmma_that_nobody_waits_for():
    cut = lambda body: body[: body.index("mul.wide.u32 %d26")]
    with pytest.raises(Fault, match=r"wgmma.mma_async.*nobody waits for it"):
        wgmma(cut, wait="")


def test_a_wgmma_of_what_no_fence_showed_it():
    _, report = wgmma(fence="")
    assert any("without fence.proxy.async" in problem for problem in report.problems)


def test_a_wgmma_whose_operand_is_overwritten():
    overwrite = "st.shared.b32 [%d22], 0; wgmma.wait_group.sync.aligned 0;"
    with pytest.raises(Fault, match="is written while it is under way"):
        wgmma(wait=overwrite)


def test_a_wgmma_of_a_part_of_its_warps():
    part = "setp.lt.u32 %p2, %r99, 64; @%p2 bra over; wgmma.fence.sync.aligned;"
    change = lambda body: body.replace("wgmma.fence.sync.aligned;", part) + "over: mov.u32 %r0, 0;"
    with pytest.raises(Fault, match="not all threads of a warpgroup are here"):
        wgmma(change)


def test_a_descriptor_that_differs_among_threads():
    change = lambda body: body.replace("wgmma.fence", "cvt.u64.u32 %d30, %r99; add.s64 %d25, %d25, %d30; wgmma.fence")
    with pytest.raises(Fault, match="a descriptor differs within a warpgroup"):
        wgmma(change)


def test_a_descriptor_of_what_is_not_there():
    change = lambda body: body.replace("wgmma.fence", "add.s64 %d25, %d25, 2047; wgmma.fence")
    with pytest.raises(Fault, match="out of bounds of shared memory"):
        wgmma(change)


@pytest.mark.parametrize(
    "instruction",
    [
        "frobnicate.b32 %r0, %r1;",
        "atom.global.add.u32 %r0, [%d0], 1;",
        "ld.local.b32 %r0, [%d0];",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%d0], [%d1], 16, [%d2];",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r0,%r1,%r2,%r3}, {%r0,%r1,%r2,%r3}, {%r0,%r1}, {%r0,%r1,%r2,%r3};",
        "add.rz.f32 %r0, %r1, %r2;",
        "cvt.rz.f16.f32 %h0, %r1;",
        "mov.u32 %r0, %clock;",
    ],
)
def test_what_is_not_known_is_named_and_not_guessed(instruction):
    with pytest.raises(
        Unknown, match=r"line \d+: " + instruction[:-1].replace("{", r"\{").replace("[", r"\[").partition("|")[0]
    ):
        run("mov.u32 %r1, 0; mov.u32 %r2, 0;" + instruction)
