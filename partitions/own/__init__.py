"""A hospital's own data set: ``MODULE:FUNCTION`` on its machine, read by an index that does not change."""
