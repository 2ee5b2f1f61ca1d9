"""What differential privacy has cost the people in this site's data, and what is left of the budget."""
