"""Aggregation: robust rules, clipping, and one mixture per client."""
