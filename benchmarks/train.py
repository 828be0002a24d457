"""Trains a small byte-level GPT whose attention is jflash.attention: `python -m benchmarks.train --help`.

`--attention` swaps the attention and nothing else, so that losses, speed and memory compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jflash
from benchmarks import text as corpus

BYTES = 256
HELD_OUT_BATCHES = 16
REPORTS = 10  # held-out losses after the first one, the last one at the end

Attend = Callable[[Array, Array, Array], Any]  # q, k, v [batch, length, heads, head_dim] -> the same shape
Apply = Callable[[Any, Array], Array]  # parameters, bytes [batch, length] -> logits [batch, length, BYTES]
Loss = Callable[[Any, Array], Array]  # parameters, sequences [batch, length + 1] -> nats a byte

ATTENTIONS: dict[str, Attend] = {
    "jflash": functools.partial(jflash.attention, causal=True),
    "naive": functools.partial(jflash.attention, causal=True, implementation="naive"),
    "jax": functools.partial(jax.nn.dot_product_attention, is_causal=True),
}


def _option(default, **keywords) -> Any:
    """A field of Options; the keywords are those of argparse."""
    return dataclasses.field(default=default, metadata=keywords)


@dataclasses.dataclass(frozen=True)
class Options:
    """What is trained, and how; each field is an option of the command line."""

    attention: str = _option("jflash", help="which attention", choices=tuple(ATTENTIONS))
    steps: int = _option(400, help="optimizer steps")
    length: int = _option(256, help="bytes of a sequence")
    batch: int = _option(4, help="sequences of a step")
    seed: int = _option(0, help="of the parameters and of the choice of sequences")
    layers: int = _option(3, help="blocks of attention and perceptron")
    width: int = _option(128, help="features of a byte between the blocks")
    heads: int = _option(4, help="attention heads of a block")
    learning_rate: float = _option(3e-3, help="at its highest")

    def __post_init__(self):
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {self.attention!r}")
        for name in ("steps", "length", "batch", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.width % (2 * self.heads):  # rotary embeddings turn pairs of features
            raise ValueError(f"width must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}")


# --------------------------------------------------------------------------------------------------- the model


class Block(nnx.Module):
    """Attention and a perceptron, each behind a norm and beside a residual: `[batch, length, width]` to the same."""

    def __init__(self, width: int, heads: int, attend: Attend, *, rngs: nnx.Rngs):
        self.heads, self.attend = heads, attend
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def __call__(self, x: Array) -> Array:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        x = x + self.out(self.attend(rotate(q), rotate(k), v).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    """The logits of each next byte: int32 `[batch, length]` to `[batch, length, BYTES]`."""

    def __init__(self, layers: int, width: int, heads: int, attend: Attend, *, rngs: nnx.Rngs):
        unit = nnx.initializers.normal(1.0)  # as large as what a block adds, which would drown a smaller one
        zeros = nnx.initializers.zeros  # all bytes are equally likely at first: the loss begins at log(BYTES)
        self.embed = nnx.Embed(BYTES, width, embedding_init=unit, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, attend, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, BYTES, use_bias=False, kernel_init=zeros, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rotate(x: Array) -> Array:
    """Rotary position embedding of x `[batch, length, heads, head_dim]` (Su et al. 2021, arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = (jnp.arange(x.shape[1])[:, None] * frequency)[:, None, :]  # [length, 1, half]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


# ------------------------------------------------------------------------------------------------- the training


class State(NamedTuple):
    """All that a step changes."""

    params: Any
    opt_state: Any


def make_model(options: Options) -> tuple[Apply, Any]:
    """(apply, params) of a new GPT. What follows knows a model as these two only."""
    attend = ATTENTIONS[options.attention]
    model = GPT(options.layers, options.width, options.heads, attend, rngs=nnx.Rngs(options.seed))
    graph, params = nnx.split(model, nnx.Param)
    return lambda params, tokens: nnx.merge(graph, params)(tokens), params


def make_loss(apply: Apply) -> Loss:
    """The mean cross-entropy of each byte of the sequences but their first, given those before it."""

    def loss(params, sequences):
        logits = apply(params, sequences[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:]).mean()

    return loss


def make_optimizer(options: Options) -> optax.GradientTransformation:
    """AdamW behind clipped gradients; the learning rate rises for a tenth of the steps and falls along a cosine."""
    peak, steps = options.learning_rate, options.steps
    rate = optax.warmup_cosine_decay_schedule(peak / 10, peak, steps // 10, steps, peak / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.01))


def make_step(loss: Loss, optimizer: optax.GradientTransformation) -> Callable[[State, Array], tuple[State, Array]]:
    """A step from (state, sequences `[batch, length + 1]`) to (the next state, the loss in this one)."""

    def step(state, sequences):
        value, grads = jax.value_and_grad(loss)(state.params, sequences)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), value

    return step


class Result(NamedTuple):
    losses: list[float]  # of each step, nats a byte, on the sequences of that step
    held_out: dict[int, float]  # after so many steps, on the held-out text
    tokens_per_second: float  # of the steps alone, without compiling and held-out losses
    temp_bytes: int  # the peak memory of a step beside its arguments and results


def train(options: Options, train_text: np.ndarray, held_out_text: np.ndarray, console: Console | None = None) -> Result:
    """Trains a new GPT on one text, uint8 `[size]`, measures it on another, and tells a console how it goes."""
    console = console or Console(quiet=True)
    batches = corpus.random_batches(train_text, options.batch, options.length, options.seed)
    held_out_batches = corpus.even_batches(held_out_text, options.batch, options.length, HELD_OUT_BATCHES)
    apply, params = make_model(options)
    loss, optimizer = make_loss(apply), make_optimizer(options)
    state = State(params, optimizer.init(params))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    console.print(f"{size:,} parameters, {len(train_text):,} bytes to train on, {len(held_out_text):,} held out")

    start = time.perf_counter()
    step = jax.jit(make_step(loss, optimizer), donate_argnums=0).lower(state, held_out_batches[0]).compile()
    evaluate = jax.jit(loss).lower(params, held_out_batches[0]).compile()
    memory = step.memory_analysis()
    assert memory is not None  # CPUs and GPUs have one
    console.print(f"compiled for {jax.default_backend()} in {time.perf_counter() - start:.1f} s")

    losses, held_out, seconds = [], {}, 0.0
    report_every = -(-options.steps // REPORTS)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:  # in a log: only the reports
        task = progress.add_task("", total=options.steps, loss=float("nan"))
        for done in range(options.steps + 1):
            if done % report_every == 0 or done == options.steps:
                held_out[done] = float(np.mean([evaluate(state.params, batch) for batch in held_out_batches]))
                console.print(f"step {done:5}  held-out loss {held_out[done]:.4f}")
            if done < options.steps:
                batch, start = next(batches), time.perf_counter()
                state, value = step(state, batch)
                losses.append(float(value))
                seconds += time.perf_counter() - start
                progress.update(task, advance=1, loss=losses[-1])

    tokens = options.steps * options.batch * options.length
    return Result(losses, held_out, tokens / seconds, memory.temp_size_in_bytes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train",
        description="Trains a small byte-level GPT with jflash.attention or another attention.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(Options):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default, **field.metadata)
    parser.add_argument("--text", type=Path, help="a file to train on instead of the standard library's sources")
    chosen = vars(parser.parse_args(arguments))
    try:
        text = corpus.read(chosen.pop("text"))
        options = Options(**chosen)
        train_text, held_out_text = corpus.split(text, options.length)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    console = Console()
    result = train(options, train_text, held_out_text, console)
    summary = (
        f"{options.attention}: held-out loss {result.held_out[options.steps]:.4f} nats a byte, "
        f"{result.tokens_per_second:,.0f} tokens a second, {result.temp_bytes / 2**20:.1f} MiB of temporary memory"
    )
    console.print(summary, soft_wrap=True)  # one line, however narrow the terminal


if __name__ == "__main__":
    main()
