"""Networks by name, built from an input shape and a number of outputs."""
