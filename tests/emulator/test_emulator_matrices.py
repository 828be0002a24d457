"""The emulator's tensor cores beside loops over the drawings of the PTX ISA: which thread has which element, and where a
matrix lies in shared memory."""

import numpy as np
import pytest

from emulator.by_hand import execute
from emulator.descriptors import WIDTHS

LOADS = "mul.wide.u32 %d30, %r99, {size}; add.s64 %d31, %d{array}, %d30; ld.global.v{count}.b32 {{{registers}}}, [%d31];"


def load(array, registers):
    """PTX that loads each thread's row of an array into these registers."""
    count = len(registers.split(","))
    return LOADS.format(size=4 * count, array=array, count=count, registers=registers)


def encoded(x, kind):
    """x, which the format can hold, as integers of its width."""
    if kind == "tf32":
        return x.astype(np.float32).view(np.uint32)
    return x.astype(np.float16).view(np.uint16) if kind == "f16" else (x.astype(np.float32).view(np.uint32) >> 16).astype("u2")


def held(*shape):
    """Random numbers of few bits, that all formats can hold."""
    return np.random.default_rng(shape).integers(-64, 65, shape) / 16


def random_bits(*shape):
    return np.random.default_rng(shape).integers(0, 2**16, shape).astype(np.uint16)


