"""A hospital's tables at the command line: imports by a recipe or a schema, new patients to predict."""
