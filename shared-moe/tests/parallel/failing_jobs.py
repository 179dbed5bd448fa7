"""Ranks that die, dawdle or do something else than the others."""

import os
import time
from collections.abc import Callable

import jobs
import torch
from torch import Tensor

from shared_moe.errors import ParallelError
from shared_moe.experts import FFNExperts
from shared_moe.layer import MoE
from shared_moe.parallel import ExpertGroup, ParallelExperts, Placement, clip_grad_norm_, move_experts
from shared_moe.routing import Routing, TopKRouter

TIMEOUT_S = 3.0


def _told(attempt: Callable[[], object]) -> tuple[str, float]:
    """The message of the ParallelError that `attempt` ends with, and after how many seconds it came."""
    started = time.monotonic()
    try:
        attempt()
    except ParallelError as e:
        return str(e), time.monotonic() - started
    raise AssertionError("nothing was noticed")


def _train_until_failure(moe: MoE, rank: int) -> None:
    for step in range(100):
        moe(jobs.tokens(rank + step, 5))[0].sum().backward()


def die(rank: int, where: str):
    """`rank` leaves without a word, in its third forward or backward pass."""
    group = ExpertGroup(TIMEOUT_S)
    moe = jobs.parallel(jobs.layer(), group)
    if group.rank == rank:
        for _ in range(2):
            moe(jobs.tokens(rank, 5))[0].sum().backward()
        if where == "backward":
            y_TD, _ = moe(jobs.tokens(rank, 5))
            y_TD.register_hook(lambda _: os._exit(1))
            y_TD.sum().backward()
        os._exit(1)
    first = _told(lambda: _train_until_failure(moe, group.rank))
    again, _ = _told(lambda: moe(jobs.tokens(group.rank, 5)))
    return *first, again


def dawdle(rank: int):
    group = ExpertGroup(TIMEOUT_S)
    moe = jobs.parallel(jobs.layer(), group)
    if group.rank == rank:
        time.sleep(TIMEOUT_S + 6)
        return None
    time.sleep(1.2 * group.rank)  # the others are not in step either
    return _told(lambda: _train_until_failure(moe, group.rank))


def _layer_of(group: ExpertGroup, num_experts: int = jobs.E, top_k: int = jobs.K, **options) -> MoE:
    experts = FFNExperts(jobs.D, options.pop("hidden", jobs.F), num_experts)
    return MoE(TopKRouter(jobs.D, num_experts, top_k), ParallelExperts(experts, group, **options))


def disagree(subject: str) -> str:
    """Rank 1 differs in one thing; returns what this rank is told."""
    group = ExpertGroup(TIMEOUT_S)
    odd = group.rank == 1
    x_TD = torch.randn(4, jobs.D)
    everywhere = Placement((tuple(range(group.size)),) * jobs.E, group.size)

    def forward(moe: MoE) -> None:
        moe(x_TD)

    def another_width() -> None:
        moe = _layer_of(group)
        moe.experts(torch.randn(4, jobs.D + odd), moe.router(x_TD))

    def another_dtype() -> None:
        moe = _layer_of(group).to(torch.float64 if odd else torch.float32)
        moe(x_TD.to(moe.router.weight.dtype))

    def ids_out_of_range() -> None:
        moe = _layer_of(group)
        if odd:
            moe.router.register_forward_hook(lambda *_: _out_of_range(x_TD))
        forward(moe)

    def another_step() -> None:
        moe = _layer_of(group)
        clip_grad_norm_(moe, 1.0) if odd else forward(moe)

    def another_layer() -> None:
        layers = [_layer_of(group), _layer_of(group)]
        forward(layers[odd])

    def no_grad() -> None:
        moe = _layer_of(group)
        with torch.set_grad_enabled(not odd):
            forward(moe)

    def frozen() -> None:
        moe = _layer_of(group)
        moe.experts.local.down_proj.requires_grad_(not odd)
        forward(moe)

    def another_move() -> None:
        placement = everywhere if odd else Placement.even(jobs.E, group.size)
        move_experts(_layer_of(group).experts, placement)

    attempts = {
        "experts": lambda: _layer_of(group, jobs.E + odd),
        "hidden width": lambda: _layer_of(group, hidden=jobs.F + odd),
        "placement": lambda: _layer_of(group, placement=everywhere if odd else None),
        "gradients": lambda: _layer_of(group, gradients="sum" if odd else "mean"),
        "top_k": lambda: forward(_layer_of(group, top_k=jobs.K + odd)),
        "width": another_width,
        "dtype": another_dtype,
        "ids": ids_out_of_range,
        "step": another_step,
        "layer": another_layer,
        "no_grad": no_grad,
        "frozen": frozen,
        "move": another_move,
    }
    try:
        attempts[subject]()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    raise AssertionError("nothing was noticed")


def _out_of_range(x_TD: Tensor) -> Routing:
    blank_TE = torch.zeros(len(x_TD), jobs.E)
    return Routing(torch.full((len(x_TD), jobs.K), 99), torch.ones(len(x_TD), jobs.K), blank_TE, blank_TE)


def refuse(placement: Placement | None, gradients: str) -> str:
    group = ExpertGroup(TIMEOUT_S)
    try:
        ParallelExperts(FFNExperts(jobs.D, jobs.F, jobs.E), group, placement, gradients=gradients)
    except ValueError as e:
        return str(e)
    raise AssertionError("nothing was noticed")
