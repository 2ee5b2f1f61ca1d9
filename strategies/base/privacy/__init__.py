"""Differential privacy in a silo: the plan of a round's releases, Poisson batches, noised gradients."""
