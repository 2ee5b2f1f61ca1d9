"""What a hospital's data file keeps for the survey of the data before a training."""
