"""Trains a small byte-level GPT whose attention is jflash.attention: `python -m benchmarks.train --help`.

`--attention` swaps the attention and nothing else, so that losses, speed and memory compare; `--compare` trains with jflash and
with jax.nn side by side. `--model` chooses the library, `--devices` divides batch and sequences, and with `--checkpoint` a
stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import text as corpus
from benchmarks.devices import prepare
from benchmarks.training import Options, Texts, add_options, train


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train",
        description="Trains a small byte-level GPT with jflash.attention or another attention.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, Options)
    parser.add_argument("--text", type=Path, help="a file to train on instead of the standard library's sources")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save the run there, and go on with what is there")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--compare", action="store_true", help="train with jflash and with jax.nn, and compare")
    parser.add_argument("--output", type=Path, metavar="FILE.csv", help="of --compare, instead of one in benchmarks/results")
    chosen = parser.parse_args(arguments)
    console = Console()
    try:
        options = Options(**{field.name: getattr(chosen, field.name) for field in dataclasses.fields(Options)})
        texts = Texts(*corpus.split(corpus.read(chosen.text), options.length))
        if options.devices > 1:
            prepare(options.devices)
        if chosen.compare and chosen.checkpoint:
            raise ValueError("checkpoint must not be given with compare, which trains two models")
        if chosen.compare:
            from benchmarks.compare import compare

            compare(options, texts, console, chosen.output)
        else:
            _train(options, texts, console, chosen.checkpoint, chosen.every)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _train(options: Options, texts: Texts, console: Console, folder: Path | None, every: int) -> None:
    with contextlib.ExitStack() as stack:
        checkpoint = None
        if folder:
            from benchmarks.checkpoint import Checkpoint  # Orbax takes seconds to import

            settings = dataclasses.asdict(options) | {"text": f"of CRC-32 {zlib.crc32(texts.train):08x}"}
            checkpoint = stack.enter_context(Checkpoint(folder, every, settings))
        trainer, result = train(options, texts, console, checkpoint)
    tokens = options.steps * options.batch * options.length
    summary = (
        f"{options.attention}: held-out loss {result.held_out[str(options.steps)]:.4f} nats a byte, "
        f"{tokens / result.seconds:,.0f} tokens a second, {trainer.temp_bytes / 2**20:.1f} MiB of temporary memory"
    )
    console.print(summary, soft_wrap=True)  # one line, however narrow the terminal


if __name__ == "__main__":
    main()
