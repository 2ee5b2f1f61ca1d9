"""Formats that `silofl export` writes beside a model."""
