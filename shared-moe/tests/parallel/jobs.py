"""What the ranks of a team do. Shapes: T tokens, D width, F hidden width, E experts, K chosen."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared_moe.experts import FFNExperts
from shared_moe.layer import MoE
from shared_moe.parallel import ExpertGroup, ParallelExperts, Placement
from shared_moe.routing import TopKRouter

D, F, E, K = 6, 8, 5, 2


def layer(num_experts: int = E, dtype: torch.dtype = torch.float64, **options) -> MoE:
    g = torch.Generator().manual_seed(0)
    router = TopKRouter(D, num_experts, K, generator=g)
    nn.init.normal_(router.weight, generator=g)
    return MoE(router, FFNExperts(D, F, num_experts, generator=g, **options)).to(dtype)


def tokens(rank: int, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(100 + rank), dtype=dtype)


def parallel(moe: MoE, group: ExpertGroup, placement: Placement | None = None, **options) -> MoE:
    """The layer with its experts spread over the ranks."""
    return MoE(moe.router, ParallelExperts(moe.experts, group, placement, **options))


def forward_backward(counts: list[int], placement: Placement | None, gradients: str):
    """This rank's answers and gradients; the loss is the mean over all ranks' tokens."""
    group = ExpertGroup(timeout_s=20)
    moe = parallel(layer(bias=True), group, placement, gradients=gradients)
    x_TD = tokens(group.rank, counts[group.rank]).requires_grad_()
    y_TD, _ = moe(x_TD)
    loss = y_TD.square().sum() / sum(counts)
    (loss * group.size if gradients == "mean" else loss).backward()
    router = moe.router.weight.grad.clone()
    dist.all_reduce(router, op=dist.ReduceOp.SUM)
    if gradients == "mean":
        router /= group.size
        x_TD.grad /= group.size
    experts = {name: p.grad for name, p in moe.experts.local.named_parameters()}
    return y_TD.detach(), x_TD.grad, router, experts
