"""Attention as one primitive for all platforms, on many devices, and rings of them."""
