"""Tool calls in a model's text: which format it writes, and a streaming parser for each."""
