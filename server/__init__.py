"""The coordinating side: the ServerApp, the round loop, history and checkpoints, the in-process engine, commands."""
