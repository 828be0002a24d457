"""How launches are measured."""
