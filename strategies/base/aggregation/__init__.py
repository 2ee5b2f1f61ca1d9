"""Aggregation of integers: secure sums."""
