"""A hospital's own files, converted to one silo data file."""
