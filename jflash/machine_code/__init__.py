"""Compile JAX functions for an NVIDIA GPU that is not there, and read the machine code.

XLA compiles for a GPU from its description alone. That takes no device and no driver, only the wheels in WHEELS::

    program = compile_for(jax.grad(loss), *avals, gpu="h100")
    for kernel in program.kernels:
        print(kernel)

Registers, spills, shared memory and instructions are exact: XLA runs the same ptxas on the same PTX. Cycles are counts
of instructions times assumed rates, and know of no latency, stall or bank conflict: a lead for tuning, not a measurement.
"""

from jflash.machine_code.compiler import WHEELS as WHEELS
from jflash.machine_code.compiler import Program as Program
from jflash.machine_code.compiler import compile_for as compile_for
from jflash.machine_code.compiler import compile_here as compile_here
from jflash.machine_code.compiler import compile_lowered as compile_lowered
from jflash.machine_code.compiler import devices as devices
from jflash.machine_code.compiler import lower_for as lower_for
from jflash.machine_code.compiler import missing_wheels as missing_wheels
from jflash.machine_code.compiler import prepare as prepare
from jflash.machine_code.gpus import GPUS as GPUS
from jflash.machine_code.gpus import Target as Target
from jflash.machine_code.gpus import like as like
from jflash.machine_code.kernel import Kernel as Kernel
from jflash.machine_code.loops import Loop as Loop
