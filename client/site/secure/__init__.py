"""Secure aggregation at a hospital: what it answers, its keys, masks and shares."""
