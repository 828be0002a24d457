"""Tensor cores: ldmatrix and its kin, mma.sync, and wgmma."""

import re

from emulator import fragments
from emulator.errors import Unknown
from emulator.parser import Float, Instruction, Integer, Vector
from emulator.translator import Translator, instruction, parts

FORMATS = ("f16", "bf16", "tf32")


@instruction("ldmatrix", "stmatrix")
def ldmatrix(t: Translator, i: Instruction):
    """One to four 8 x 8 matrices of 16 bits, whose rows lie where the threads say."""
    if i.guard or "m8n8" not in i.modifiers or i.kind != "b16":
        raise Unknown("its form")
    transposed = "trans" in i.modifiers
    if i.name == "stmatrix":
        values = ", ".join(t.read_array(x, "u4") for x in parts(i.operands[1]))
        t.emit(f"M.shared.store_matrices({t.address(i.operands[0])}, ({values},), {transposed}, m, {t.site})")
        return
    targets = parts(i.operands[0])
    loaded = t.variable(f"M.shared.load_matrices({t.address(i.operands[1])}, {len(targets)}, {transposed}, m, {t.site})")
    for n, register in enumerate(targets):
        t.write(register, "u4", f"{loaded}[{n}]")


@instruction("movmatrix")
def movmatrix(t: Translator, i: Instruction):
    t.emit(f"M.threads.check_warps(m, {t.site})")
    t.write(i.operands[0], "u4", t.call(fragments.transposed, t.read_array(i.operands[1], "u4")))


@instruction("mma")
def mma(t: Translator, i: Instruction):
    """d = a·b + c, of a whole warp. Products of a chain of them stay matrices."""
    shape = next(x for x in i.modifiers if re.match(r"m\d+n\d+k\d+$", x))
    *_, row, column, d, a, b, c = i.modifiers
    if i.guard or shape not in ("m16n8k16", "m16n8k8") or (row, column) != ("row", "col"):
        raise Unknown("its form")
    if (d, c) != ("f32", "f32") or a != b or a not in FORMATS:
        raise Unknown("its types")
    of_a, of_b, of_c = map(parts, i.operands[1:])
    t.emit(f"M.threads.check_warps(m, {t.site})")
    left, right = _matrix(t, fragments.matrix_a, of_a, a), _matrix(t, fragments.matrix_b, of_b, a)
    product = f"{left} @ {right}"
    if chained := t.product_of(of_c):
        product += f" + {chained}"
    elif not all(isinstance(x, Integer | Float) and x in (Integer(0), Float(0, 32)) for x in of_c):
        product += f" + {_matrix(t, fragments.matrix_c, of_c, 'f32')}"
    t.write_product(parts(i.operands[0]), t.variable(product))


def _matrix(t: Translator, build, operands, kind: str) -> str:
    """The matrix whose fragments lie in these registers; made once, for all mma that take it."""
    view = "f4" if kind == "f32" else "u4"
    key = build, kind, t.identity(operands)
    if key not in t.fragments:
        registers = ", ".join(t.read_array(x, view) for x in operands)
        t.fragments[key] = t.variable(t.call(build, f"({registers},)", repr(kind)))
    return t.fragments[key]


@instruction("wgmma")
def wgmma(t: Translator, i: Instruction):
    """Of four warps: a·b is added to d some time before it is waited for."""
    if i.guard:
        raise Unknown("under a predicate")
    what = i.modifiers[0]
    if what == "fence":
        t.emit("M.wgmma.fence()")
    elif what == "commit_group":
        t.emit(f"M.wgmma.commit(m, {t.site})")
    elif what == "wait_group":
        t.emit(f"M.wgmma.wait({i.operands[0].value}, R, m, {t.site})")
    elif what == "mma_async":
        _wgmma(t, i)
    else:
        raise Unknown(what)


def _wgmma(t: Translator, i: Instruction):
    n, k = next((int(x[1]), int(x[2])) for x in map(re.compile(r"m64n(\d+)k(\d+)$").match, i.modifiers) if x)
    *_, d, a, b = i.modifiers
    if d != "f32" or a != b or a not in FORMATS:
        raise Unknown("its types")
    result, left, right, adds, *immediates = i.operands
    scale_a, scale_b, *transpositions = (x.value for x in immediates)
    if isinstance(left, Vector):
        of_a = "[" + ", ".join(t.read_array(x, "u4") for x in left.parts) + "]"
        transpositions = transpositions and [0, *transpositions]
    else:
        of_a = t.read_array(left, "u8")
    trans_a, trans_b = transpositions or (0, 0)  # tf32 has none
    slots = tuple(t.slots[x.name] for x in parts(result))
    form = t.constant((slots, n, k, a, scale_a * scale_b, bool(trans_a), bool(trans_b)))
    t.emit(f"M.wgmma.issue({form}, {of_a}, {t.read_array(right, 'u8')}, {t.read_array(adds, '?')}, R, m, {t.site})")
