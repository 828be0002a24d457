"""Trains a small MeanFlow, which draws digits in one step: `python -m benchmarks.meanflow --help`.

Its loss (Geng et al. 2025, arXiv:2505.13447) asks how the network changes along its inputs, `jax.jvp`, inside the gradient by
its parameters, `jax.grad`. The network is a transformer, and all that jflash has to do with it is the function `attend`.

The data are drawn here. A picture shows what one step makes of noise before and after training, and what was to be learned;
a table shows what a step of training takes, beside one with attention that writes out the scores of all pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax import Array, lax

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import track

import jflash
from benchmarks.measure import RESULTS, print_table, seconds_in_turns, setting
from benchmarks.models import Attend
from benchmarks.models.equinox import Block, each, linear, norm, with_weight
from benchmarks.training import add_options, option

# --------------------------------------------------------------------------------------------------------------- digits

FONT = """
    .###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
    #...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
    #..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
    #.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
    ##..# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
    #...# ..#.. .#... #...# ...#. #...# #...# ..#.. #...# ...#.
    .###. .###. ##### .###. ...#. .###. .###. ..#.. .###. .##..
"""
GLYPHS = np.array([[list(row) for row in line.split()] for line in FONT.split("\n")[1:-1]]).swapaxes(0, 1) == "#"
DIGITS, ROWS, COLUMNS = GLYPHS.shape


def draw(key: Array, digit: Array, size: int) -> Array:
    """An image of a digit, float32 `[size, size]` from -1 to 1; place, height, width, slant and thickness are the key's."""
    least, most = jnp.array([(-0.1, 0.1), (-0.1, 0.1), (0.7, 0.85), (0.5, 0.65), (-0.25, 0.25), (0.2, 0.4)]).T
    down, right, height, width, slant, thinness = jax.random.uniform(key, least.shape, minval=least, maxval=most)
    middles = (jnp.arange(size) + 0.5) * 2 / size - 1  # of the pixels; the image reaches from -1 to 1
    y, x = middles[:, None] - down, middles[None, :] - right
    row, column = (y / height + 1) * ROWS / 2 - 0.5, ((x + slant * y) / width + 1) * COLUMNS / 2 - 0.5
    glyph = jnp.asarray(GLYPHS, jnp.float32)[digit]
    ink = jax.scipy.ndimage.map_coordinates(glyph, jnp.broadcast_arrays(row, column), order=1)
    return jnp.clip(6 * (ink - thinness), -1, 1)


@functools.partial(jax.jit, static_argnums=2)
def draw_all(key: Array, digits: Array, size: int) -> Array:
    """An image of each of the digits `[batch]`."""
    return jax.vmap(draw, (0, 0, None))(jax.random.split(key, len(digits)), digits, size)


# -------------------------------------------------------------------------------------------------------------- network


