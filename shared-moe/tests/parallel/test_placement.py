"""Which ranks hold which experts, and which rows go where: no processes needed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared_moe.errors import InputError, ShapeError
from shared_moe.parallel import Placement
from shared_moe.parallel.itinerary import Tables, plan


@pytest.mark.parametrize(("num_experts", "size"), [(8, 4), (5, 2), (7, 3), (3, 3), (1, 1), (2, 5), (1, 4)])
def test_even_spreads_experts_evenly(num_experts, size):
    placement = Placement.even(num_experts, size)
    counts = [len(placement.experts_of(r)) for r in range(size)]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == max(num_experts, size)
    assert sorted(e for r in range(size) for e in set(placement.experts_of(r))) == sorted(
        e for e, ranks in enumerate(placement.ranks) for _ in ranks
    )


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=24),
    st.integers(1, 8),
    st.integers(0, 4),
)
def test_balanced_keeps_to_the_slots_and_places_every_expert(loads, size, spare):
    slots = -(-len(loads) // size) + spare
    placement = Placement.balanced(loads, size, slots)
    assert placement.num_experts == len(loads)
    for rank in range(size):
        assert 1 <= len(placement.experts_of(rank)) <= slots
    assert sum(len(placement.owned_slots(r)) for r in range(size)) == len(loads)
    assert placement == Placement.balanced(torch.tensor(loads, dtype=torch.float64), size, slots)


def test_balanced_replicates_the_hot_and_evens_out_the_load():
    loads = [80.0, 10, 10, 10, 10, 10, 10, 20]
    placement = Placement.balanced(loads, 4, 3)
    assert len(placement.ranks[0]) == 4
    share = [load / len(ranks) for load, ranks in zip(loads, placement.ranks, strict=True)]
    carried = [sum(share[e] for e in placement.experts_of(r)) for r in range(4)]
    assert carried == [40.0] * 4
    alone = Placement.balanced(loads, 4, 2)
    assert all(len(ranks) == 1 for ranks in alone.ranks)


def test_bad_placements_are_refused():
    for ranks, words in [
        (((0,), ()), "expert 1 is placed on"),
        (((1, 0), (1,)), "ascending"),
        (((0, 0), (1,)), "ascending"),
        (((0,), (2,)), "there are ranks 0 to 1"),
        (((0,), (0,)), r"ranks \[1\] hold no expert"),
        ((), "at least one each"),
    ]:
        with pytest.raises(InputError, match=words):
            Placement(ranks, 2)
    with pytest.raises(InputError, match="at least one each"):
        Placement.even(0, 2)
    with pytest.raises(InputError, match="finite and not negative"):
        Placement.balanced([1.0, -1.0], 2)
    with pytest.raises(InputError, match="finite and not negative"):
        Placement.balanced([1.0, float("nan")], 2)
    with pytest.raises(InputError, match="cannot hold 5 experts"):
        Placement.balanced([1.0] * 5, 2, 2)


def random_ids(num_experts, T, K):
    ids_TK = torch.stack([torch.randperm(num_experts)[:K] for _ in range(T)])
    return torch.where(torch.rand(T, K) < 0.2, -1, ids_TK)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_row_goes_once_to_each_rank_with_an_expert_of_its_token(rank):
    placement = Placement.balanced([9.0, 1, 5, 1, 1, 4], 3, 3)
    ids_TK = random_ids(6, 40, 3)
    way = plan(ids_TK, Tables(placement, torch.device("cpu")), rank)
    rows = [r for r, count in enumerate(way.sends_W) for _ in range(count)]
    assert len(set(zip(rows, way.token_R.tolist(), strict=True))) == len(rows)
    reached = [[] for _ in range(40)]
    for row, (r, t) in enumerate(zip(rows, way.token_R.tolist(), strict=True)):
        here = placement.experts_of(r)
        found = [(k, here[slot]) for k, slot in enumerate(way.slots_RK[row].tolist()) if slot >= 0]
        assert found
        assert row in way.position_TK[t].tolist()
        reached[t] += found
    for t in range(40):
        assert sorted(reached[t]) == [(k, e) for k, e in enumerate(ids_TK[t].tolist()) if e >= 0]
        assert sorted(p for p in way.position_TK[t].tolist() if p >= 0) == [
            row for row, token in enumerate(way.token_R.tolist()) if token == t
        ]


def test_replicas_get_equal_shares_over_ranks():
    placement = Placement(((0, 1, 2), (0,), (1,)), 3)
    tables = Tables(placement, torch.device("cpu"))
    ids_TK = torch.zeros(8, 1, dtype=torch.int64)
    sends = torch.tensor([plan(ids_TK, tables, rank).sends_W for rank in range(3)])
    assert (sends.amax(1) - sends.amin(1)).max() <= 1
    assert sends.sum(0).tolist() == [8, 8, 8]


def test_no_tokens_and_bad_ids():
    tables = Tables(Placement.even(4, 2), torch.device("cpu"))
    way = plan(torch.empty(0, 2, dtype=torch.int64), tables, 0)
    assert way.sends_W == [0, 0]
    assert way.slots_RK.shape == (0, 2)
    dropped = plan(torch.tensor([[-1, 4], [0, -1]]), tables, 0)
    assert dropped.sends_W == [1, 0]
    with pytest.raises(InputError, match="holds 5"):
        plan(torch.tensor([[5]]), tables, 0)
    with pytest.raises(ShapeError, match="int64"):
        plan(torch.tensor([[1.0]]), tables, 0)
