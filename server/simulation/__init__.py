"""Runs on this machine, without a network: the in-process engine, studies, workers, the demo."""
