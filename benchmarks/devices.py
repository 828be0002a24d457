"""Training on several devices: the batch is divided over some of them, and the length of each sequence over the others.

A mesh with the axes "data" and "sequence", parameters whole on each device. XLA divides the model along the batches that it is
given and sums the gradients; only attention is divided by hand, for there every token meets every other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from benchmarks.models import Attend, Batch

ATTENTIONS: dict[str, Callable[..., Any]] = {
    "jflash": functools.partial(jflash.attention, causal=True),
    "jax.nn": functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
    "naive": functools.partial(jflash.attention, causal=True, implementation="naive"),
}


def prepare(count: int) -> None:
    """Makes so many CPU devices, which are used where there is no GPU. Has an effect before JAX first looks for devices."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # too late: Layout.of says whether there are enough
        return


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which device gets which part of a batch."""

    mesh: Mesh  # ("data", "sequence")

    @classmethod
    def of(cls, devices: int, batch: int, length: int) -> Layout:
        """The batch is divided as far as it goes, and then the length.

        Raises:
          ValueError: where there are too few devices, or the length cannot be divided.
        """
        there = jax.devices()
        if devices > len(there):
            raise ValueError(f"devices must be at most {len(there)}, all {there[0].platform} devices, got {devices}")
        data = math.gcd(batch, devices)
        sequence = devices // data
        if sequence > 1 and length % (2 * sequence):
            raise ValueError(
                f"length must be a multiple of {2 * sequence}, two chunks for each of the {sequence} devices that share a "
                f"sequence, got {length}"
            )
        return cls(jax.make_mesh((data, sequence), ("data", "sequence"), (AxisType.Auto,) * 2, devices=there[:devices]))

    @property
    def whole(self) -> NamedSharding:
        """All of an array on each device."""
        return NamedSharding(self.mesh, P())

    def batch(self, sequences: np.ndarray) -> Batch:
        """Sequences `[batch, length + 1]`, cut into tokens and targets, in the order of the ring, on the devices."""
        tokens, targets = sequences[:, :-1], sequences[:, 1:]
        batch = Batch(tokens, targets, np.arange(tokens.shape[1], dtype=np.int32))
        if self.mesh.shape["sequence"] > 1:
            batch = jax.tree.map(lambda x: jflash.zigzag(x, self.mesh.shape["sequence"], axis=-1), batch)
        split = Batch(P("data", "sequence"), P("data", "sequence"), P("sequence"))
        return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec)), batch, split)

    def attention(self, name: str) -> Attend:
        """The causal attention of that name in ATTENTIONS, of arrays that are divided like batch()'s.

        Raises:
          ValueError: where sequences are divided and the attention is not jflash's.
        """
        if self.mesh.size == 1:
            return ATTENTIONS[name]
        if self.mesh.shape["sequence"] == 1:
            attend = ATTENTIONS[name]
        elif name == "jflash":
            attend = functools.partial(jflash.ring_attention, axis_name="sequence", causal=True, order="zigzag")
        else:
            raise ValueError(
                f"attention must be 'jflash' where {self.mesh.shape['sequence']} devices share a sequence, got {name!r}: let "
                "devices divide batch"
            )
        split = P("data", "sequence")
        return jax.shard_map(attend, mesh=self.mesh, in_specs=(split, split, split), out_specs=split)
