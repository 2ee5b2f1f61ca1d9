"""What a survey of the silos' data found."""
