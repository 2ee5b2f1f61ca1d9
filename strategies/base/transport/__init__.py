"""Messages between server and silo: payloads, codecs, error feedback, acknowledged state, replies."""
