"""Whole models: what one computes, its gradients and its training, and when two of them are the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jflash.proof import accuracy

STEPS = 8
EPS = float(jnp.finfo(jnp.float32).eps)


class Run(NamedTuple):
    """What a model computes at first, its first gradients, and the loss before each step of training."""

    outputs: Any
    gradients: Any
    losses: Any


def trainer(apply):
    """train(parameters, x, mask, target, counted, dtype) -> Run, compiled once for each dtype.

    Trains apply(parameters, x, mask) -> like target, by Adam, on the mean square where `counted` is True.
    """
    rule = optax.adam(1e-2, eps=1e-3)  # large, so that Adam does not blow up what is zero but for rounding

    def loss(parameters, x, mask, target, counted):
        outputs = jnp.where(counted[..., None], apply(parameters, x, mask), 0)
        return jnp.square(outputs - target).mean(), outputs

    @jax.jit
    def compiled(parameters, *arrays):
        def step(state, _):
            parameters, moments = state
            (value, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, *arrays)
            updates, moments = rule.update(gradients, moments)
            return (optax.apply_updates(parameters, updates), moments), Run(outputs, gradients, value)

        _, steps = jax.lax.scan(step, (parameters, rule.init(parameters)), length=STEPS)
        return Run(*jax.tree.map(lambda a: a[0], steps[:2]), steps.losses)

    def train(parameters, x, mask, target, counted, dtype="float32") -> Run:
        with jax.enable_x64(dtype == "float64"):
            parameters, x, target = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), dtype), (parameters, x, target))
            return jax.tree.map(np.asarray, compiled(parameters, x, mask, target, counted))

    return train


def assert_alike(got: Run, library: Run, x64: Run) -> None:
    """The rule of jflash.proof.accuracy, for whole models: max|x - x64| <= 2 max|library - x64| + floor.

    The floor is eight roundings of the largest value: of the outputs, of all gradients (what cancels in one parameter's has
    the size of the others'), of the losses.
    """
    for name in Run._fields:
        parts = [jax.tree_util.tree_leaves_with_path(getattr(side, name)) for side in (got, library, x64)]
        floor = 8 * EPS * max(np.abs(exact).max() for _, exact in parts[2])
        for (path, x), (_, other), (_, exact) in zip(*parts, strict=True):
            error, allowed = accuracy.distance(x, exact), 2 * accuracy.distance(other, exact) + floor
            assert error <= allowed, f"{name}{jax.tree_util.keystr(path)}: {error} > {allowed}"


def assert_trains(reference: Run) -> None:
    """Without this, runs that are alike might have done nothing."""
    assert reference.losses[-1] < 0.8 * reference.losses[0]
