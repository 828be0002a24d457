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
        for name in dict.fromkeys(line["attention"] for line in lines):
            values = {int(line["length"]): float(line[column]) for line in lines if line["attention"] == name and line[column]}
            curve = [values.get(length) or float("nan") for length in lengths]  # 0 has no place on a logarithmic axis
            axis.plot(lengths, curve, marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel="length", ylabel=label)
        axis.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], rotation=45)
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.yaxis.set_major_formatter(Plain())
        axis.yaxis.set_minor_formatter(Plain(minor_thresholds=(1.5, 0.5)))
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("file", type=pathlib.Path)
    options = parser.parse_args()
    with options.file.open(newline="") as file:
        lines = list(csv.DictReader(file))
    kinds = sorted({(int(line["head_dim"]), line["causal"], line["backward"]) for line in lines})
    for head_dim, causal, backward in kinds:
        of_kind = [x for x in lines if (int(x["head_dim"]), x["causal"], x["backward"]) == (head_dim, causal, backward)]
        words = ["causal" if causal == "True" else "full", "forward and backward" if backward == "True" else "forward"]
        first = of_kind[0]
        setting = f"{first['device']}, JAX {first['jax']}, batch {first['batch']}, {first['heads']} heads of {head_dim}"
        output = options.file.with_name("_".join([options.file.stem, f"d{head_dim}", words[0], words[1].split()[-1]]) + ".png")
        draw(of_kind, f"{', '.join(words)}: {first['dtype']}, {setting}", output)
        print(f"drawn to {output}")


if __name__ == "__main__":
    main()
