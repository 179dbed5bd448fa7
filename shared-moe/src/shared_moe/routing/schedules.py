"""From exploring to decided: DirMoE's schedules as plain functions of the training step."""

import math
from dataclasses import dataclass

from shared_moe.errors import InputError


@dataclass(frozen=True)
class DirichletSchedule:
    """Anneals over the first half of `total_steps` and holds from there on.

    temperature  τ(t) = max(τ_min, τ_0 ρ^t), ρ such that τ_min is met at half of training
    a_lo         linear from a_hi (no preference) to a_hi / ratio over the same span
    scale        λ(t), geometric from `scale_start` times the calibrated λ down to it over the same span; constant by
                 default

    `dataclasses.asdict` gives what a model's configuration has to hold; the step itself is a buffer of the router.
    """

    total_steps: int
    tau_start: float = 1.0
    tau_min: float = 0.1
    scale_start: float = 1.0

    def __post_init__(self):
        if (
            self.total_steps < 1
            or not 0 < self.tau_min <= self.tau_start
            or not 0 < self.scale_start < math.inf
        ):
            raise InputError(
                f"total_steps={self.total_steps}, tau_start={self.tau_start}, tau_min={self.tau_min}, "
                f"scale_start={self.scale_start}; expected at least one step, 0 < tau_min <= tau_start, scale_start > 0"
            )

    def _progress(self, step: int) -> float:
        return min(1.0, max(0.0, step / max(1.0, self.total_steps / 2)))

    def temperature(self, step: int) -> float:
        rate = math.log(self.tau_min / self.tau_start)
        return max(self.tau_min, self.tau_start * math.exp(rate * self._progress(step)))

    def a_lo(self, step: int, a_hi: float, ratio: float) -> float:
        return a_hi + (a_hi / ratio - a_hi) * self._progress(step)

    def scale(self, step: int, calibrated: float) -> float:
        return calibrated * self.scale_start ** (1 - self._progress(step))
