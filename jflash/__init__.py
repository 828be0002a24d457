"""Exact attention for JAX, in memory linear in the sequence."""

from jflash.alibi import alibi_slopes as alibi_slopes
from jflash.attention import attention as attention
from jflash.blocks import BlockSizes as BlockSizes
from jflash.drop_in import dot_product_attention as dot_product_attention
from jflash.dropout import dropout_mask as dropout_mask
from jflash.ring_attention import ring_attention as ring_attention
from jflash.score import Score as Score
from jflash.tuning import launches as launches
from jflash.tuning import tune as tune
from jflash.zigzag import unzigzag as unzigzag
from jflash.zigzag import zigzag as zigzag

__version__ = "0.1.0"
