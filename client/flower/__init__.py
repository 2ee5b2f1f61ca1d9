"""All that uses Flower beyond what it exports: the silo's loop, the server's Fleet service, the ServerApp's Grid."""
