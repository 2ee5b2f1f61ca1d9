"""Differential privacy at a silo, beside the training: checks, the key of the noise, the private round."""
