"""Partitions of a data set over silos, as in the papers: one module per paper."""
