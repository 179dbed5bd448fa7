"""What the ranks of a team do. Shapes: T tokens, D width, F hidden width, E experts, K chosen."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from shared_moe.errors import UnreadableError
from shared_moe.experts import FFNExperts, LoRAExperts
from shared_moe.layer import MoE
from shared_moe.parallel import (
    ExpertGroup,
    ParallelExperts,
    Placement,
    clip_grad_norm_,
    ddp,
    expert_load,
    expert_parameters,
    full_state,
    load_full_state,
    move_experts,
)
from shared_moe.parallel.dense import parallel_layers
from shared_moe.routing import Routing, TopKRouter

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


COUNTS = (7, 0, 12, 5)
"""Tokens of each of up to four ranks."""
LR, MAX_NORM = 0.1, 0.05


class Block(nn.Module):
    """A dense part with its own parameters, and experts behind it."""

    def __init__(self, moe: MoE):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.inner = nn.Linear(D, D, dtype=torch.float64)
        nn.init.normal_(self.inner.weight, generator=g)
        nn.init.normal_(self.inner.bias, generator=g)
        self.moe = moe

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.moe(self.inner(x_TD))[0]


def batch(step: int, rank: int, size: int) -> Tensor:
    """A rank's tokens: the four ranks' share at this step is dealt to `size` ranks, as consecutive fours."""
    ranks = range(rank * 4 // size, (rank + 1) * 4 // size)
    return torch.cat([tokens(10 * step + r, COUNTS[(r + step) % 4]) for r in ranks])


def mean_loss(y_TD: Tensor, size: int) -> Tensor:
    """Whose average over ranks is the mean over all ranks' tokens."""
    return y_TD.square().sum() * size / sum(COUNTS)


def train_one_process(steps: int) -> tuple[Block, list[float]]:
    model = Block(layer())
    optimizer = torch.optim.Adam(model.parameters(), LR)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        mean_loss(model(batch(step, 0, 1)), 1).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return model, norms


def prepare(dense: str, placement: Placement | None) -> tuple[nn.Module, torch.optim.Optimizer, ExpertGroup]:
    """The model with spread-out experts under DDP or FSDP2, and its optimizer."""
    group = ExpertGroup(timeout_s=20)
    model: nn.Module = Block(parallel(layer(), group, placement))
    if dense == "ddp":
        model = ddp(model)
    else:
        mesh = init_device_mesh("cpu", (group.size,))
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=expert_parameters(model))
    return model, torch.optim.Adam(model.parameters(), LR), group


def step_(model: nn.Module, optimizer: torch.optim.Optimizer, group: ExpertGroup, step: int) -> float:
    optimizer.zero_grad()
    mean_loss(model(batch(step, group.rank, group.size)), group.size).backward()
    norm = clip_grad_norm_(model, MAX_NORM).item()
    optimizer.step()
    return norm


def train(dense: str, steps: int, placements: list[Placement]):
    """Train, moving to the next placement after each step; returns norms, local experts and the whole checkpoint."""
    model, optimizer, group = prepare(dense, placements[0])
    (experts,) = parallel_layers(model).values()
    norms = []
    for step in range(steps):
        norms.append(step_(model, optimizer, group, step))
        move_experts(experts, placements[(step + 1) % len(placements)], optimizer)
    local = {name: p.detach().clone() for name, p in experts.local.named_parameters()}
    return norms, experts.placement, local, full_state(model), full_state(model, optimizer)


def resume(dense: str, first: int, steps: int, weights: dict[str, Tensor], state: dict[str, Tensor]):
    model, optimizer, group = prepare(dense, None)
    load_full_state(model, weights)
    load_full_state(model, state, optimizer)
    for step in range(first, first + steps):
        step_(model, optimizer, group, step)
    return full_state(model)


EXPERTS = {
    "gelu with bias": lambda g: FFNExperts(D, F, E, gated=False, activation="gelu", bias=True, generator=g),
    "other width": lambda g: FFNExperts(D, F, E, out_dim=3, generator=g),
    "lora": lambda g: LoRAExperts(D, 2, E, alpha=4.0, generator=g),
}


def assigned(rank: int, count: int) -> Routing:
    """Routing with dropped slots: -1 and E both mean no expert."""
    g = torch.Generator().manual_seed(200 + rank)
    ids_TK = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(count)]).view(count, K)
    ids_TK[::3, 0], ids_TK[::4, 1] = -1, E
    weights_TK = torch.rand(count, K, generator=g, dtype=torch.float64)
    blank_TE = weights_TK.new_zeros(count, E)
    return Routing(ids_TK, weights_TK, blank_TE, blank_TE)


def experts_of_kind(kind: str) -> nn.Module:
    g = torch.Generator().manual_seed(2)
    experts = EXPERTS[kind](g).double()
    nn.init.normal_(experts.down_proj, generator=g)
    return experts


