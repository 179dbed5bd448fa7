"""Closed forms that set a Dirichlet prior's concentrations from what one wants to see (DirMoE, arXiv 2602.09001).

E experts, of which k are active with concentration λ a_hi and the rest with λ a_lo. The active mass T is then
Beta(k λ a_hi, (E - k) λ a_lo), and the Simpson index H = Σ θ_i² says how peaked the weights are.
"""

from shared_moe.errors import InputError


def _check_counts(num_experts: int, k: float) -> None:
    if int(k) != k or not 0 < k < num_experts:
        raise InputError(
            f"k is {k} of {num_experts} experts; the calibration needs a whole number, 0 < k < E "
            "(else set ratio and scale directly)"
        )


def ratio_from_mass(mass: float, num_experts: int, k: float) -> float:
    """a_hi / a_lo that puts the mean mass E[T] = `mass` on the k active experts: m/(1-m) · (E-k)/k."""
    _check_counts(num_experts, k)
    if not 0 < mass < 1:
        raise InputError(f"mass is {mass}; expected 0 < mass < 1")
    return mass / (1 - mass) * (num_experts - k) / k


def scale_from_variance(mass: float, variance: float, num_experts: int, k: float, a_lo: float = 1.0) -> float:
    """λ that gives Var[T] = `variance`: (m(1-m)/v - 1) / (k a_hi + (E-k) a_lo), a_hi from `ratio_from_mass`."""
    a_hi = a_lo * ratio_from_mass(mass, num_experts, k)
    if not 0 < variance < mass * (1 - mass):
        raise InputError(f"variance is {variance}; expected 0 < variance < m(1-m) = {mass * (1 - mass):.6g}")
    if a_lo <= 0:
        raise InputError(f"a_lo is {a_lo}; expected a positive concentration")
    return (mass * (1 - mass) / variance - 1) / (k * a_hi + (num_experts - k) * a_lo)


def expected_simpson(scale: float, concentrations: list[float]) -> float:
    """E[Σ θ_i²] of Dir(λ b): (λ S2/B + 1) / (λ B + 1), B = Σ b, S2 = Σ b²."""
    total = sum(concentrations)
    squares = sum(b * b for b in concentrations)
    return (scale * squares / total + 1) / (scale * total + 1)


def scale_from_simpson(simpson: float, num_experts: int) -> float:
    """λ of a flat Dirichlet (b_i = 1) with E[H] = `simpson`: (1 - h) / (h E - 1), valid for 1/E < h < 1."""
    if not 1 / num_experts < simpson < 1:
        raise InputError(f"simpson is {simpson}; expected 1/E = {1 / num_experts:.6g} < simpson < 1")
    return (1 - simpson) / (simpson * num_experts - 1)
