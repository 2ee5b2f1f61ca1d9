"""Public data sets by name, one module per family."""
