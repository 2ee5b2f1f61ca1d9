"""`silofl watch`: live view of a run on a page, in a terminal, and as metrics for Prometheus."""
