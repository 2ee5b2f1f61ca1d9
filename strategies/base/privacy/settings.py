"""The settings of differential privacy: ``dp.*``."""

from dataclasses import dataclass

from strategies.base.settings import setting


@dataclass(frozen=True)
class Privacy:
    """The settings of ``dp = true``."""

    clip_norm: float = setting(
        1.0,
        "longest gradient of one unit; a longer one is shortened",
        symbol="C",
        minimum=1e-6,  # far above lengths at which float32 rounding lengthens a gradient
        maximum=1e6,
    )
    noise_multiplier: float = setting(
        1.0,
        "standard deviation of the noise on a batch's sum of gradients, in clip norms",
        symbol="σ",
        minimum=0.1,
        maximum=1e5,
    )
    target_epsilon: float = setting(
        0.0,
        "each silo computes the noise with which all rounds together cost it this much, 0: dp.noise-multiplier holds",
        symbol="ε",
        minimum=0,
    )
    delta: float = setting(
        0.0,
        "probability with which epsilon need not hold, 0: 1e-5, and with n units at most 1 / (10 n)",
        symbol="δ",
        minimum=0,
        below=1,
    )
    unit: str = setting(
        "record",
        "what is protected: a record, or a patient with all of their records, where the data file names patients",
        choices=("record", "patient"),
    )

    def delta_for(self, units: int) -> float:
        """Return δ of a silo with this number of units."""
        return self.delta or min(1e-5, 1 / (10 * max(units, 1)))
