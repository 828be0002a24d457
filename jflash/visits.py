"""visits(): which tiles attention() visits, so that one sees why a mask is slow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jflash.attention import engine_of
from jflash.launch import gpu
from jflash.launch.blocks import Options, of_score
from jflash.launch.blocks import given as blocks_of
from jflash.score import arguments
from jflash.score.ranges import FULL, PARTIAL
from jflash.score.score import OF_VISIBILITY, Score
from jflash.score.visits import Cut

SHADES = "·░▒▓█"  # from tiles that are not visited to tiles without a mask


@dataclasses.dataclass(frozen=True, repr=False)
class Visits:
    """What visits() returns; print() draws it."""

    tiles: np.ndarray  # int8 [batch or 1, heads or 1, q_tiles, kv_tiles]: 0 not visited, 1 pair by pair, 2 without a mask
    block_q: int  # queries of a tile
    block_kv: int  # keys of a tile

    @property
    def share(self) -> float:
        """How many of all tiles are visited, in percent: about what attention takes of the time of full attention."""
        return 100 * float(np.mean(self.tiles != 0))

    @property
    def masked(self) -> float:
        """How many of all tiles are visited and looked at pair by pair, in percent; these cost somewhat more."""
        return 100 * float(np.mean(self.tiles == PARTIAL))

    def picture(self, batch: int = 0, head: int = 0, columns: int = 64) -> str:
        """The tiles of one batch element and head: queries down, keys across, the darker the more of it is computed.

        `·` is not visited, `▒` is looked at pair by pair, `█` has no mask. Where there are more than `columns` tiles either
        way, a character stands for several of them and means their mean.
        """
        number = lambda index, axis: 0 if self.tiles.shape[axis] == 1 else index
        tiles = self.tiles[number(batch, 0), number(head, 1)]
        several = max(1, -(-max(tiles.shape) // columns))
        starts = [np.arange(0, size, several) for size in tiles.shape]
        summed = lambda x: np.add.reduceat(np.add.reduceat(x.astype(np.int64), starts[0], axis=0), starts[1], axis=1)
        most = FULL * summed(np.ones_like(tiles))
        # Rounded away from both ends, which say that all of a character's tiles are of one kind.
        inner = 1 + (summed(tiles) * (len(SHADES) - 2) - 1) // most
        shades = np.where(summed(tiles) == 0, 0, np.where(summed(tiles) == most, len(SHADES) - 1, inner))
        return "\n".join("".join(SHADES[shade] for shade in row) for row in shades)

    def __repr__(self) -> str:
        rows, cols = self.tiles.shape[2:]
        return (
            f"{rows} x {cols} tiles of {self.block_q} x {self.block_kv}: {self.share:.1f} % are visited, "
            f"{self.masked:.1f} % pair by pair"
        )

    def __str__(self) -> str:
        batch, heads = self.tiles.shape[:2]
        which = "" if batch == heads == 1 else f"\nthe first of {batch} batch elements x {heads} heads that differ"
        return f"{self!r}{which}\n{self.picture()}"


def visits(
    q: ArrayLike | jax.ShapeDtypeStruct,
    k: ArrayLike | jax.ShapeDtypeStruct,
    v: ArrayLike | jax.ShapeDtypeStruct,
    **options: Unpack[Options],
) -> Visits:
    """Which tiles of queries and keys the forward of attention(q, k, v, **options) visits, and which of them have a mask.

    Time goes into tiles that are visited. A mask is slow where they hold few visible pairs: see whether tiles are larger
    than what it shows (block_sizes), whether another order of the tokens brings together what belongs together, or
    whether mask_fn does something that intervals do not follow, so that all its tiles are `▒`. Attention itself is not
    computed. With documents of 256 tokens in tiles of 128 x 128::

        >>> q = jax.ShapeDtypeStruct((1, 1024, 8, 64), "bfloat16")
        >>> sizes = jflash.BlockSizes(block_q=128, block_kv=128)
        >>> print(jflash.visits(q, q, q, causal=True, segment_ids=jnp.arange(1024)[None] // 256, block_sizes=sizes))
        8 x 8 tiles of 128 x 128: 18.8 % are visited, 12.5 % pair by pair
        ▒·······
        █▒······
        ··▒·····
        ··█▒····
        ····▒···
        ····█▒··
        ······▒·
        ······█▒

    Args:
      q, k, v: as in attention(); of them only shapes and dtypes matter, so jax.ShapeDtypeStructs do.
      options: those of attention() but return_lse, with their contents. The implementation decides about tile sizes, and
        "xla" visits a tile for all batch elements and heads where any of them needs it. None is what would run here: the
        kernels where there is a GPU, or a mesh describes one, and "xla" elsewhere.

    Returns:
      Visits: `tiles`, `block_q`, `block_kv`, `share` and `masked` in percent, `picture()`.

    Raises:
      TypeError, ValueError: as attention() does; for traced arrays, and where there are no tiles: implementation="naive",
        or an empty q, k or v.
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((q, k, v, options))):
        raise TypeError("visits() shows what is visited and takes no traced arrays: call it outside of jax.jit")
    return _visits(_shape(q), _shape(k), _shape(v), options)


def _shape(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jax.eval_shape(lambda: jnp.asarray(x))


def _visits(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Visits:
    of_pairs, blocks = of_score(options), blocks_of(options.get("block_sizes"))
    arguments.arrays(q, k, v)
    batched = q.ndim == 4
    if not batched:
        q, k, v = (jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in (q, k, v))
    score = Score.of(q, k, batched=batched, **of_pairs)
    if 0 in (q.size, k.size, v.size):
        raise ValueError(f"there is no tile to visit where q, k or v is empty, got {q.shape}, {k.shape}, {v.shape}")
    chosen: list[tuple[Any, Cut]] = []

    def choose(q, v):
        engine = engine_of(options.get("implementation"), blocks, options.get("precision"), q, v)
        if engine is None:
            raise ValueError('implementation must be one that visits tiles, got "naive"')
        own: Any = engine.elsewhere if gpu.kind() is None else engine.gpu
        chosen.append((own, own.cut(q, v, score)))

    jax.eval_shape(choose, q, v)  # which takes the arrays' shapes for arrays
    ((own, cut),) = chosen
    here = jax.tree.map(np.asarray, score.only(*OF_VISIBILITY))
    with jax.set_mesh(Mesh(np.empty((), object), ())):  # none: the devices of a mesh in use need not be there
        return Visits(np.asarray(own.visits(here, cut), np.int8), cut.block_q, cut.block_kv)
