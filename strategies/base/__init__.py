"""The base of all methods: the silo's half, the server's half, replies, payloads, settings, state."""
