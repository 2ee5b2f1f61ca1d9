"""Architectures, the flat-vector view of a model, local training on vectors, metrics."""
