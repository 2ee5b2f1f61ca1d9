"""Differential privacy in a silo: what a round will release, Poisson batches, noised gradients."""
