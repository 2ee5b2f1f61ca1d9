"""Threads that wait for each other sleep. To be imported before PyTorch: its OpenMP reads this once, as it is loaded.

They would spin, and where more threads than cores run, what spins takes the core that the other thread needs: beside a
busy process a test with two threads took thirty times as long.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
