"""`silofl tune`: search the settings of methods by validation scores."""
