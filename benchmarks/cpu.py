"""`python -m benchmarks.cpu`: attention on the CPU beside jax.nn, side by side in one run; prints and writes a CSV."""

from __future__ import annotations

import argparse
import csv
import pathlib
import platform
import time

import jax
import jax.numpy as jnp

import jflash

RESULTS = pathlib.Path(__file__).parent / "results"


def paths(causal: bool):
    """name -> fn(q, k, v) of what is compared."""
    return {
        "jax.nn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla"),
        "jflash": lambda q, k, v: jflash.attention(q, k, v, causal=causal),
    }


def with_backward(fn):
    """fn followed by its transpose: (o, dq, dk, dv) for a cotangent equal to o."""

    def forward_backward(q, k, v):
        o, pull = jax.vjp(fn, q, k, v)
        return o, *pull(o)

    return forward_backward


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "cpu.csv")
    options = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, options.length, options.heads, options.head_dim), jnp.float32) for key in keys)
    rows = []
    for causal in (False, True):
        for direction in ("forward", "forward+backward"):
            compiled = {}
            for name, fn in paths(causal).items():
                fn = fn if direction == "forward" else with_backward(fn)
                compiled[name] = jax.jit(fn).lower(q, k, v).compile()
                jax.block_until_ready(compiled[name](q, k, v))
            seconds = {name: [] for name in compiled}
            for _ in range(options.repeats):  # in turns, so that the machine's moods meet all alike
                for name, program in compiled.items():
                    jax.block_until_ready(program(q, k, v))  # not timed: the gigabyte that dense attention leaves to be freed
                    start = time.perf_counter()
                    jax.block_until_ready(program(q, k, v))
                    seconds[name].append(time.perf_counter() - start)
            for name, program in compiled.items():
                median = sorted(seconds[name])[options.repeats // 2]
                theirs = sorted(seconds["jax.nn"])[options.repeats // 2]
                memory = program.memory_analysis()
                rows.append(
                    {
                        "attention": name,
                        "causal": causal,
                        "direction": direction,
                        "length": options.length,
                        "heads": options.heads,
                        "head_dim": options.head_dim,
                        "milliseconds": round(1e3 * median, 1),
                        "times_as_fast_as_jax_nn": round(theirs / median, 2),
                        "temporary_MiB": round(memory.temp_size_in_bytes / 2**20, 1) if memory else None,
                        "jax": jax.__version__,
                        "python": platform.python_version(),
                        "repeats": options.repeats,
                    }
                )
                print("  ".join(f"{key}={value}" for key, value in list(rows[-1].items())[:9]), flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
