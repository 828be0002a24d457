"""Tile sizes and launches: what the caller may choose, what is chosen otherwise, and where that comes from."""
