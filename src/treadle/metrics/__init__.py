"""What the server counts, keeps for a while, and tells: counters, histories, one snapshot for every reader."""
