"""How a silo trains, whatever its method."""
