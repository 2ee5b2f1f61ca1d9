"""Atomic files, names of silos, and size limits."""
