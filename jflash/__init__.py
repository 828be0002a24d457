"""Exact attention for JAX, in memory linear in the sequence."""

from jflash.attention import attention as attention
from jflash.drop_in import dot_product_attention as dot_product_attention
from jflash.launch.blocks import BlockSizes as BlockSizes
from jflash.merge import merge as merge
from jflash.parallel.zigzag import unzigzag as unzigzag
from jflash.parallel.zigzag import zigzag as zigzag
from jflash.ring_attention import ring_attention as ring_attention
from jflash.score.alibi import alibi_slopes as alibi_slopes
from jflash.score.dropout import dropout_mask as dropout_mask
from jflash.score.score import Score as Score
from jflash.tuning.tune import launches as launches
from jflash.tuning.tune import tune as tune
from jflash.visits import visits as visits

__version__ = "0.1.0"
