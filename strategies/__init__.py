"""Methods: one file each, both halves in it. Importing a file registers the methods in it."""

from strategies.base.registry import strategies
from strategies.base.strategy import PersonalizedStrategy

__all__ = ["PersonalizedStrategy", "strategies"]
