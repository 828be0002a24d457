"""Kernels written by hand, for tests of the emulator itself."""

import numpy as np

from emulator.execution import launch
from emulator.parser import parse
from emulator.translator import Translator

KERNEL = """
.version 8.4
.target sm_90a
.extern .shared .align 128 .b8 shared_memory[];
.visible .entry by_hand({parameters})
.reqntid {threads}, 1, 1
{{
.reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<100>; .reg .b64 %d<40>; .reg .b32 %f<128>;
{loads}
mov.u32 %r99, %tid.x; mul.wide.u32 %d39, %r99, 4;
{body}
ret;
}}
"""


def execute(body, operands, result, threads=32, grid=(1,), shared_bytes=0):
    """(result, report) of a kernel whose body finds its arrays, the result last, at %d0, %d1, ...; the thread's number in
    %r99, and four times it in %d39. `result`: an array like the one that is written."""
    count = len(operands) + 1
    text = KERNEL.format(
        body=body,
        threads=threads,
        parameters=", ".join(f".param .u64 array{n}" for n in range(count)),
        loads=" ".join(f"ld.param.u64 %d{n}, [array{n}];" for n in range(count)),
    )
    (written,), report = launch(Translator(parse(text)["by_hand"]), grid, threads, shared_bytes, operands, [result])
    return written, report


def elementwise(instruction, *operands):
    """uint32 %r10 of `instruction` for each thread, which finds its elements of the operands in %r0, %r1, ..."""
    loads = [f"add.s64 %d38, %d{n}, %d39; ld.global.b32 %r{n}, [%d38];" for n in range(len(operands))]
    store = f"add.s64 %d38, %d{len(operands)}, %d39; st.global.b32 [%d38], %r10;"
    threads = operands[0].size
    return execute("\n".join([*loads, instruction, store]), operands, np.empty(threads, np.uint32), threads=threads)[0]
