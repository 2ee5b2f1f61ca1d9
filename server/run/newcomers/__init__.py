"""Hospitals that a run holds out, and evaluates at its end as newcomers."""
