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
from shared_moe.routing.dirichlet_calibration import ratio_from_mass, scale_from_variance
from shared_moe.routing.routing import Routing
from shared_moe.routing.schedules import DirichletSchedule
from shared_moe.routing.topk import gate_logits, stable_top_k

CONCENTRATION_RANGE = (1e-3, 1e4)
GRADIENT_LIMIT = 1e4


class _DirichletSample(torch.autograd.Function):
    """θ ~ Dir(a) with the implicit reparameterisation gradient dθ/da (Figurnov et al. 2018), clipped."""

    @staticmethod
    def forward(ctx, concentration_TE: Tensor, generator: torch.Generator | None) -> Tensor:
        theta_TE = torch.ops.aten._sample_dirichlet(concentration_TE, generator)
        ctx.save_for_backward(theta_TE, concentration_TE)
        return theta_TE

    @staticmethod
    def backward(ctx, grad_TE: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        theta_TE, concentration_TE = ctx.saved_tensors
        total_TE = concentration_TE.sum(-1, keepdim=True).expand_as(concentration_TE).contiguous()
        implicit = torch.ops.aten._dirichlet_grad(theta_TE, concentration_TE, total_TE)
        centred = grad_TE - (theta_TE * grad_TE).sum(-1, keepdim=True)
        return (implicit * centred).clamp(-GRADIENT_LIMIT, GRADIENT_LIMIT), None


def sample_dirichlet(concentration_TE: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A differentiable sample of each row's Dirichlet, in float64."""
    return _DirichletSample.apply(concentration_TE.to(torch.float64), generator)


def dirichlet_kl(a_TE: Tensor, b_TE: Tensor) -> Tensor:
    """KL(Dir(a) || Dir(b)) of each row (T,), in closed form."""
    A, B = a_TE.sum(-1), b_TE.sum(-1)
    log_gammas = A.lgamma() - B.lgamma() - (a_TE.lgamma() - b_TE.lgamma()).sum(-1)
    return log_gammas + ((a_TE - b_TE) * (a_TE.digamma() - A.digamma()[..., None])).sum(-1)


def relaxed_bernoulli(
    logits_TE: Tensor, temperature: float, generator: torch.Generator | None = None
) -> Tensor:
    """σ((l + g) / τ) with logistic g: P(z > 1/2) = σ(l) at every temperature."""
    u = torch.empty_like(logits_TE).uniform_(generator=generator)
    tiny = torch.finfo(u.dtype).tiny
    u = u.clamp(tiny, 1 - torch.finfo(u.dtype).eps)
    return torch.sigmoid((logits_TE + u.log() - (-u).log1p()) / temperature)


def _log_mix(log_z_TE: Tensor, theta_TE: Tensor) -> Tensor:
    """log of r = z θ / Σ z θ."""
    log_r = log_z_TE + theta_TE.clamp_min(torch.finfo(theta_TE.dtype).tiny).log()
    return log_r - log_r.logsumexp(1, keepdim=True)


class DirichletRouter(nn.Module):
    """Chooses experts with a relaxed Bernoulli mask and shares out their weight with a Dirichlet.

    k                expected number of active experts; a fraction needs `ratio` and `scale` (the calibrators take whole
                     numbers only)
    mass, variance   mean and variance of the prior's mass on the active set; they fix a_hi / a_lo and λ
    mode             dense: training runs all experts, gradients are exact; sparse: an expert runs when z >= 1/2 (or
                     the arg-max), at most k_max by z θ, r renormalised over what runs
    schedule         temperature and a_lo as functions of `step`; without one they stay at `temperature` and a_hi/ratio
    top_k            at inference keep exactly this many of the largest r; else all open gates

    In evaluation no random number is drawn: z_i = 1[l_i > 0] (at least the arg-max), θ = the Dirichlet's mean.
    `losses` holds kl, sparsity, reconstruction (and gate_kl), each a mean over tokens; `auxiliary_loss` weighs them:
    β_θ kl + λ_s sparsity + w_r reconstruction + β_z gate_kl.
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
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if num_experts < 1 or not 0 < k <= num_experts:
            raise InputError(f"k is {k} of {num_experts} experts; expected 0 < k <= num_experts")
        if mode not in ("dense", "sparse"):
            raise InputError(f"mode is {mode!r}; expected dense or sparse")
        if top_k is not None and not 1 <= top_k <= num_experts:
            raise InputError(f"top_k is {top_k} of {num_experts} experts; expected 1 <= top_k <= num_experts")
        self.num_experts, self.k, self.mode, self.top_k = num_experts, k, mode, top_k
        self.k_max = min(num_experts, k_max if k_max is not None else max(1, round(2 * k)))
        if k == num_experts:
            ratio, scale = ratio or 1.0, scale or 1.0
        if ratio is None:
            ratio = ratio_from_mass(mass, num_experts, k)
        if scale is None:
            scale = scale_from_variance(mass, variance, num_experts, k)
        self.ratio, self.scale = ratio, scale
        self.schedule, self.temperature = schedule, temperature
        self.beta_theta, self.beta_z = beta_theta, beta_z
        self.sparsity_weight, self.reconstruction_weight = sparsity_weight, reconstruction_weight
        self.weight = nn.Parameter(torch.empty(num_experts, dim).normal_(0, 0.02, generator=generator))
        share = min(k / num_experts, 1 - 1e-4)
        self.bias = nn.Parameter(torch.full((num_experts,), math.log(share / (1 - share))))
        self.high = nn.Parameter(torch.zeros(num_experts, dim))
        self.low = nn.Parameter(torch.zeros(num_experts, dim))
        self.decoder = nn.Parameter(torch.zeros(dim, num_experts))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def prior(self, z_TE: Tensor) -> Tensor:
        """a_p = λ (z a_hi + (1 - z) a_lo), the prior's concentrations for this mask."""
        a_hi, a_lo = self._levels()
        return (self.scale * (z_TE * a_hi + (1 - z_TE) * a_lo)).clamp(*CONCENTRATION_RANGE)

    def posterior(self, x_TD: Tensor, z_TE: Tensor) -> Tensor:
        """a_q = λ (z a_hi(x) + (1 - z) a_lo(x)); equal to the prior until the heads have learned."""
        a_hi, a_lo = self._levels()
        unit = math.log(2)
        high_TE = a_hi * nnf.softplus(gate_logits(x_TD, self.high)) / unit
        low_TE = a_lo * nnf.softplus(gate_logits(x_TD, self.low)) / unit
        return (self.scale * (z_TE * high_TE + (1 - z_TE) * low_TE)).clamp(*CONCENTRATION_RANGE)

    def _levels(self) -> tuple[float, float]:
        a_hi = self.ratio
        if self.schedule is None:
            return a_hi, a_hi / self.ratio
        return a_hi, self.schedule.a_lo(int(self.step), a_hi, self.ratio)

    def current_temperature(self) -> float:
        return self.temperature if self.schedule is None else self.schedule.temperature(int(self.step))

    def forward(self, x_TD: Tensor, *, generator: torch.Generator | None = None) -> Routing:
        """(T, D) -> Routing; set `router.step` (a buffer, saved with the model) to move along the schedule."""
        logits_TE = gate_logits(x_TD, self.weight, self.bias)
        if not self.training:
            return self._decide(x_TD, logits_TE)
        z_TE = relaxed_bernoulli(logits_TE, self.current_temperature(), generator)
        a_q, a_p = self.posterior(x_TD, z_TE), self.prior(z_TE)
        theta_TE = sample_dirichlet(a_q, generator).to(logits_TE.dtype)
        log_z_TE = nnf.logsigmoid(torch.logit(z_TE, eps=torch.finfo(z_TE.dtype).eps))
        r_TE = _log_mix(log_z_TE, theta_TE).exp()
        losses = {
            "kl": dirichlet_kl(a_q.double(), a_p.double()).mean().to(logits_TE.dtype),
            "sparsity": (z_TE.sum(1) - self.k).square().mean(),
            "reconstruction": nnf.mse_loss(
                r_TE @ self.decoder.t().to(r_TE.dtype), x_TD.detach().to(r_TE.dtype)
            ),
        }
        if self.beta_z:
            losses["gate_kl"] = self._gate_kl(logits_TE)
        if self.mode == "dense":
            return Routing(_all_experts(r_TE), r_TE, r_TE, logits_TE, losses)
        ids_TK, weights_TK = self._sparsify(z_TE, theta_TE, r_TE)
        return Routing(ids_TK, weights_TK, r_TE, logits_TE, losses)

    def _gate_kl(self, logits_TE: Tensor) -> Tensor:
        """KL of Bernoulli(σ(l)) against Bernoulli(k/E), summed over experts, mean over tokens."""
        p = torch.sigmoid(logits_TE)
        share = self.k / self.num_experts
        first = p * (nnf.logsigmoid(logits_TE) - math.log(share))
        second = (1 - p) * (nnf.logsigmoid(-logits_TE) - math.log1p(-share))
        return (first + second).sum(1).mean()

    def _sparsify(self, z_TE: Tensor, theta_TE: Tensor, r_TE: Tensor) -> tuple[Tensor, Tensor]:
        runs = z_TE >= 0.5
        runs = runs.scatter(1, z_TE.argmax(1, keepdim=True), True)
        score_TE = torch.where(runs, (z_TE * theta_TE).detach(), -1.0)
        ids_TK = stable_top_k(score_TE, self.k_max)
        kept = score_TE.gather(1, ids_TK) >= 0
        weights_TK = r_TE.gather(1, ids_TK) * kept
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True).clamp_min(torch.finfo(r_TE.dtype).tiny)
        return torch.where(kept, ids_TK, -1), weights_TK

    def _decide(self, x_TD: Tensor, logits_TE: Tensor) -> Routing:
        open_TE = (logits_TE > 0).scatter(1, logits_TE.argmax(1, keepdim=True), True).to(logits_TE.dtype)
        a_q = self.posterior(x_TD, open_TE)
        r_TE = open_TE * a_q / (open_TE * a_q).sum(1, keepdim=True)
        if self.top_k is None:
            ids = torch.where(r_TE > 0, _all_experts(r_TE), -1)
            return Routing(ids, r_TE, r_TE, logits_TE)
        scored = r_TE + a_q / a_q.sum(1, keepdim=True) * (open_TE == 0) * torch.finfo(r_TE.dtype).eps
        ids_TK = stable_top_k(scored, self.top_k)
        weights_TK = r_TE.gather(1, ids_TK)
        return Routing(ids_TK, weights_TK / weights_TK.sum(1, keepdim=True), r_TE, logits_TE)

    def auxiliary_loss(self, routing: Routing) -> Tensor:
        """β_θ kl + λ_s sparsity + w_r reconstruction (+ β_z gate_kl) of a training routing; 0 in evaluation."""
        weights = {
            "kl": self.beta_theta,
            "sparsity": self.sparsity_weight,
            "reconstruction": self.reconstruction_weight,
            "gate_kl": self.beta_z,
        }
        total = routing.logits_TE.new_zeros(())
        for name, value in routing.losses.items():
            total = total + weights[name] * value
        return total


def _all_experts(r_TE: Tensor) -> Tensor:
    return torch.arange(r_TE.shape[1], device=r_TE.device).expand_as(r_TE).contiguous()
