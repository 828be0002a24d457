"""What `python -m benchmarks.train --compare` does: trains with jflash and with jax.nn, step by step in turns."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import track

from benchmarks import text as corpus
from benchmarks.measure import RESULTS, print_table, setting, write_csv
from benchmarks.training import Options, Texts, Trainer

COMPARED = ("jflash", "jax.nn")


@dataclasses.dataclass
class Run:
    """One of the two that are compared."""

    trainer: Trainer
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def step(self, sequences: np.ndarray) -> None:
        start = time.perf_counter()
        self.losses.append(self.trainer.step(sequences))
        self.seconds.append(time.perf_counter() - start)

    def line(self, name: str) -> dict[str, Any]:
        return {
            "attention": name,
            "last_loss": self.losses[-1],
            "step_milliseconds": 1e3 * statistics.median(self.seconds),
            "temporary_MiB": self.trainer.temp_bytes / 2**20,
        }


def compare(options: Options, texts: Texts, console: Console, output: Path | None = None) -> list[dict[str, Any]]:
    """Trains one model with each attention of COMPARED, from the same seed, on the same sequences.

    Prints the median time and the temporary memory of a step, and writes the losses and times of all steps to `output`, a .csv,
    and the curves of the losses to the .png beside it. Returns the lines of the printed table, one an attention.
    """
    output = output or RESULTS / f"train_compare_{jax.default_backend()}.csv"
    runs = {name: Run(Trainer(dataclasses.replace(options, attention=name))) for name in COMPARED}
    batches = corpus.random_batches(texts.train, options.batch, options.length, options.seed)
    for _ in track(range(options.steps), "training", console=console, disable=not console.is_terminal):
        sequences = next(batches)
        for run in runs.values():  # in turns, so that the machine's moods meet both alike
            run.step(sequences)

    lines = [run.line(name) for name, run in runs.items()]
    ours, theirs = lines
    apart = max(abs(a - b) for a, b in zip(*(run.losses for run in runs.values()), strict=True))
    title = (
        f"{options.model}, {options.layers} layers of {options.heads} heads, width {options.width}, length {options.length}, "
    )
    title += f"batch {options.batch}, {options.devices} {setting()['device']}, JAX {jax.__version__}"
    print_table(title, lines)
    console.print(
        f"A step with jflash is {theirs['step_milliseconds'] / ours['step_milliseconds']:.2f} times as fast and takes "
        f"{ours['temporary_MiB'] / theirs['temporary_MiB']:.3f} of the temporary memory; losses differ by {apart:.1e} at most.",
        soft_wrap=True,
    )
    curves = [
        {"step": step}
        | {f"{name}_loss": f"{run.losses[step]:.7g}" for name, run in runs.items()}
        | {f"{name}_milliseconds": 1e3 * run.seconds[step] for name, run in runs.items()}
        for step in range(options.steps)
    ]
    memory = {f"{name}_temporary_MiB": run.trainer.temp_bytes / 2**20 for name, run in runs.items()}
    chosen = dataclasses.asdict(options)
    del chosen["attention"]
    write_csv(curves, output, **memory, **chosen, **setting())
    draw(runs, lines, title, output.with_suffix(".png"))
    return lines


def draw(runs: dict[str, Run], lines: list[dict[str, Any]], title: str, output: Path) -> None:
    """The curves of the losses; as they lie on one another, the last one is drawn thin and dashed on top."""
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    styles = ({"linewidth": 4, "alpha": 0.5}, {"linewidth": 1.2, "linestyle": "--", "color": "black"})
    for (name, run), line, style in zip(runs.items(), lines, styles, strict=True):
        label = f"{name}: {line['step_milliseconds']:.0f} ms a step, {line['temporary_MiB']:.0f} MiB of temporary memory"
        axis.plot(run.losses, label=label, **style)
    axis.set(xlabel="step", ylabel="loss, nats a byte")
    axis.set_title(title, fontsize="small")
    axis.grid(visible=True, alpha=0.3)
    axis.legend()
    figure.savefig(output, dpi=110)
    plt.close(figure)
    print(f"drawn to {output}")
