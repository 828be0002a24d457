"""Exact attention for JAX, in memory linear in the sequence."""

from jflash.attention import attention as attention
from jflash.blocks import BlockSizes as BlockSizes
from jflash.score import Score as Score

__version__ = "0.1.0"
