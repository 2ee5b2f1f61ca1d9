"""What both ends say: the silo and the server import this, and neither the other."""
