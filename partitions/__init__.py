"""Data sets, and how they are split over silos; a silo's own data file."""
