"""How tensor cores spread matrices over the registers of a warp.

As the PTX ISA draws it ("Matrix Fragments for mma.m16n8k16"): thread 4 g + t of a warp has of a the elements of rows g and
g + 8, of b those of column g, and of d two of row g and two of row g + 8, where t says which of each eight bytes.
"""

import numpy as np

from emulator.floats import from_bf16

u2, u4, f2, f4 = np.uint16, np.uint32, np.float16, np.float32
TF32 = u4(0xFFFFE000)  # what a tensor core reads of a float32


def elements(registers, kind: str):
    """Registers [...] as their float32 [..., 2], or [..., 1] for tf32."""
    if kind == "tf32":
        return (registers & TF32).view(f4)[..., None]
    halves = np.ascontiguousarray(registers).view(u2).reshape(*registers.shape, 2)
    return halves.view(f2).astype(f4) if kind == "f16" else from_bf16(halves)


def matrix_a(registers, kind: str):
    """[warps, 16, K] of the registers of a: two halves of the rows, within two of the columns."""
    x = elements(np.stack(registers), kind)
    x = x.reshape(len(registers) // 2, 2, -1, 8, 4, x.shape[-1]).transpose(2, 1, 3, 0, 4, 5)
    return x.reshape(x.shape[0], 16, -1)


def matrix_b(registers, kind: str):
    """[warps, K, 8]"""
    x = elements(np.stack(registers), kind)
    x = x.reshape(len(registers), -1, 8, 4, x.shape[-1]).transpose(1, 0, 3, 4, 2)
    return np.ascontiguousarray(x.reshape(x.shape[0], -1, 8))


def matrix_c(registers, kind: str):
    """[warps, 16, 8]"""
    return np.stack(registers).reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)


def unpack_product(matrix):
    """The four registers of d, [4, threads]."""
    x = matrix.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return np.ascontiguousarray(x).reshape(4, -1)


def accumulators(matrix):
    """The registers of a wgmma's d [groups, 64, N], four warps of 16 rows: [N / 2, 128 groups]."""
    groups, _, n = matrix.shape
    x = matrix.reshape(groups, 4, 2, 8, n // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
    return np.ascontiguousarray(x, f4).reshape(n // 2, -1)


def accumulated(registers):
    """[groups, 64, N] of the registers of a wgmma's d: what accumulators() undoes."""
    x = registers.reshape(registers.shape[0] // 4, 2, 2, -1, 4, 8, 4).transpose(3, 4, 1, 5, 0, 6, 2)
    return np.ascontiguousarray(x).reshape(x.shape[0], 64, -1)


def transposed(registers):
    """An 8 x 8 matrix of 16 bits in one register of each thread, transposed."""
    rows = registers.reshape(-1, 8, 4).view(u2).reshape(-1, 8, 8)
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).view(u4).reshape(-1)
