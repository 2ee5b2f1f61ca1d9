"""Studies: protocols that a research committee approved, as files, and the checks that a run stays within one."""
