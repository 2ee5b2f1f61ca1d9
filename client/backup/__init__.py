"""Copies of a silo or a server that can be restored elsewhere."""
