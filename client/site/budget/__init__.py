"""The privacy budget of the people in this site's data: what differential privacy has cost, and what is left."""
