"""Methods: one file each, with both halves. Importing a file registers its methods."""

from strategies.base.run_settings import strategies
from strategies.base.strategy import PersonalizedStrategy

__all__ = ["PersonalizedStrategy", "strategies"]
