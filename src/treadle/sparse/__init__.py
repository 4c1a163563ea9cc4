"""Sparse prefill: which tokens of a long prompt are worth computing, said by a small model."""
