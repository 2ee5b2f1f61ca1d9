"""Readers of samples, one file per format."""
