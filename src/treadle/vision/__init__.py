"""Images: from a client's URL to embeddings in a step."""
