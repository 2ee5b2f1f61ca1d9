"""Data sets, their partitions over silos, and a silo's own data file."""
