"""`silofl watch`: a run as it goes on, on a page, in a terminal, and as numbers for Prometheus."""
