"""From token ids to what a client reads: text, stop strings, events. No MLX, no HTTP."""
