"""Slow, obvious references beside each fast thing; the online one is also what runs where there are no kernels."""

from jflash.reference.naive import naive_attention as naive_attention
from jflash.reference.online import Online as Online
from jflash.reference.online import online_attention as online_attention
from jflash.reference.softmax import naive_softmax as naive_softmax
from jflash.reference.softmax import online_softmax as online_softmax
from jflash.reference.softmax import safe_softmax as safe_softmax
