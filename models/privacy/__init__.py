"""Differential privacy: the accountant, the noise, the clipping of each unit's gradient."""
