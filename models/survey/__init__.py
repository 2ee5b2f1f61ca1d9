"""Federated statistics: the summaries of a hospital's data before a training."""
