"""`python -m benchmarks.attention`: time, TFLOPS and memory of attention over lengths, beside what else is installed.

Times are medians, see measure.seconds_in_turns(). Nothing is reported of a path whose result is not that of float64 (see
agrees()), and a path that fails, for want of memory say, leaves a gap. `benchmarks.plot` draws the CSV.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.progress import Progress

import jflash
from benchmarks import native_triton
from benchmarks.measure import RESULTS, csv_lines, device_name, seconds_in_turns

INPUTS = 3  # sets of arrays that a program meets in turn


class Shape(NamedTuple):
    """What one line of the table is of."""

    batch: int
    length: int
    heads: int
    head_dim: int
    dtype: str
    causal: bool
    backward: bool

    @property
    def flops(self) -> float:
        """4·B·H·T²·D of two products, halved for causal; with the backward, whose products are five, 3.5 times that."""
        forward = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return forward * (0.5 if self.causal else 1) * (3.5 if self.backward else 1)

    def arrays(self, seed: int) -> tuple[Array, ...]:
        """q, k, v and do."""
        keys = jax.random.split(jax.random.key(seed), 4)
        size = self.batch, self.length, self.heads, self.head_dim
        return tuple(jax.random.normal(key, size, jnp.dtype(self.dtype)) for key in keys)


class Program(NamedTuple):
    """One path, ready to be timed."""

    run: Callable[..., tuple]  # of q, k, v and do; starts what gives (o,) or (o, dq, dk, dv), see wait()
    temporary_bytes: int | None


# ------------------------------------------------------------------------------------------------------ the paths


def jax_paths(causal: bool) -> dict[str, Callable]:
    """name -> fn(q, k, v) of all that is written in JAX and could run here."""
    jax_nn = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
    own = functools.partial(jflash.attention, causal=causal)
    paths = {"jflash": own, "jax.nn": functools.partial(jax_nn, implementation="xla")}
    paths["naive"] = functools.partial(own, implementation="naive")
    if jax.default_backend() == "gpu":
        paths["jflash xla"] = functools.partial(own, implementation="xla")
        paths["cuDNN"] = functools.partial(jax_nn, implementation="cudnn")
        if not native_triton.unavailable():
            paths["native triton"] = functools.partial(native_triton.attention, causal=causal)
    try:
        import tokamax  # pyright: ignore[reportMissingImports]
    except ImportError:
        return paths
    fastest = functools.partial(tokamax.dot_product_attention, is_causal=causal)
    paths["tokamax"] = fastest
    if jax.default_backend() == "gpu":
        paths["tokamax triton"] = functools.partial(fastest, implementation="triton")
    return paths


def jax_program(fn: Callable, shape: Shape) -> Program:
    def forward_backward(q, k, v, do):
        o, pull = jax.vjp(fn, q, k, v)
        return o, *pull(do)

    whole = forward_backward if shape.backward else lambda q, k, v, do: (fn(q, k, v),)
    compiled = jax.jit(whole).lower(*jax.eval_shape(lambda: shape.arrays(0))).compile()
    memory = compiled.memory_analysis()
    return Program(compiled, memory.temp_size_in_bytes if memory else None)


def torch_program(shape: Shape) -> Program:
    """PyTorch's scaled_dot_product_attention, on the same device; it keeps heads before positions."""
    import torch  # pyright: ignore[reportMissingImports]

    place = "cuda" if jax.default_backend() == "gpu" else "cpu"
    dtype = getattr(torch, shape.dtype)
    inputs: dict[int, Any] = {}  # converted once for each set of arrays: that is not what is measured

    def convert(x):
        return torch.tensor(np.asarray(x, np.float32)).to(place, dtype).transpose(1, 2).requires_grad_(shape.backward)

    def run(*arrays):
        if id(arrays[0]) not in inputs:
            inputs[id(arrays[0])] = tuple(map(convert, arrays))
        q, k, v, do = inputs[id(arrays[0])]
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
        results = (o, *torch.autograd.grad(o, (q, k, v), do)) if shape.backward else (o,)
        return tuple(x.detach().transpose(1, 2) for x in results)

    return Program(run, None)


def wait(results: tuple) -> None:
    """Until a program's results are there."""
    if isinstance(results[0], Array):
        jax.block_until_ready(results)
    elif results[0].is_cuda:
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.synchronize()


