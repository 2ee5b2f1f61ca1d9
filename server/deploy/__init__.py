"""A federation outside this process: its file, keys, containers, processes, bundles, checks."""
