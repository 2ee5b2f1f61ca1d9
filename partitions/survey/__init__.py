"""Parts of a hospital's data file for the survey of the data before a training."""
