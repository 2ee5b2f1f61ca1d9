"""What the methods stand on: the silo's half, the server's half, replies, payloads, settings, state."""
