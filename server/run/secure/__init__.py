"""Secure aggregation at the server."""