def answer_assigned(kind: str, count: int) -> Tensor:
    group = ExpertGroup(timeout_s=20)
    experts = ParallelExperts(experts_of_kind(kind), group)
    return experts(tokens(group.rank, count), assigned(group.rank, count)).detach()


def gradients(way: str) -> dict[str, Tensor]:
    """The gradients of this rank's experts and of the router by one of several ways to the same answers."""
    group = ExpertGroup(timeout_s=20)
    placement = Placement.balanced([9.0, 1, 5, 1, 1], group.size, 4)
    moe = parallel(layer(), group, placement)
    x_TD = tokens(group.rank, 12)
    if way == "half frozen":
        moe.experts.local.down_proj.requires_grad_(False)
    if way == "input without gradient on one rank":
        x_TD.requires_grad_(group.rank == 0)
    run: Callable[[Tensor], Tensor] = lambda x_TD: moe(x_TD)[0]  # noqa: E731
    if way == "compiled":
        run = torch.compile(run, backend="eager")
    if way == "checkpointed":
        plain = run
        run = lambda x_TD: checkpoint(plain, x_TD, use_reentrant=False)  # noqa: E731
    parts = x_TD.split([5, 7]) if way == "accumulated" else [x_TD]
    for part_TD in parts:
        run(part_TD).square().sum().backward()
    return {name: p.grad for name, p in moe.named_parameters() if p.grad is not None}


def answers_under(dtype: torch.dtype | None) -> Tensor:
    """Without gradients; in half precision under autocast if `dtype` is given."""
    group = ExpertGroup(timeout_s=20)
    moe = parallel(layer(dtype=torch.float32), group)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
        return moe(tokens(group.rank, 9, torch.float32))[0]


def load_over_ranks() -> Tensor:
    group = ExpertGroup(timeout_s=20)
    return expert_load(assigned(group.rank, 10 + group.rank), group)


def move_twice() -> list[Tensor]:
    """The answers before and after the experts moved, and moved back."""
    group = ExpertGroup(timeout_s=20)
    moe = parallel(layer(), group)
    home = moe.experts.placement
    x_TD = tokens(group.rank, 9)
    answers = [copy.deepcopy(moe)(x_TD)[0].detach()]
    for placement in (Placement.balanced([9.0, 1, 5, 1, 1], group.size, 4), home):
        move_experts(moe.experts, placement)
        answers.append(moe(x_TD)[0].detach())
    return answers


def weights_of_unlike_ranks(placement: Placement) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Experts initialised by another seed on each rank: what this rank had, and what it has now."""
    group = ExpertGroup(timeout_s=20)
    experts = FFNExperts(D, F, E, generator=torch.Generator().manual_seed(group.rank))
    before = {name: p.detach().clone() for name, p in experts.named_parameters()}
    ParallelExperts(experts, group, placement)
    return before, {name: p.detach().clone() for name, p in experts.named_parameters()}


def build_on_meta() -> Tensor:
    """The answers of experts that were built without memory and loaded from a checkpoint."""
    group = ExpertGroup(timeout_s=20)
    with torch.device("meta"):
        empty = layer()
    moe = parallel(empty, group, Placement.balanced([9.0, 1, 5, 1, 1], group.size, 4)).to_empty(device="cpu")
    load_full_state(moe, layer().state_dict())
    return moe(tokens(group.rank, 9))[0].detach()


def load_damaged(damage: str) -> str:
    """What this rank is told of a checkpoint that doesn't fit."""
    model, optimizer, _ = prepare("fsdp", None)
    weights = Block(layer()).state_dict()
    if damage == "unknown state":
        attempt = lambda: load_full_state(model, {"moe.nothing/exp_avg": torch.ones(2)}, optimizer)  # noqa: E731
    else:
        name = "moe.experts.down_proj"
        tensor = weights.pop(name)
        if damage == "as many experts as this rank has":
            weights[name] = tensor[: dict(model.named_parameters())["moe.experts.local.down_proj"].shape[0]]
        if damage == "unknown name":
            weights |= {name: tensor, "moe.experts.nothing": tensor}
        attempt = lambda: load_full_state(model, weights)  # noqa: E731
    try:
        attempt()
    except UnreadableError as e:
        return str(e)
    raise AssertionError("nothing was noticed")


def answers_and_gradients_on(device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Answers and gradients of the experts of this rank, of which each rank has all, in float32."""
    group = ExpertGroup(timeout_s=40)
    moe = layer(dtype=torch.float32).to(device)
    everywhere = Placement((tuple(range(group.size)),) * E, group.size)
    moe = parallel(moe, group, everywhere, gradients="sum")
    y_TD, _ = moe(tokens(group.rank, 9, torch.float32).to(device))
    y_TD.square().sum().backward()
    return y_TD.detach().cpu(), {name: p.grad.cpu() for name, p in moe.experts.local.named_parameters()}
