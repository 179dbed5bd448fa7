"""Every op on a device against float64 on the same device, over fresh random inputs.

Shapes: T tokens, K experts of a token, E experts, S = T·K rows, D width, F hidden width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shared_moe.ops import (
    combine,
    grouped_ffn,
    grouped_linear,
    lowrank_experts,
    slot_mix,
    slot_unmix,
    sort_by_expert,
    spectral_linear,
)
from shared_moe.ops.backend import choose_backend, resolve
from shared_moe.ops.topk_route import kern_gate, topk_gate
from shared_moe.routing.dirichlet import sample_log_dirichlet

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest difference allowed, in units of the largest entry of the answer."""

DEVIATIONS = 6.0
"""Standard errors that a mean over samples may be off."""


@dataclass(frozen=True)
class Check:
    """One op in one dtype: what ran, the largest error of the answer and its gradients, and the error allowed."""

    op: str
    backend: str
    dtype: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # false for NaN


Function = Callable[..., Tensor]


def check_ops(
    device: torch.device | str, *, tokens: int = 777, width: int = 256, seed: int = 0
) -> Iterator[Check]:
    """Checks of every op, forward and backward; `tokens` and `width` set the size of the inputs."""
    g = torch.Generator().manual_seed(seed)
    yield _sort(device, tokens, g)
    for dtype in (torch.float32, torch.bfloat16):
        for op, (function, inputs) in _cases(device, dtype, tokens, width, g).items():
            yield _compare(op, function, inputs, dtype, g)
    for name, gate in _gates(device).items():
        scores = torch.randn(tokens, 64, generator=g).to(device)
        yield _compare("topk_route", gate, (scores,), torch.float32, g, name)
    yield _dirichlet(device, g)


def _cases(device, dtype, T: int, D: int, g) -> dict[str, tuple[Function, tuple[Tensor, ...]]]:
    E, K, F, R, H = 13, 4, D // 2, 16, 2

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(device, dtype)

    ids = torch.randint(-1, E + 1, (T, K), generator=g).to(device)
    order, counts = sort_by_expert(ids, E)
    weights = torch.rand(T, K, generator=g).to(device)
    slots = 6
    return {
        "grouped_ffn": (
            lambda x, up, down, w: grouped_ffn(x, up, down, ids, w),
            (rand(T, D), rand(E, 2 * F, D, scale=D**-0.5), rand(E, D, F, scale=F**-0.5), weights),
        ),
        "grouped_linear": (
            lambda x, w: grouped_linear(x, w, counts),
            (rand(T * K, D), rand(E, F, D, scale=D**-0.5)),
        ),
        "combine": (lambda rows, w: combine(rows, order, counts, w), (rand(T * K, D), weights)),
        "lowrank_experts": (
            lowrank_experts,
            (
                rand(2, H, E, slots, 64),
                rand(H, 64, R, scale=0.125),
                rand(H, R),
                rand(E, H, R, 96, scale=0.25),
                rand(E, H, 96),
            ),
        ),
        "spectral_linear": (
            lambda x, u, v, s, w: spectral_linear(x, u, v, s, ids, w),
            (
                rand(T, D),
                rand(F, 64, scale=0.125),
                rand(64, D, scale=D**-0.5),
                torch.rand(E, 64, generator=g).to(device),
                weights,
            ),
        ),
        "slot_mix": (
            lambda z, s: slot_mix(z, s, backend=_backend("slot_mix", z)),
            (rand(2, H, T, 32), rand(H, slots, 32, scale=0.2)),
        ),
        "slot_unmix": (
            lambda z, s, v: slot_unmix(z, s, v, backend=_backend("slot_unmix", z)),
            (rand(2, H, T, 32), rand(H, slots, 32, scale=0.2), rand(2, H, slots, 48)),
        ),
    }


def _gates(device) -> dict[str, Function]:
    def topk(sigmoid: bool) -> Function:
        return lambda scores: topk_gate(scores, None, 8, sigmoid, True, 1.0, _backend("topk_route", scores))[
            1
        ]

    def kern(scores: Tensor) -> Tensor:
        gamma = torch.ones((), dtype=scores.dtype, device=device)
        return kern_gate(scores, gamma, 8, 1e-6, _backend("topk_route", scores))[1]

    return {"softmax": topk(False), "sigmoid": topk(True), "KERN": kern}


def _backend(op: str, x: Tensor) -> str:
    """The kernel by its name, for ops that would else leave it to torch; kernels have no float64."""
    return "torch" if x.dtype == torch.float64 else resolve(op, choose_backend(op), x)


def _compare(op: str, function: Function, inputs: tuple[Tensor, ...], dtype, g, kind: str = "") -> Check:
    def answers(wide: bool) -> list[Tensor]:
        leaves = [(t.double() if wide else t).detach().requires_grad_() for t in inputs]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]

    with torch.no_grad():
        shape = function(*inputs).shape
    grad = torch.randn(shape, generator=g).to(inputs[0].device, dtype)
    errors = [
        (a.double() - b).abs().max() / b.abs().max().clamp_min(1e-3)
        for a, b in zip(answers(False), answers(True), strict=True)
    ]
    error = torch.stack(errors).max().item()
    ran = resolve(op, choose_backend(op), inputs[0])
    return Check(f"{op} {kind}".strip(), ran, str(dtype).removeprefix("torch."), error, LIMITS[dtype])


def _sort(device, T: int, g) -> Check:
    """Order and counts must be those of the CPU; the error is the number of differences."""
    ids = torch.randint(-1, 257, (T, 8), generator=g)
    wrong = sum(
        (a.cpu() != b).sum().item()
        for a, b in zip(sort_by_expert(ids.to(device), 256), sort_by_expert(ids, 256), strict=True)
    )
    ran = resolve("sort_by_expert", choose_backend("sort_by_expert"), ids.to(device))
    return Check("sort_by_expert", ran, "int64", float(wrong), 0.0)


def _dirichlet(device, g, draws: int = 200_000) -> Check:
    """Means of samples and of their gradients against the distribution's, in standard errors.

    E[θ_i] = a_i / A and, with weights c, d E[c·θ] / d a_j = (c_j - c·a / A) / A.
    """
    a = torch.tensor([0.05, 0.3, 1.0, 2.5, 30.0], dtype=torch.float64, device=device)
    c = torch.randn(5, generator=g, dtype=torch.float64).to(device)
    leaf = a.expand(draws, -1).clone().requires_grad_()
    on = torch.Generator(device=device).manual_seed(g.initial_seed())
    theta = sample_log_dirichlet(leaf, on).exp()
    (grad,) = torch.autograd.grad((theta @ c).sum(), leaf)
    total = a.sum()
    off = [
        (rows.detach().mean(0) - mean).abs() / (rows.detach().std(0) / draws**0.5)
        for rows, mean in ((theta, a / total), (grad, (c - (c @ a) / total) / total))
    ]
    op = "sample_log_dirichlet"
    return Check(op, resolve(op, choose_backend(op), a), "float64", torch.cat(off).max().item(), DEVIATIONS)
