"""`python -m jflash`: what is at work here, and is it right?"""

from __future__ import annotations

import argparse
import sys
import time

import jax

import jflash
from jflash.attention import IMPLEMENTATIONS
from jflash.launch import gpu
from jflash.proof import accuracy
from jflash.proof.cases import SELF_TEST, Case

REPEATS = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jflash", description="Checks attention() against float64 on this machine.")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="force one; by default the one that runs here")
    implementation = parser.parse_args().implementation

    device = jax.devices()[0]
    at_work = implementation or ("triton" if gpu.is_default() and not gpu.too_old() else "xla")
    print(f"jflash {jflash.__version__}, JAX {jax.__version__}, {device.device_kind} ({device.platform}), {at_work}\n")
    print("Largest error of the output and of each gradient against float64, and the tolerance: twice the error of dense")
    print("attention in the same dtype, and rounding. Time and temporary memory of forward and backward, beside dense.\n")
    print(f"{'case':58}{'o':>18}{'lse':>18}{'dq':>18}{'dk':>18}{'dv':>18}{'ms / dense':>15}{'MiB / dense':>15}")
    wrong = [case.name for case in SELF_TEST if not check(case, implementation)]
    print(
        f"\n{len(wrong)} of {len(SELF_TEST)} cases disagree: {', '.join(wrong)}"
        if wrong
        else f"\nall {len(SELF_TEST)} cases agree"
    )
    return 1 if wrong else 0


def check(case: Case, implementation: str | None) -> bool:
    """Runs a case, prints its line, and says whether it agrees."""
    arrays = case.arrays()
    got, seconds, temporary = measure(case, arrays, implementation)
    naive, dense_seconds, dense_temporary = measure(case, arrays, "naive")
    verdicts = accuracy.verdicts(case, arrays, got, naive, accuracy.exact(case, arrays))
    errors = "".join(f"{f'{v.error:.1e} / {v.tolerance:.1e}':>17}{' ' if v.agrees else '!'}" for v in verdicts)
    times = f"{1e3 * seconds:.1f} / {1e3 * dense_seconds:.1f}"
    memory = f"{temporary / 2**20:.1f} / {dense_temporary / 2**20:.1f}"
    print(f"{case.name:58}{errors}{times:>15}{memory:>15}", flush=True)
    return all(verdict.agrees for verdict in verdicts)


def measure(case: Case, arrays, implementation: str | None) -> tuple[accuracy.Outputs, float, int]:
    """(outputs, seconds of the fastest of a few runs, bytes of temporary memory) of forward and backward."""
    compiled, arguments = accuracy.program(case, arrays, implementation=implementation)
    got = jax.block_until_ready(compiled(*arguments))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    memory = compiled.memory_analysis()
    return got, min(seconds), memory.temp_size_in_bytes if memory else 0


if __name__ == "__main__":
    sys.exit(main())
