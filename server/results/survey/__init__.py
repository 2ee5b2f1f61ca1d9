"""Results of a survey of the silos' data."""