@dataclasses.dataclass(frozen=True)
class Options:
    """What is trained, and how; each field is an option of the command line."""

    steps: int = option(800, help="optimizer steps")
    size: int = option(16, help="pixels of the side of an image")
    patch: int = option(2, help="pixels of the side of a token")
    batch: int = option(32, help="images of a step")
    seed: int = option(0, help="of the parameters, the images and the noise")
    layers: int = option(3, help="blocks of attention and perceptron")
    width: int = option(64, help="features of a token between the blocks")
    heads: int = option(4, help="attention heads of a block")
    learning_rate: float = option(4e-3, help="at its highest")

    @property
    def length(self) -> int:
        """Tokens of an image."""
        return (self.size // self.patch) ** 2

    def __post_init__(self):
        for name in ("steps", "size", "patch", "batch", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % (2 * self.heads):  # rotary embeddings turn pairs of features
            raise ValueError(f"width must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}")
        if self.size % self.patch:
            raise ValueError(f"size must be a multiple of patch = {self.patch}, got {self.size}")


class Flow(eqx.Module):
    """u(z, r, t): the mean velocity between the times r and t of what is at z at time t, on its way between image and noise."""

    patch: int = eqx.field(static=True)
    pixels: eqx.nn.Linear
    place: Array  # [length, width]
    digit: eqx.nn.Embedding
    times: eqx.nn.Linear
    context: eqx.nn.Linear
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    velocity: eqx.nn.Linear

    def __init__(self, options: Options, *, key: Array):
        keys, width, pixels = jax.random.split(key, 5 + options.layers), options.width, options.patch**2
        self.patch = options.patch
        self.pixels = linear(pixels, width, keys[0])
        self.place = jax.random.normal(keys[1], (options.length, width))
        self.digit = eqx.nn.Embedding(DIGITS, width, key=keys[2])
        self.times = linear(waves(jnp.zeros(2)).size, width, keys[3])
        self.context = linear(width, width, keys[4])
        self.blocks = [Block(width, options.heads, key=key) for key in keys[5:]]
        self.norm = norm(width)
        self.velocity = with_weight(linear(width, pixels, key), jnp.zeros((pixels, width)))  # nothing moves at first

    def __call__(self, z: Array, r: Array, t: Array, digits: Array, attend: Attend) -> Array:
        """z and u: `[batch, size, size]`; r, t and digits: `[batch]`."""
        batch, size, _ = z.shape
        n, patch = size // self.patch, self.patch
        x = each(self.pixels, z.reshape(batch, n, patch, n, patch).swapaxes(2, 3).reshape(batch, n * n, patch * patch))
        what = jax.vmap(self.digit)(digits) + jax.vmap(self.times)(waves(jnp.stack([t, t - r], axis=-1)))
        x = x + self.place + jax.vmap(self.context)(jax.nn.silu(what))[:, None]
        for block in self.blocks:
            x = block(x, jnp.arange(n * n), attend)
        u = each(self.velocity, each(self.norm, x))
        return u.reshape(batch, n, n, patch, patch).swapaxes(2, 3).reshape(z.shape)


def waves(times: Array) -> Array:
    """Features of times from 0 to 1, `[..., times]` to `[..., features]`: slow waves, for the loss has their derivatives."""
    angle = times[..., None] * jnp.pi * jnp.array([0.5, 1.0, 2.0, 4.0])
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*times.shape[:-1], -1)


# ------------------------------------------------------------------------------------------------------------- MeanFlow

SAME = 0.5  # the share of r = t, where the mean velocity is the velocity itself and the target does not need the network


def loss(model: Flow, key: Array, images: Array, digits: Array, attend: Attend) -> tuple[Array, Array]:
    """Algorithm 1: the loss, and the mean square of the error that it weighs.

    (t - r) u is the integral of the velocity v from r to t. Its derivative by t says u + (t - r) du/dt = v, and so u is learned
    without an integral: du/dt is the derivative along the path, on which z moves by v, r not at all and t by 1. It is a part
    of the target, which is a constant to the gradient, so nothing is differentiated twice.
    """
    for_noise, for_times, for_same = jax.random.split(key, 3)
    noise = jax.random.normal(for_noise, images.shape)
    r, t = jnp.sort(jax.nn.sigmoid(jax.random.normal(for_times, (2, len(images))) - 0.4), axis=0)
    r = jnp.where(jax.random.uniform(for_same, t.shape) < SAME, t, r)

    by_image = lambda x: x[:, None, None]
    z = (1 - by_image(t)) * images + by_image(t) * noise
    v = noise - images
    u, dudt = jax.jvp(lambda z, r, t: model(z, r, t, digits, attend), (z, r, t), (v, jnp.zeros_like(r), jnp.ones_like(t)))
    error = jnp.square(u - lax.stop_gradient(v - by_image(t - r) * dudt)).sum((1, 2))
    weight = lax.stop_gradient(1 / (error + 1e-3))  # else the images with the largest errors would outweigh all others
    return (weight * error).mean(), error.mean() / images[0].size


def sample(model: Flow, key: Array, digits: Array, size: int, attend: Attend) -> Array:
    """Algorithm 2: noise, less its mean velocity over all of the time, is an image."""
    noise = jax.random.normal(key, (len(digits), size, size))
    t = jnp.ones(len(digits))
    return noise - model(noise, jnp.zeros_like(t), t, digits, attend)


# ------------------------------------------------------------------------------------------------------------- training

REPORTS = 10  # of how it goes


class State(NamedTuple):
    """All that a step changes."""

    model: Any  # a Flow, which is a tree of arrays
    opt_state: Any


@functools.cache  # what was trained with is timed
def compiled(options: Options, implementation: str | None) -> tuple[State, Any]:
    """A state to begin with, and a step of training: compiled, (state, key) -> (state, the mean square error before it)."""
    attend = functools.partial(jflash.attention, implementation=implementation)
    optimizer = optax.adam(optax.cosine_decay_schedule(options.learning_rate, options.steps), b2=0.95)

    @jax.jit
    def init() -> State:
        model = Flow(options, key=jax.random.key(options.seed))
        return State(model, optimizer.init(eqx.filter(model, eqx.is_array)))

    @jax.jit
    def step(state: State, key: Array) -> tuple[State, Array]:
        for_digits, for_images, for_loss = jax.random.split(key, 3)
        digits = jax.random.randint(for_digits, (options.batch,), 0, DIGITS)
        images = draw_all(for_images, digits, options.size)
        grads, error = jax.grad(loss, has_aux=True)(state.model, for_loss, images, digits, attend)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        return State(optax.apply_updates(state.model, updates), opt_state), error

    state = init()
    return state, step.lower(state, jax.random.key(0)).compile()


def train(options: Options, implementation: str | None, console: Console) -> tuple[list[float], dict[str, np.ndarray]]:
    """Trains, and tells a console how it goes: the errors of all steps, and the images that a picture shows, by their title."""
    for_steps, for_noise, for_images = jax.random.split(jax.random.fold_in(jax.random.key(options.seed), 1), 3)
    digits = jnp.tile(jnp.arange(DIGITS), 6)
    attend = functools.partial(jflash.attention, implementation=implementation)
    sampled = jax.jit(lambda model: sample(model, for_noise, digits, options.size, attend))

    start = time.perf_counter()
    state, step = compiled(options, implementation)
    size = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    images = {"one step from noise, before training": np.asarray(sampled(state.model))}
    console.print(f"{size:,} parameters, {options.length} tokens an image; compiled in {time.perf_counter() - start:.1f} s")

    every = -(-options.steps // REPORTS)
    start, errors = time.perf_counter(), []
    for n in track(range(options.steps), "training", console=console, disable=not console.is_terminal):
        state, error = step(state, jax.random.fold_in(for_steps, n))
        errors.append(float(error))
        if (n + 1) % every == 0:
            console.print(f"step {n + 1:5}  mean square error {statistics.fmean(errors[-every:]):.3f}")
    console.print(f"{options.steps} steps of {options.batch} images in {time.perf_counter() - start:.0f} s")
    images[f"one step from the same noise, after {options.steps} steps"] = np.asarray(sampled(state.model))
    images["what was to be learned"] = np.asarray(draw_all(for_images, digits, options.size))
    return errors, images


def picture(images: dict[str, np.ndarray], output: Path) -> None:
    """A panel for each group of images, a column for each digit."""
    figure, axes = plt.subplots(1, len(images), figsize=(15, 3.4), layout="constrained")
    for axis, (title, group) in zip(axes, images.items(), strict=True):
        size = group.shape[-1]
        page = group.reshape(-1, DIGITS, size, size).swapaxes(1, 2).reshape(-1, DIGITS * size)
        axis.imshow(page, cmap="gray", vmin=-1, vmax=1)
        axis.set_title(title)
        axis.axis("off")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)
    print(f"drawn to {output}")


# ----------------------------------------------------------------------------------------------------------- comparison


def compare(options: Options, implementation: str | None, turns: int, console: Console) -> list[dict[str, Any]]:
    """Times a step of training beside one with naive attention, turn by turn; returns the lines of the printed table."""
    starts, steps = {}, {}
    for some in (implementation, "naive"):
        name = some or "jflash"
        starts[name], steps[name] = compiled(options, some)
    state, *_ = starts.values()  # all begin alike
    seconds = seconds_in_turns(steps, turns, (state, jax.random.key(options.seed)))
    lines = [
        {
            "attention": name,
            "step_milliseconds": 1e3 * statistics.median(seconds[name]),
            "temporary_MiB": step.memory_analysis().temp_size_in_bytes / 2**20,
        }
        for name, step in steps.items()
    ]
    where = setting()
    print_table(f"{options.batch} images of {options.length} tokens, {where['device']}, JAX {where['jax']}", lines)
    if len(lines) == 2:
        ours, naive = lines
        ratio = statistics.median(theirs / mine for mine, theirs in zip(*seconds.values(), strict=True))
        console.print(
            f"A step is {ratio:.2f} times as fast as with naive attention, and takes "
            f"{ours['temporary_MiB'] / naive['temporary_MiB']:.3f} of the temporary memory.",
            soft_wrap=True,
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.meanflow",
        description="Trains a small MeanFlow, which draws digits in one step, through jflash.attention.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, Options)
    parser.add_argument("--implementation", help="of jflash.attention; 'naive' writes out the scores of all pairs")
    parser.add_argument("--turns", type=int, default=5, help="how often a step with jflash and a naive one are timed; 0: not")
    parser.add_argument("--longer", type=int, default=32, help="side of larger images, a token each pixel, to time as well")
    parser.add_argument("--out", type=Path, default=RESULTS / "meanflow.png", metavar="FILE.png", help="the picture")
    chosen = parser.parse_args(arguments)
    console = Console()
    try:
        options = Options(**{field.name: getattr(chosen, field.name) for field in dataclasses.fields(Options)})
        longer = dataclasses.replace(options, size=chosen.longer, patch=1)
        longer = dataclasses.replace(longer, batch=max(1, options.batch * options.length // longer.length))  # as many tokens
        _, images = train(options, chosen.implementation, console)
        picture(images, chosen.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for some in (options, longer) if chosen.turns else ():
        compare(some, chosen.implementation, chosen.turns, console)


if __name__ == "__main__":
    main()
