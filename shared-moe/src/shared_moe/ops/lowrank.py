"""Low-rank experts on slots. Shapes: B batch, E experts, S slots an expert, H heads, P width in, R rank, Q width out."""

import torch
from torch import Tensor


def lowrank_experts(
    u_BHESP: Tensor, down: Tensor, down_bias: Tensor, up_EHRQ: Tensor, up_bias_EHQ: Tensor
) -> Tensor:
    """v = (u Φ + c) W + b, head by head: (B, H, E, S, P) -> (B, E, S, H, Q).

    down Φ is (H, P, R), shared by the experts, or (E, H, P, R); its bias c (H, R) or (E, H, R).
    """
    if down.dim() == 3:
        t = torch.einsum("bhesp,hpr->bhesr", u_BHESP, down) + down_bias[:, None, None]
    else:
        t = torch.einsum("bhesp,ehpr->bhesr", u_BHESP, down) + down_bias.transpose(0, 1)[:, :, None]
    return torch.einsum("bhesr,ehrq->beshq", t, up_EHRQ) + up_bias_EHQ[:, None]
