"""Federated statistics: what a hospital tells of its data before a training."""
