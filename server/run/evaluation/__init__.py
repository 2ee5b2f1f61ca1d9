"""``silofl evaluate``: evaluate exported models at every silo without training, simulated or deployed."""
