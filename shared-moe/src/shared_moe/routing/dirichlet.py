"""DirMoE: spike-and-slab routing, a relaxed Bernoulli mask times a Dirichlet (Vahidi et al., ICLR 2026, 2602.09001).

    z_i = σ((l_i + logistic noise) / τ),  a_i = λ (z_i a_hi,i + (1 - z_i) a_lo,i),  θ ~ Dir(a),  r = z θ / Σ z θ

Shapes: T tokens, D width, E experts, K slots a token (E when dense, k_max when sparse).
All of it runs in float32 or wider, the Dirichlet sample in float64.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from shared_moe.errors import InputError
from shared_moe.ops.backend import choose_backend, resolve
from shared_moe.ops.topk_route import stable_top_k
from shared_moe.routing.dirichlet_calibration import ratio_from_mass, scale_from_variance
from shared_moe.routing.routing import Routing
from shared_moe.routing.schedules import DirichletSchedule
from shared_moe.routing.topk import gate_logits

CONCENTRATION_RANGE = (1e-3, 1e4)
GRADIENT_LIMIT = 1e4


def sample_log_dirichlet(concentration_TE: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """log θ of a sample θ ~ Dir(a) of each row (T, E), in float64, differentiable in the concentrations.

    Normalised Gammas, Gamma(a) = Gamma(a + 1) U^(1/a), taken in logarithms: at a = 1e-3 a Gamma is often below the
    smallest double, its logarithm is not. The gradient is implicit through Gamma(a + 1) (Figurnov et al. 2018) and
    explicit through U^(1/a). A row with a NaN comes back as NaN.
    """
    a = concentration_TE.to(torch.float64)
    op = "sample_log_dirichlet"
    if resolve(op, choose_backend(op), a) == "cuda":
        from shared_moe.ops.cuda.dirichlet import log_gamma_sample

        return log_gamma_sample(a, generator).log_softmax(-1)
    gamma = torch.ops.aten._standard_gamma(torch.where(a.isfinite(), a, 1.0) + 1, generator)
    u = 1 - torch.rand(a.shape, dtype=a.dtype, device=a.device, generator=generator)
    return (gamma.log() + u.log() / a).log_softmax(-1)


def dirichlet_kl(a_TE: Tensor, b_TE: Tensor) -> Tensor:
    """KL(Dir(a) || Dir(b)) of each row (T,), in closed form."""
    A, B = a_TE.sum(-1), b_TE.sum(-1)
    log_gammas = A.lgamma() - B.lgamma() - (a_TE.lgamma() - b_TE.lgamma()).sum(-1)
    return log_gammas + ((a_TE - b_TE) * (a_TE.digamma() - A.digamma()[..., None])).sum(-1)


def relaxed_gates(logits_TE: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """(l + g) / τ with logistic g. The relaxed gate z is its sigmoid: P(z > 1/2) = σ(l) at every temperature."""
    u = torch.rand(logits_TE.shape, dtype=torch.float64, device=logits_TE.device, generator=generator)
    noise_TE = torch.logit(u, eps=torch.finfo(u.dtype).eps / 2).to(logits_TE.dtype)
    return (logits_TE + noise_TE) / temperature


def mix_weights(gates_TE: Tensor, log_theta_TE: Tensor) -> Tensor:
    """log r of r = z θ / Σ z θ for z = σ(gates), rows normalised; exact where z or θ is below the smallest float."""
    return (nnf.logsigmoid(gates_TE) + log_theta_TE).log_softmax(1)


def _clip(grad: Tensor) -> Tensor:
    return grad.clamp(-GRADIENT_LIMIT, GRADIENT_LIMIT)


def _token_mean(value_T: Tensor) -> Tensor:
    """The mean over tokens; 0 of none."""
    return value_T.sum() / max(1, value_T.shape[0])


class DirichletRouter(nn.Module):
    """Chooses experts with a relaxed Bernoulli mask and shares out their weight with a Dirichlet.

    k                expected number of active experts; a fraction needs `ratio` and `scale` (the calibrators take whole
                     numbers only)
    mass, variance   mean and variance of the prior's mass on the active set; they fix a_hi / a_lo and λ
    mode             dense: training runs all experts, gradients are exact; sparse: an expert runs when z >= 1/2 (or
                     the arg-max), at most k_max by z θ, r renormalised over what runs
    schedule         temperature, a_lo and λ as functions of `step`; without one they stay at `temperature`, a_hi / ratio
                     and `scale`
    top_k            at inference keep exactly this many of the largest r (weight 0 when fewer gates are open); else
                     all open gates

    The prior's levels are a_hi = ratio and, at the end of the schedule, a_lo = 1, both times λ = scale.

    In evaluation no random number is drawn: z_i = 1[l_i > 0] (at least the arg-max), θ = the Dirichlet's mean.
    `losses` holds kl, sparsity, reconstruction (and gate_kl when beta_z is not 0), each a mean over tokens;
    `auxiliary_loss` weighs them: β_θ kl + λ_s sparsity + w_r reconstruction + β_z gate_kl, times aux_weight.
    A token with a NaN gets weight NaN, in training and in evaluation.

    Raises `InputError` for numbers out of range, `ShapeError` for tokens that are not (T, dim).
    """

    step: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: float,
        *,
        mode: Literal["dense", "sparse"] = "dense",
        k_max: int | None = None,
        top_k: int | None = None,
        mass: float = 0.9,
        variance: float = 0.01,
        ratio: float | None = None,
        scale: float | None = None,
        schedule: DirichletSchedule | None = None,
        temperature: float = 1.0,
        beta_theta: float = 1.0,
        sparsity_weight: float = 0.01,
        reconstruction_weight: float = 0.01,
        beta_z: float = 0.0,
        aux_weight: float = 1.0,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if num_experts < 1 or not 0 < k <= num_experts:
            raise InputError(f"k is {k} of {num_experts} experts; expected 0 < k <= num_experts")
        if mode not in ("dense", "sparse"):
            raise InputError(f"mode is {mode!r}; expected dense or sparse")
        if top_k is not None and not 1 <= top_k <= num_experts:
            raise InputError(f"top_k is {top_k} of {num_experts} experts; expected 1 <= top_k <= num_experts")
        if k_max is not None and not 1 <= k_max <= num_experts:
            raise InputError(f"k_max is {k_max} of {num_experts} experts; expected 1 <= k_max <= num_experts")
        for name, value in (("temperature", temperature), ("ratio", ratio), ("scale", scale)):
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} is {value}; expected a positive number")
        if k == num_experts:
            ratio, scale = ratio or 1.0, scale or 1.0
        if ratio is None:
            ratio = ratio_from_mass(mass, num_experts, k)
        if scale is None:
            scale = scale_from_variance(mass, variance, num_experts, k)
        self.num_experts, self.k, self.mode, self.top_k = num_experts, k, mode, top_k
        self.k_max = k_max or min(num_experts, max(1, round(2 * k)))
        self.ratio, self.scale = ratio, scale
        self.schedule, self.temperature = schedule, temperature
        self.beta_theta, self.beta_z, self.aux_weight = beta_theta, beta_z, aux_weight
        self.sparsity_weight, self.reconstruction_weight = sparsity_weight, reconstruction_weight
        self.share = min(k / num_experts, 1 - 1e-4)
        self.weight = nn.Parameter(torch.empty(num_experts, dim).normal_(0, 0.02, generator=generator))
        self.bias = nn.Parameter(torch.full((num_experts,), math.log(self.share / (1 - self.share))))
        self.high = nn.Parameter(torch.zeros(num_experts, dim))
        self.low = nn.Parameter(torch.zeros(num_experts, dim))
        self.decoder = nn.Parameter(torch.zeros(dim, num_experts))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def prior(self, z_TE: Tensor) -> Tensor:
        """a_p = λ (z a_hi + (1 - z) a_lo), the prior's concentrations for this mask."""
        high, low = self._levels()
        return (z_TE * high + (1 - z_TE) * low).clamp(*CONCENTRATION_RANGE)

    def posterior(self, x_TD: Tensor, z_TE: Tensor) -> Tensor:
        """a_q = λ (z a_hi(x) + (1 - z) a_lo(x)); equal to the prior until the heads have learned."""
        high, low = self._levels()
        unit = math.log(2)  # softplus(0)
        high_TE = high * nnf.softplus(gate_logits(x_TD, self.high)) / unit
        low_TE = low * nnf.softplus(gate_logits(x_TD, self.low)) / unit
        return (z_TE * high_TE + (1 - z_TE) * low_TE).clamp(*CONCENTRATION_RANGE)

    def _levels(self) -> tuple[float, float]:
        """λ a_hi and λ a_lo at this step."""
        if self.schedule is None:
            return self.scale * self.ratio, self.scale
        step = int(self.step)
        scale = self.schedule.scale(step, self.scale)
        return scale * self.ratio, scale * self.schedule.a_lo(step, self.ratio, self.ratio)

    def current_temperature(self) -> float:
        return self.temperature if self.schedule is None else self.schedule.temperature(int(self.step))

    def forward(self, x_TD: Tensor, *, generator: torch.Generator | None = None) -> Routing:
        """(T, D) -> Routing; set `router.step` (a buffer, saved with the model) to move along the schedule."""
        logits_TE = gate_logits(x_TD, self.weight, self.bias)
        if not self.training:
            return self._decide(x_TD, logits_TE)
        gates_TE = relaxed_gates(logits_TE, self.current_temperature(), generator)
        z_TE = gates_TE.sigmoid()
        a_q, a_p = self.posterior(x_TD, z_TE), self.prior(z_TE)
        if a_q.requires_grad:
            a_q.register_hook(_clip)
        log_r_TE = mix_weights(gates_TE, sample_log_dirichlet(a_q, generator))
        r_TE = log_r_TE.exp().to(logits_TE.dtype)
        rebuilt_TD = gate_logits(r_TE, self.decoder)
        losses = {
            "kl": _token_mean(dirichlet_kl(a_q.double(), a_p.double())).to(logits_TE.dtype),
            "sparsity": _token_mean((z_TE.sum(1) - self.k).square()),
            "reconstruction": _token_mean((rebuilt_TD - x_TD.detach()).square().mean(1)),
        }
        if self.beta_z:
            losses["gate_kl"] = self._gate_kl(logits_TE)
        if self.mode == "dense":
            return Routing(_all_experts(r_TE), r_TE, r_TE, logits_TE, losses)
        ids_TK, weights_TK = self._sparsify(gates_TE, log_r_TE)
        return Routing(ids_TK, weights_TK.to(logits_TE.dtype), r_TE, logits_TE, losses)

    def _gate_kl(self, logits_TE: Tensor) -> Tensor:
        """KL of Bernoulli(σ(l)) against Bernoulli(k/E), summed over experts, mean over tokens."""
        p = torch.sigmoid(logits_TE)
        first = p * (nnf.logsigmoid(logits_TE) - math.log(self.share))
        second = (1 - p) * (nnf.logsigmoid(-logits_TE) - math.log1p(-self.share))
        return _token_mean((first + second).sum(1))

    def _sparsify(self, gates_TE: Tensor, log_r_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The experts with z >= 1/2, at least the arg-max, at most k_max by z θ; r renormalised over them."""
        runs_TE = (gates_TE >= 0).scatter(1, gates_TE.argmax(1, keepdim=True), True)
        score_TE = log_r_TE.detach().masked_fill(~runs_TE, -math.inf)
        ids_TK = stable_top_k(score_TE, self.k_max)
        kept_TK = runs_TE.gather(1, ids_TK)
        weights_TK = log_r_TE.gather(1, ids_TK).masked_fill(~kept_TK, -math.inf).softmax(1)
        return torch.where(kept_TK, ids_TK, -1), weights_TK

    def _decide(self, x_TD: Tensor, logits_TE: Tensor) -> Routing:
        """Without noise: the gates whose logit is positive, at least the arg-max, weighted by the Dirichlet's mean."""
        open_TE = (logits_TE > 0).scatter(1, logits_TE.argmax(1, keepdim=True), True)
        a_q = self.posterior(x_TD, open_TE.to(logits_TE.dtype))
        r_TE = open_TE * a_q
        r_TE = r_TE / r_TE.sum(1, keepdim=True)
        if self.top_k is None:
            return Routing(torch.where(open_TE, _all_experts(r_TE), -1), r_TE, r_TE, logits_TE)
        closed_last_TE = torch.where(open_TE, r_TE, -1 / a_q)
        ids_TK = stable_top_k(closed_last_TE, self.top_k)
        weights_TK = r_TE.gather(1, ids_TK)
        return Routing(ids_TK, weights_TK / weights_TK.sum(1, keepdim=True), r_TE, logits_TE)

    def auxiliary_loss(self, routing: Routing) -> Tensor:
        """aux_weight (β_θ kl + λ_s sparsity + w_r reconstruction + β_z gate_kl) of a routing; 0 in evaluation.

        Add one per layer to the task's loss.
        """
        weights = {
            "kl": self.beta_theta,
            "sparsity": self.sparsity_weight,
            "reconstruction": self.reconstruction_weight,
            "gate_kl": self.beta_z,
        }
        total = routing.logits_TE.new_zeros(())
        for name, value in routing.losses.items():
            total = total + weights[name] * value
        return self.aux_weight * total


def _all_experts(r_TE: Tensor) -> Tensor:
    return torch.arange(r_TE.shape[1], device=r_TE.device).expand_as(r_TE).contiguous()
