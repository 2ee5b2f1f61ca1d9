"""The control room: what the server keeps of a federation's runs beyond Flower, and what an operator calls."""