def programs(shape: Shape, names: Sequence[str] | None) -> Iterator[tuple[str, Callable[[], Program]]]:
    """(name, what makes the program) of each path that was asked for, or of all."""
    for name, fn in jax_paths(shape.causal).items():
        if names is None or name in names:
            yield name, functools.partial(jax_program, fn, shape)
    try:
        import torch  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    if names is None or "torch" in names:
        yield "torch", functools.partial(torch_program, shape)


# ------------------------------------------------------------------------------------------------- what is measured


def agrees(results: tuple, shape: Shape, arrays: tuple[Array, ...]) -> bool:
    """Whether o, and dq, of some queries of the first head are those of float64.

    To 16 units in the last place of the dtype, or of TF32's 11 bits where a GPU multiplies float32 with those.
    """
    q, k, v, do = (np.asarray(x[0, :, 0], np.float64) for x in arrays)
    rows = np.unique(np.linspace(0, shape.length - 1, 16).astype(int))
    s = q[rows] @ k.T / shape.head_dim**0.5
    if shape.causal:
        s = np.where(np.arange(shape.length) <= rows[:, None], s, -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    dp = do[rows] @ v.T
    dq = p * (dp - (p * dp).sum(1, keepdims=True)) @ k / shape.head_dim**0.5
    tf32 = shape.dtype == "float32" and jax.default_backend() == "gpu"
    tolerance = 16 * (2.0**-11 if tf32 else float(jnp.finfo(shape.dtype).eps))
    for got, expected in zip(results[:2], (p @ v, dq), strict=False):
        got = np.asarray(got[0, rows, 0], np.float64) if isinstance(got, Array) else got[0, rows, 0].double().cpu().numpy()
        if not np.abs(got - expected).max() <= tolerance * max(1.0, np.abs(expected).max()):
            return False
    return True


def measure(
    shape: Shape, repeats: int, names: Sequence[str] | None, tell: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """One line for each path that runs and agrees; tells of the others."""
    inputs = [shape.arrays(seed) for seed in range(INPUTS)]
    ready: dict[str, Program] = {}
    for name, make in programs(shape, names):
        try:
            program = make()
            right = agrees(program.run(*inputs[0]), shape, inputs[0])
        except Exception as error:  # out of memory, or not made for this: a gap in the curve
            tell(f"{name} at {shape}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        if right:
            ready[name] = program
        else:
            tell(f"{name} at {shape}: not the result of float64, not reported")
    seconds = seconds_in_turns({name: program.run for name, program in ready.items()}, repeats, *inputs, wait=wait)
    median = {name: statistics.median(times) for name, times in seconds.items()}

    def times_as_fast(name: str) -> float | None:
        """Of the two in the same turn, for a machine may be slow for half of the turns: the median of what they say."""
        if "jax.nn" not in seconds:
            return None
        return round(statistics.median(x / y for x, y in zip(seconds["jax.nn"], seconds[name], strict=True)), 2)

    return [
        {
            "attention": name,
            **shape._asdict(),
            "milliseconds": round(1e3 * median[name], 4),
            "TFLOPS": round(1e-12 * shape.flops / median[name], 4),
            "times_as_fast_as_jax_nn": times_as_fast(name),
            "temporary_MiB": None if program.temporary_bytes is None else round(program.temporary_bytes / 2**20, 3),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "repeats": repeats,
        }
        for name, program in ready.items()
    ]


def main() -> None:
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(7, 16 if on_gpu else 13)])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--batch", type=int, default=2 if on_gpu else 1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16" if on_gpu else "float32")
    parser.add_argument("--paths", nargs="+", help="only these; default: all that are installed")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/attention_<device>.csv")
    options = parser.parse_args()
    output = options.output or RESULTS / f"attention_{device_name()}.csv"
    if on_gpu and (reason := native_triton.unavailable()):
        print(f"native triton is left out: {reason}")

    kinds = list(itertools.product(options.head_dims, (False, True), (False, True), sorted(options.lengths)))
    with Progress() as progress, csv_lines(output) as add:
        for head_dim, causal, backward, length in progress.track(kinds, description="measuring"):
            shape = Shape(options.batch, length, options.heads, head_dim, options.dtype, causal, backward)
            for line in measure(shape, options.repeats, options.paths, progress.console.print):
                add(line)
    print(f"written to {output}; `python -m benchmarks.plot {output}` draws it")


if __name__ == "__main__":
    main()
