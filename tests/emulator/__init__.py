"""An NVIDIA GPU in numpy: executes the PTX that XLA's Triton makes for A100 (sm_80) and H100 (sm_90a), and judges it.

    program = Translator(parse(text)["kernel"])
    results, report = launch(program, grid, threads, shared_bytes, operands, results)

    with emulated("h100") as log:                                        # under jflash
        o = jflash.attention(q, k, v, implementation="triton")

What a reader should look at, in this order:

- types.py, parser.py: PTX as instructions.
- control_flow.py, translator.py: basic blocks as Python functions, in which a register is a numpy array of one value a thread.
- instructions/: what each instruction does. floats.py and fragments.py: formats, and matrices in the registers of a warp.
- execution.py, threads.py: who runs when, and what the threads of a warp do together.
- memory.py, shared.py, races.py: who may read and write what, and who must wait for whom.
- copies.py (cp.async), descriptors.py and wgmma.py: what happens later than it stands in the text.
- under_jflash.py, compiled.py: jflash's own launches on this GPU.

It is made to find faults, so what hardware does in silence it says aloud.

- It ends with a Fault, that names instruction, thread and block: an access out of bounds of an array or of shared memory, or
  misaligned; a write to an operand; a barrier that not all threads of a block reach; an instruction for a whole warp or
  warpgroup that a part of it executes; a descriptor that is not the same in a warpgroup; a wgmma that nobody waits for, or
  whose operand is overwritten before.
- It shows as NaN: what nobody wrote, in registers, shared memory and results; what cp.async writes, before it is waited for.
- It is in the report's `problems`: bytes of a result that are never written, bytes that two blocks write; two threads that
  write different values to one place at once; races in shared memory; wgmma reading what no fence.proxy.async showed it.
- It is in the report's `notes`: registers that are used while a wgmma has them, where ptxas inserts waits that cost time.
- It ends with Unknown, that names the line: all that is not known.

Other than hardware: functions that a GPU approximates are exact; the sums of tensor cores are float32 in numpy's order;
fma.rn.f32 is rounded twice, wrongly once in 2**29. Not looked at: registers, spills and schedules, which ptxas decides on; an
access that leaves its row but not its array, which wrong numbers show; order in memory beyond barriers.

Not there: clusters, atomics, local memory, calls, tcgen05. A backend that uses TMA needs cp.async.bulk beside cp.async in
copies.py and instructions/movement.py, with tensor maps as a kind of parameter in memory.py; and mbarrier, whose waits are
loops that a program writes itself, so that execution.py must run other threads between two rounds of one.
"""

from emulator.errors import Fault as Fault
from emulator.errors import Unknown as Unknown
from emulator.execution import launch as launch
from emulator.parser import parse as parse
from emulator.report import Report as Report
from emulator.translator import Translator as Translator
