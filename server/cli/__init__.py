"""Command line: one module per group of commands, which only parses and dispatches."""
