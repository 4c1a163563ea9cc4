"""From a client's messages to token ids: conversation, chat template, encoding. No MLX, no HTTP."""
