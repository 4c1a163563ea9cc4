"""Treadle: a local inference server for language models on MLX, with one generation loop."""

__version__ = "0.1.0"
