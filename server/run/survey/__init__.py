"""A run of ``strategy = survey``."""
