"""The rules of a message to this site, each in the file of its name; their order is the gate's (`../gate.py`)."""