def packed(elements, kind):
    """The 32-bit registers of elements [..., count]."""
    return np.ascontiguousarray(encoded(elements, kind)).view(np.uint32)


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32"])
@pytest.mark.parametrize("adds", ["registers", "zero", "a product"])
def test_mma(kind, adds):
    k = 8 if kind == "tf32" else 16
    a, b, c = held(16, k), held(k, 8), held(16, 8)
    of_a, of_b = np.zeros((32, k // 2)), np.zeros((32, k // 4))
    for lane in range(32):
        g, t = divmod(lane, 4)
        # "row = groupID for a0, a1, a4, a5, else groupID + 8" and so on; of tf32 a register holds one element.
        for n in range(k // 2):
            register, within = (n, 0) if kind == "tf32" else divmod(n, 2)
            column = t + 4 * (register // 2) if kind == "tf32" else 2 * t + within + 8 * (register // 2)
            of_a[lane, n] = a[g + 8 * (register % 2), column]
        for n in range(k // 4):
            row = t + 4 * n if kind == "tf32" else 2 * t + n % 2 + 8 * (n // 2)
            of_b[lane, n] = b[row, g]
    place = lambda lane, n: (lane // 4 + 8 * (n // 2), 2 * (lane % 4) + n % 2)
    of_c = np.array([[c[place(lane, n)] for n in range(4)] for lane in range(32)], np.float32)
    a_, b_, c_, d_ = "%r0,%r1,%r2,%r3", "%r4,%r5", "%r6,%r7,%r8,%r9", "%r10,%r11,%r12,%r13"
    mma = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{{d_}}}, {{{a_}}}, {{{b_}}}, "
    zero = "{0f00000000,0f00000000,0f00000000,0f00000000};"
    body = load(0, a_) + load(1, b_) + load(2, c_)
    body += mma + ("{" + c_ + "};" if adds == "registers" else zero)
    body += mma + "{" + d_ + "};" if adds == "a product" else ""
    body += "mul.wide.u32 %d30, %r99, 16; add.s64 %d31, %d3, %d30; st.global.v4.b32 [%d31], {" + d_ + "};"
    arrays = packed(of_a, kind), packed(of_b, kind), of_c
    got, _ = execute(body, arrays, np.empty((32, 4), np.float32))
    wanted = {"registers": a @ b + c, "zero": a @ b, "a product": 2 * (a @ b)}[adds]
    np.testing.assert_array_equal(got, [[wanted[place(lane, n)] for n in range(4)] for lane in range(32)])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_ldmatrix_and_stmatrix(count, transposed):
    """Rows of eight elements lie anywhere; stmatrix puts back what ldmatrix took."""
    data = random_bits(64, 8)
    places = np.random.default_rng(count).permutation(64)[:32].astype(np.uint32)
    registers = ", ".join(f"%r{10 + n}" for n in range(count))
    form = f"sync.aligned.m8n8.x{count}{transposed}.shared.b16"
    body = f"""
        mul.wide.u32 %d20, %r99, 32; add.s64 %d21, %d0, %d20; mov.b64 %d22, shared_memory; add.s64 %d22, %d22, %d20;
        add.s64 %d23, %d1, %d39; ld.global.b32 %r8, [%d23]; shl.b32 %r8, %r8, 4; add.u32 %r9, %r8, 1024;
        ld.global.v4.b32 {{%r0,%r1,%r2,%r3}}, [%d21]; st.shared.v4.b32 [%d22], {{%r0,%r1,%r2,%r3}};
        ld.global.v4.b32 {{%r0,%r1,%r2,%r3}}, [%d21+16]; st.shared.v4.b32 [%d22+16], {{%r0,%r1,%r2,%r3}};
        bar.sync 0; ldmatrix.{form} {{{registers}}}, [%r8]; stmatrix.{form} [%r9], {{{registers}}}; bar.sync 0;
        add.s64 %d24, %d2, %d39; add.s64 %d25, %d2, %d20;
        ld.shared.v4.b32 {{%r0,%r1,%r2,%r3}}, [%d22+1024]; st.global.v4.b32 [%d25+512], {{%r0,%r1,%r2,%r3}};
        ld.shared.v4.b32 {{%r0,%r1,%r2,%r3}}, [%d22+1040]; st.global.v4.b32 [%d25+528], {{%r0,%r1,%r2,%r3}};
    """
    body += "".join(f"st.global.b32 [%d24+{128 * n}], %r{10 + n};" for n in range(count))
    got, _ = execute(body, (data, places), np.zeros(128 + 256, np.uint32), shared_bytes=2048)
    for n in range(count):
        matrix = data[places[8 * n : 8 * n + 8]]
        matrix = matrix.T if transposed else matrix
        for lane in range(32):
            low, high = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2].astype(int)
            assert got[32 * n + lane] == low | high << 16
    used = places[: 8 * count]
    np.testing.assert_array_equal(got[128:].view(np.uint16).reshape(64, 8)[used], data[used])


def test_movmatrix():
    matrix = random_bits(8, 8)
    body = "add.s64 %d31, %d0, %d39; ld.global.b32 %r0, [%d31]; movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0;"
    body += "add.s64 %d31, %d1, %d39; st.global.b32 [%d31], %r1;"
    got, _ = execute(body, (matrix,), np.empty((8, 4), np.uint32))
    np.testing.assert_array_equal(got.view(np.uint16).reshape(8, 8), matrix.T)


# ----------------------------------------------------------------------------------------------------------- wgmma


def placed(memory, matrix, base, swizzle, transposed):
    """Puts a matrix of two-byte elements into shared memory as the PTX ISA draws it; returns its descriptor."""
    rows, k = matrix.shape
    width = WIDTHS[swizzle]
    if swizzle == 0:  # core matrices of 8 rows of 16 bytes: rows of the matrix one behind the other, then along k
        along_k, along_rows = 16 * rows, 128
        leading, stride = (along_k, along_rows)
    elif transposed:  # atoms of 8 of k: along k one behind the other, then along the rows
        stride, leading = 8 * width, width * k
    else:  # atoms of 8 rows
        stride, leading = 8 * width, 16
    for r in range(rows):
        for c in range(k):
            if swizzle == 0 and transposed:
                place = r // 8 * along_rows + c // 8 * along_k + c % 8 * 16 + r % 8 * 2
            elif swizzle == 0:
                place = r // 8 * along_rows + c // 8 * along_k + r % 8 * 16 + c % 8 * 2
            elif transposed:
                per_atom = width // 2
                place = r // per_atom * leading + c // 8 * stride + c % 8 * width + r % per_atom * 2
            else:
                place = r // 8 * stride + r % 8 * width + c * 2
            line, unit, within = (base + place) // 128, (base + place) // 16 % 8, place % 16
            unit ^= {0: 0, 1: line % 8, 2: line % 4, 3: line % 2}[swizzle]
            memory[line * 128 + unit * 16 + within :][:2] = matrix[r, c : c + 1].view(np.uint8)
    return base >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | swizzle << 62


def wgmma_body(
    n,
    descriptors,
    operand_a,
    transposed,
    kind="f16",
    fence="fence.proxy.async.shared::cta;",
    wait="wgmma.wait_group.sync.aligned 0;",
):
    """64 x n: memory (operand 0) to shared memory, the product added to 0.5, and its registers stored, a row a thread."""
    registers = [f"%f{k}" for k in range(n // 2)]
    body = "mov.b64 %d20, shared_memory; mul.wide.u32 %d21, %r99, 256; add.s64 %d22, %d20, %d21; add.s64 %d23, %d0, %d21;"
    for k in range(0, 256, 16):
        body += f"ld.global.v4.b32 {{%r0,%r1,%r2,%r3}}, [%d23+{k}]; st.shared.v4.b32 [%d22+{k}], {{%r0,%r1,%r2,%r3}};"
    body += fence + "bar.sync 0;" + "".join(f"mov.b32 {r}, 0f3F000000;" for r in registers)
    body += load(1, "%r10,%r11,%r12,%r13") if operand_a == "registers" else ""
    a = "{%r10,%r11,%r12,%r13}" if operand_a == "registers" else "%d24"
    immediates = f"1, 1, {transposed}" if operand_a == "registers" else f"1, 1, 0, {transposed}"
    body += f"""
        mov.b64 %d24, {descriptors[0]}; mov.b64 %d25, {descriptors[1]}; setp.ne.u32 %p1, %r99, 1000;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{", ".join(registers)}}}, {a}, %d25, %p1, {immediates};
        wgmma.commit_group.sync.aligned; {wait}
        mul.wide.u32 %d26, %r99, {2 * n}; add.s64 %d27, %d2, %d26;
    """
    return body + "".join(f"st.global.b32 [%d27+{4 * k}], {r};" for k, r in enumerate(registers))


def operands_of_wgmma(n, swizzle, transposed, kind="f16"):
    a, b = held(64, 16), held(n, 16)
    memory = np.zeros(32768, np.uint8)
    descriptors = [
        placed(memory, encoded(a, kind), 0, swizzle, False),
        placed(memory, encoded(b, kind), 16384, swizzle, transposed),
    ]
    of_a = np.zeros((128, 8))
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for element in range(8):
            register, within = divmod(element, 2)
            of_a[thread, element] = a[16 * warp + g + 8 * (register % 2), 2 * t + within + 8 * (register // 2)]
    return a, b, memory, descriptors, packed(of_a, kind)


def fragments_of(d):
    """What each thread has of a product [64, n]."""
    n = d.shape[1]
    row = lambda thread, k: 16 * (thread // 32) + thread % 32 // 4 + 8 * (k // 2 % 2)
    column = lambda thread, k: 8 * (k // 4) + 2 * (thread % 4) + k % 2
    return [[d[row(thread, k), column(thread, k)] for k in range(n // 2)] for thread in range(128)]


@pytest.mark.parametrize("operand_a", ["shared", "registers"])
@pytest.mark.parametrize(
    ("n", "swizzle", "transposed"),
    [
        (64, 1, 0),
        (64, 1, 1),
        (32, 2, 0),
        (32, 2, 1),
        (16, 3, 0),
        (16, 3, 1),
        (128, 1, 1),
        (128, 3, 1),
        (128, 1, 0),
        (16, 0, 0),
        (16, 0, 1),
    ],
)
def test_wgmma(n, swizzle, transposed, operand_a):
    a, b, memory, descriptors, of_a = operands_of_wgmma(n, swizzle, transposed)
    body = wgmma_body(n, descriptors, operand_a, transposed)
    got, report = execute(body, (memory, of_a), np.empty((128, n // 2), np.float32), threads=128, shared_bytes=32768)
    np.testing.assert_array_equal(got, fragments_of(a @ b.T + 0.5))
    assert not report.problems
    assert not report.notes or operand_a == "shared"


@pytest.mark.parametrize("operand_a", ["shared", "registers"])
def test_wgmma_of_bfloat16(operand_a):
    a, b, memory, descriptors, of_a = operands_of_wgmma(16, 3, 0, "bf16")
    body = wgmma_body(16, descriptors, operand_a, 0, "bf16")
    got, _ = execute(body, (memory, of_a), np.empty((128, 8), np.float32), threads=128, shared_bytes=32768)
    np.testing.assert_array_equal(got, fragments_of(a @ b.T + 0.5))


def test_wgmma_of_tf32():
    """Elements of four bytes, eight a row: an atom of 32 bytes holds a row of k. a in registers: one element each."""
    a, b = held(64, 8), held(16, 8)
    memory, of_a = np.zeros(32768, np.uint8), np.zeros((128, 4))
    descriptor = placed(memory, encoded(b, "tf32").view(np.uint16), 16384, 3, False)
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        of_a[thread] = [a[16 * warp + g + 8 * (n % 2), t + 4 * (n // 2)] for n in range(4)]
    body = wgmma_body(16, (0, descriptor), "registers", 0, "tf32").replace("n16k16", "n16k8").replace("1, 1, 0;", "1, 1;")
    got, _ = execute(body, (memory, packed(of_a, "tf32")), np.empty((128, 8), np.float32), threads=128, shared_bytes=32768)
    np.testing.assert_array_equal(got, fragments_of(a @ b.T + 0.5))
