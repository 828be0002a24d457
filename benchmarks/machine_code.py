"""`python -m benchmarks.machine_code`: what the compiler makes of each kernel and of its peers, on a machine without a GPU.

Registers, spills, shared memory, instructions and waits are exact; "serialized" is what ptxas calls it where it waits for each
HGMMA on its own. Issue slots and the share of peak come from counts and the
rates assumed in jflash/machine_code/loops.py; they know of no latency and are no measurement.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jflash
from benchmarks import native_triton
from benchmarks.measure import RESULTS, print_table, write_csv
from jflash import machine_code
from jflash.machine_code import GPUS, Kernel, Loop


def with_backward(fn: Callable) -> Callable:
    """fn(q, k, v) followed by its transpose."""
    return lambda q, k, v, do: jax.vjp(fn, q, k, v)[1](do)


def deprecated_pallas(causal: bool) -> Callable | None:
    """JAX's own Pallas-Triton attention, deprecated; None where it is gone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.attention import mha
    except ImportError:
        return None
    return lambda q, k, v: mha(q, k, v, None, sm_scale=q.shape[-1] ** -0.5, causal=causal)


def tokamax(causal: bool) -> Callable | None:
    """Tokamax's Pallas-Triton attention; None where tokamax is not installed."""
    try:
        import tokamax  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return functools.partial(tokamax.dot_product_attention, is_causal=causal, implementation="triton")


def in_triton(causal: bool) -> Callable | None:
    """The same kernels in Triton itself, compiled by Triton; None where they cannot be."""
    return None if native_triton.unavailable() else functools.partial(native_triton.attention, causal=causal)


def peers(causal: bool) -> dict[str, Callable]:
    """name -> fn(q, k, v) of what is installed."""
    found = {"native triton": in_triton(causal), "pallas.ops.gpu": deprecated_pallas(causal), "tokamax": tokamax(causal)}
    ours = functools.partial(jflash.attention, causal=causal)
    return {"jflash": ours, **{name: fn for name, fn in found.items() if fn is not None}}


def kernels(fn: Callable, gpu: str, head_dim: int, length: int, dtype) -> list[Kernel]:
    """The kernels of forward and backward that multiply on the tensor cores."""
    x = jax.ShapeDtypeStruct((2, length, 8, head_dim), dtype)
    program = machine_code.compile_for(with_backward(fn), x, x, x, x, gpu=gpu)
    return [kernel for kernel in program.kernels if kernel.tensor_cores]


def row(name: str, kernel: Kernel, head_dim: int, causal: bool, loop: Loop | None) -> dict[str, Any]:
    """One line of the table: a kernel, and one of its loops."""
    tensor = loop.cycles["tensor"] if loop else 0
    return {
        "attention": name,
        "kernel": kernel.name,
        "head_dim": head_dim,
        "causal": causal,
        "loop": None if loop is None else "hot" if loop is kernel.hot else "other",
        "threads": kernel.threads,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "blocks": kernel.blocks_per_multiprocessor,
        "tensor_cores": kernel.tensor_cores,
        "serialized": " ".join(message.partition(":")[0] for message in kernel.serialized) or None,
        "hgmma": loop.opcodes["HGMMA"] or None if loop else None,
        "waits": loop.waits or None if loop else None,
        "instructions": loop.instructions if loop else None,
        "tensor_cycles": tensor or None,
        "issue_per_tensor": round(loop.cycles["issue"] / tensor, 2) if loop and tensor else None,
        # The busiest pipe sets the pace, where other blocks fill every wait.
        "peak_share": round(tensor / max(loop.cycles.values()), 2) if loop and tensor else None,
    }


def rows(gpu: str, head_dims: list[int], length: int, dtype) -> Iterator[dict[str, Any]]:
    for head_dim in head_dims:
        for causal in (False, True):
            for name, fn in peers(causal).items():
                try:
                    found = kernels(fn, gpu, head_dim, length, dtype)
                except Exception as error:  # a peer that cannot be compiled is a gap in the table, not its end
                    if name == "jflash":
                        raise
                    yield {"attention": name, "kernel": f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"}
                    continue
                for kernel in found:
                    for loop in kernel.busy or (None,):
                        yield row(name, kernel, head_dim, causal, loop)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine_code", description=__doc__)
    parser.add_argument("--gpu", choices=list(GPUS), default="h100")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/machine_code_<gpu>.csv")
    options = parser.parse_args()
    machine_code.prepare()

    if reason := native_triton.unavailable():
        print(f"native triton is left out: {reason}")
    found = list(rows(options.gpu, options.head_dim, options.length, jnp.dtype(options.dtype)))
    print_table(f"{options.gpu}, {options.dtype}, JAX {jax.__version__}: compiled, not run", found)
    output = options.output or RESULTS / f"machine_code_{options.gpu}.csv"
    write_csv(found, output, gpu=options.gpu, dtype=options.dtype, jax=jax.__version__)


if __name__ == "__main__":
    main()
