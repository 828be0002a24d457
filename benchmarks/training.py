"""How a small GPT is trained: what is compiled into a step, and the loop around it."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import optax
from jax import Array
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import models
from benchmarks import text as corpus
from benchmarks.devices import ATTENTIONS, Layout

if TYPE_CHECKING:
    from benchmarks.checkpoint import Checkpoint

HELD_OUT_BATCHES = 16
REPORTS = 10  # held-out losses after the first one, the last one at the end


def option(default, **keywords) -> Any:
    """A field of Options; the keywords are those of argparse."""
    return dataclasses.field(default=default, metadata=keywords)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """An option of the command line for each field of a class of options."""
    for field in dataclasses.fields(options):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default, **field.metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """What is trained, and how; each field is an option of the command line."""

    model: str = option("flax-nnx", help="in which library the model is written", choices=models.NAMES)
    attention: str = option("jflash", help="which attention", choices=tuple(ATTENTIONS))
    devices: int = option(1, help="divide the batch over so many devices, and where it is too small the sequences too")
    steps: int = option(400, help="optimizer steps")
    length: int = option(256, help="bytes of a sequence")
    batch: int = option(4, help="sequences of a step")
    seed: int = option(0, help="of the parameters and of the choice of sequences")
    layers: int = option(3, help="blocks of attention and perceptron")
    width: int = option(128, help="features of a byte between the blocks")
    heads: int = option(4, help="attention heads of a block")
    learning_rate: float = option(3e-3, help="at its highest")

    def __post_init__(self):
        for name, allowed in (("model", models.NAMES), ("attention", ATTENTIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("devices", "steps", "length", "batch", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.width % (2 * self.heads):  # rotary embeddings turn pairs of features
            raise ValueError(f"width must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}")


class Texts(NamedTuple):
    """Bytes, uint8 `[size]`."""

    train: np.ndarray
    held_out: np.ndarray


class State(NamedTuple):
    """All that a step changes."""

    params: Any
    opt_state: Any


def make_optimizer(options: Options) -> optax.GradientTransformation:
    """AdamW behind clipped gradients; the learning rate rises for a tenth of the steps and falls along a cosine."""
    peak, steps = options.learning_rate, options.steps
    rate = optax.warmup_cosine_decay_schedule(peak / 10, peak, steps // 10, steps, peak / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.01))


class Trainer:
    """A model in training, its step compiled for the devices that it is divided over."""

    state: State
    temp_bytes: int  # the peak memory of a step on each device beside its arguments and results

    def __init__(self, options: Options):
        self.layout = Layout.of(options.devices, options.batch, options.length)
        attend = self.layout.attention(options.attention)
        model = models.make(options.model, models.Size(options.layers, options.width, options.heads))
        optimizer = make_optimizer(options)

        def init(key: Array) -> State:
            params = model.init(key)
            return State(params, optimizer.init(params))

        def loss(params: Any, batch: models.Batch) -> Array:
            return model.loss(params, batch, attend)

        def step(state: State, batch: models.Batch) -> tuple[State, Array]:
            value, grads = jax.value_and_grad(loss)(state.params, batch)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            return State(optax.apply_updates(state.params, updates), opt_state), value

        self.state = jax.jit(init, out_shardings=self.layout.whole)(jax.random.key(options.seed))
        compiled = jax.jit(step, donate_argnums=0, out_shardings=self.layout.whole)
        some = self.layout.batch(np.zeros((options.batch, options.length + 1), np.int32))
        self._step = compiled.lower(self.state, some).compile()
        self._loss = jax.jit(loss)
        memory = self._step.memory_analysis()
        assert memory is not None  # CPUs and GPUs have one
        self.temp_bytes = memory.temp_size_in_bytes

    def step(self, sequences: np.ndarray) -> float:
        """Learns from sequences int32 `[batch, length + 1]`: the loss that they had, nats a byte."""
        self.state, value = self._step(self.state, self.layout.batch(sequences))
        return float(value)

    def loss(self, batches: list[np.ndarray]) -> float:
        """The mean loss of all batches."""
        return float(np.mean([self._loss(self.state.params, self.layout.batch(batch)) for batch in batches]))


@dataclasses.dataclass
class Result:
    """How far a run has come; also what of it is kept in a checkpoint beside the state.

    losses: of each step, nats a byte, on the sequences of that step.
    held_out: the loss on the held-out text after so many steps, which JSON wants to be a str.
    seconds: of the steps alone, without compiling, held-out losses and checkpoints.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    held_out: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def train(options: Options, texts: Texts, console: Console, checkpoint: Checkpoint | None = None) -> tuple[Trainer, Result]:
    """Trains a GPT on one text, measures it on another, and tells a console how it goes.

    With a checkpoint it goes on where the last run stopped, if there was one.
    """
    start = time.perf_counter()
    trainer, result = Trainer(options), Result()
    size = sum(leaf.size for leaf in jax.tree.leaves(trainer.state.params))
    console.print(f"{size:,} parameters, {len(texts.train):,} bytes to train on, {len(texts.held_out):,} held out")
    where = jax.default_backend() if options.devices == 1 else dict(trainer.layout.mesh.shape)
    console.print(f"compiled for {where} in {time.perf_counter() - start:.1f} s")
    if checkpoint and (saved := checkpoint.restore(trainer.state)):
        trainer.state, result = saved[0], Result(**saved[1])
        console.print(f"goes on after step {len(result.losses)}")

    batches = corpus.random_batches(texts.train, options.batch, options.length, options.seed, first=len(result.losses))
    held_out_batches = corpus.even_batches(texts.held_out, options.batch, options.length, HELD_OUT_BATCHES)
    report_every = -(-options.steps // REPORTS)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:  # in a log: only the reports
        task = progress.add_task("", total=options.steps, completed=len(result.losses), loss=float("nan"))
        for done in range(len(result.losses), options.steps + 1):
            if done % report_every == 0 or done == options.steps:
                result.held_out[str(done)] = trainer.loss(held_out_batches)
                console.print(f"step {done:5}  held-out loss {result.held_out[str(done)]:.4f}")
            if done < options.steps:
                sequences, start = next(batches), time.perf_counter()
                result.losses.append(trainer.step(sequences))
                result.seconds += time.perf_counter() - start
                progress.update(task, advance=1, loss=result.losses[-1])
                if checkpoint:
                    checkpoint.save(done + 1, trainer.state, dataclasses.asdict(result), last=done + 1 == options.steps)
    return trainer, result
