"""The command line: one module per group of commands, which parses and dispatches only."""
