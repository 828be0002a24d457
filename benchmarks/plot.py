"""`python -m benchmarks.plot FILE.csv`: draws what benchmarks.attention measured: milliseconds, TFLOPS and MiB by length."""

from __future__ import annotations

import argparse
import csv
import pathlib

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {"milliseconds": "milliseconds", "TFLOPS": "TFLOPS", "temporary_MiB": "MiB of temporary memory"}


class Plain(matplotlib.ticker.LogFormatter):
    """0.06, not 6 times 10 to the power of -2."""

    def __call__(self, x, pos=None):
        return f"{x:g}" if super().__call__(x, pos) else ""


def draw(lines: list[dict[str, str]], title: str, output: pathlib.Path) -> None:
    """Three panels, a curve for each path; a path that has no line at some length has a gap there."""
    lengths = sorted({int(line["length"]) for line in lines})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(15, 4.5), layout="constrained")
    for axis, (column, label) in zip(axes, PANELS.items(), strict=True):
        anything = False
        for name in dict.fromkeys(line["attention"] for line in lines):
            values = {int(line["length"]): float(line[column]) for line in lines if line["attention"] == name and line[column]}
            curve = [values.get(length) or float("nan") for length in lengths]  # 0 has no place on a logarithmic axis
            anything |= any(values.values())
            axis.plot(lengths, curve, marker="o", label=name)
        axis.set(xscale="log", yscale="log" if anything else "linear", xlabel="length", ylabel=label)
        axis.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], rotation=45)
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.yaxis.set_major_formatter(Plain())
        axis.yaxis.set_minor_formatter(Plain(minor_thresholds=(1.5, 0.5)))
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def title(lines: list[dict[str, str]]) -> str:
    """What all lines of a picture have in common: the batch, or else its product with the length."""
    first = lines[0]
    batches = {line["batch"] for line in lines}
    size = f"batch {first['batch']}" if len(batches) == 1 else f"{int(first['batch']) * int(first['length'])} tokens"
    words = ", ".join(_kind(first))
    heads = f"{first['heads']} heads of {first['head_dim']}"
    return f"{words}: {first['dtype']}, {first['device']}, JAX {first['jax']}, {size}, {heads}"


def draw_all(file: pathlib.Path) -> list[pathlib.Path]:
    """A picture beside the CSV for each head_dim, full and causal, forward and both; returns where they are."""
    with file.open(newline="") as lines:
        kinds: dict[tuple, list[dict[str, str]]] = {}
        for line in csv.DictReader(lines):
            kinds.setdefault((int(line["head_dim"]), *_kind(line)), []).append(line)
    drawn = []
    for (head_dim, mask, passes), lines in sorted(kinds.items(), key=lambda item: item[0]):
        drawn.append(file.with_name("_".join([file.stem, f"d{head_dim}", mask, passes.split()[-1]]) + ".png"))
        draw(lines, title(lines), drawn[-1])
    return drawn


def _kind(line: dict[str, str]) -> tuple[str, str]:
    return (
        "causal" if line["causal"] == "True" else "full",
        "forward and backward" if line["backward"] == "True" else "forward",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("file", type=pathlib.Path)
    for output in draw_all(parser.parse_args().file):
        print(f"drawn to {output}")


if __name__ == "__main__":
    main()
