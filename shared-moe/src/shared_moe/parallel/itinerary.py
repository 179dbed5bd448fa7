"""Which rows a rank sends where.

A token goes once to each rank that holds one of its experts, not once to each expert: with k = 8 on 4 ranks that is less
than half the traffic. Shapes: T tokens, K slots a token, R rows sent, E experts, W ranks, N the most replicas.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared_moe.ops.sort import positions, sort_by_expert
from shared_moe.parallel.placement import Placement


@dataclass(frozen=True)
class Itinerary:
    """token_R the token of each row, rows sorted by rank; position_TK where a token's rows lie, -1 for none;
    slots_RK the expert's slot on the receiving rank, -1 for experts elsewhere; sends_W rows for each rank."""

    token_R: Tensor
    position_TK: Tensor
    slots_RK: Tensor
    sends_W: list[int]


class Tables:
    """A placement as tensors. The n-th replica of expert e is slot slot_EN[e, n] of rank rank_EN[e, n]."""

    def __init__(self, placement: Placement, device: torch.device):
        most = max(map(len, placement.ranks))
        slot_of = [
            {e: slot for slot, e in enumerate(placement.experts_of(r))} for r in range(placement.world_size)
        ]
        rows = [(ranks + ranks[:1] * most)[:most] for ranks in placement.ranks]
        self.rank_EN = torch.tensor(rows, device=device)
        self.slot_EN = torch.tensor(
            [[slot_of[r][e] for r in row] for e, row in enumerate(rows)], device=device
        )
        self.replicas_E = torch.tensor([len(ranks) for ranks in placement.ranks], device=device)
        self.world_size = placement.world_size


def plan(expert_ids_TK: Tensor, tables: Tables, rank: int) -> Itinerary:
    """The way of each token. Each rank uses an expert's replicas in turn, beginning at another one than its neighbour.

    Raises `InputError` for an expert id out of range (on the CPU), `ShapeError` for ids that aren't int64 (T, K).
    """
    T, K = expert_ids_TK.shape
    E = tables.rank_EN.shape[0]
    order_S, counts_E = sort_by_expert(expert_ids_TK, E)
    id_S = expert_ids_TK.reshape(-1)[order_S]
    exists_S = (id_S >= 0) & (id_S < E)
    id_S = torch.where(exists_S, id_S, 0)
    turn_S = torch.arange(T * K, device=id_S.device) - (counts_E.cumsum(0) - counts_E)[id_S] + rank
    replica_S = turn_S % tables.replicas_E[id_S]
    rank_TK, slot_TK = torch.empty_like(expert_ids_TK).fill_(-1), torch.empty_like(expert_ids_TK).fill_(-1)
    rank_TK.view(-1)[order_S] = torch.where(exists_S, tables.rank_EN[id_S, replica_S], -1)
    slot_TK.view(-1)[order_S] = tables.slot_EN[id_S, replica_S]

    visit_TK = rank_TK.sort(dim=1).values
    repeated_TK = torch.zeros_like(visit_TK, dtype=torch.bool)
    repeated_TK[:, 1:] = visit_TK[:, 1:] == visit_TK[:, :-1]
    order_S, counts_W = sort_by_expert(torch.where(repeated_TK, -1, visit_TK), tables.world_size)
    sends_W = counts_W.tolist()
    token_R = order_S[: sum(sends_W)] // max(K, 1)
    to_R = torch.arange(tables.world_size, device=token_R.device).repeat_interleave(
        counts_W, output_size=token_R.shape[0]
    )
    slots_RK = torch.where(rank_TK[token_R] == to_R[:, None], slot_TK[token_R], -1)
    return Itinerary(token_R, positions(order_S, counts_W).view(T, K), slots_RK, sends_W)
