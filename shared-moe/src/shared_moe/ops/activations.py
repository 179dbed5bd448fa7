"""Activations between an expert's two matrices.

Shapes: S rows, H width of the first matrix's output, F hidden width (H = 2F when gated, else H = F).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor

from shared_moe.errors import InputError

GPT_OSS_ALPHA = 1.702
GPT_OSS_LIMIT = 7.0


def gpt_oss_glu(h_SH: Tensor) -> Tensor:
    """The gpt-oss activation: gate and up interleaved, both clamped, (up + 1) · gate · sigmoid(1.702 gate)."""
    gate = h_SH[..., ::2].clamp(max=GPT_OSS_LIMIT)
    up = h_SH[..., 1::2].clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    return (up + 1) * gate * torch.sigmoid(GPT_OSS_ALPHA * gate)


def _gpt_oss_glu_backward(grad_SF: Tensor, h_SH: Tensor) -> Tensor:
    gate = h_SH[..., ::2].clamp(max=GPT_OSS_LIMIT)
    up = h_SH[..., 1::2].clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    sig = torch.sigmoid(GPT_OSS_ALPHA * gate)
    grad_gate = grad_SF * (up + 1) * (sig + GPT_OSS_ALPHA * gate * sig * (1 - sig))
    grad_up = grad_SF * gate * sig
    grad_h = torch.empty_like(h_SH)
    grad_h[..., ::2] = grad_gate * (h_SH[..., ::2] <= GPT_OSS_LIMIT)
    grad_h[..., 1::2] = grad_up * (h_SH[..., 1::2].abs() <= GPT_OSS_LIMIT)
    return grad_h


def _gelu_tanh(h: Tensor) -> Tensor:
    return nnf.gelu(h, approximate="tanh")


def _identity(h: Tensor) -> Tensor:
    return h.clone()


def _identity_backward(grad: Tensor, h: Tensor) -> Tensor:
    return grad.clone()


def _relu_backward(grad: Tensor, h: Tensor) -> Tensor:
    return grad * (h > 0)


def _gelu_tanh_backward(grad: Tensor, h: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, h, approximate="tanh")


POINTWISE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (nnf.silu, torch.ops.aten.silu_backward),
    "gelu": (nnf.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_backward),
    "relu": (nnf.relu, _relu_backward),
    "identity": (_identity, _identity_backward),
}
"""Name -> (function, its backward (grad, input) -> grad of the input)."""

ACTIVATIONS = (*POINTWISE, "gpt_oss")


def check_activation(activation: str, gated: bool) -> None:
    if activation not in ACTIVATIONS:
        raise InputError(f"activation is {activation!r}; there are: {', '.join(ACTIVATIONS)}")
    if activation == "gpt_oss" and not gated:
        raise InputError("activation 'gpt_oss' is a gated unit: gated must be True")


def activate(h_SH: Tensor, activation: str, gated: bool) -> Tensor:
    """(S, H) -> (S, F). Gated: act(gate) · up, with the gate in the first half of the columns."""
    if activation == "gpt_oss":
        return gpt_oss_glu(h_SH)
    act, _ = POINTWISE[activation]
    if not gated:
        return act(h_SH)
    gate, up = h_SH.chunk(2, dim=-1)
    return act(gate) * up


def activate_backward(grad_SF: Tensor, h_SH: Tensor, activation: str, gated: bool) -> Tensor:
    """Gradient of `activate` with respect to h: (S, F) -> (S, H)."""
    if activation == "gpt_oss":
        return _gpt_oss_glu_backward(grad_SF, h_SH)
    act, backward = POINTWISE[activation]
    if not gated:
        return backward(grad_SF, h_SH)
    gate, up = h_SH.chunk(2, dim=-1)
    return torch.cat([backward(grad_SF * up, gate), grad_SF * act(gate)], dim=-1)
