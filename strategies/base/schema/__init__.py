"""Silos' reports in addition to their models: the data summary and metrics."""
