"""Kernels for MLX's CPU backend on Linux: products with packed or plain weights, attention, and what stands between.

`cpp/` is their source: `linear` and `attention` compute, `pool` shares work among threads, `module` makes operations of
MLX of them. `build.py` compiles it once for this processor, `layers.py` puts the operations into a loaded model.
"""
