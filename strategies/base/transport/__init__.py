"""What travels: payloads, codecs, error feedback, acknowledged state, replies."""
