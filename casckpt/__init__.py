"""casckpt: content-addressed, deduplicating snapshots for reinforcement-learning training."""
