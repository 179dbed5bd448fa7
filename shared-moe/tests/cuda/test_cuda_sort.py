"""The counting sort, its kernels emulated on the CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_moe.ops.cuda.sort import BLOCK_ROWS, num_blocks, sort
from shared_moe.ops.sort import MOST_EXPERTS, sort_by_expert


def same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2500), st.integers(1, 1024), st.integers(0, 2**31))
def test_it_is_the_stable_sort(emulator, S, E, seed):
    ids = torch.randint(-1, E + 1, (S, 1), generator=torch.Generator().manual_seed(seed))
    same(sort(ids, E), sort_by_expert(ids, E))


@pytest.mark.parametrize("where", ["all to one", "nowhere", "ascending", "descending"])
def test_skewed_ids(emulator, where, walls):
    S, E = 2 * BLOCK_ROWS + 17, MOST_EXPERTS
    ids = {
        "all to one": torch.full((S, 1), E - 1),
        "nowhere": torch.full((S, 1), -1),
        "ascending": torch.arange(S)[:, None] * E // S,
        "descending": (E - 1 - torch.arange(S) * E // S)[:, None],
    }[where]
    same(emulator.orders(lambda: sort(ids, E)), sort_by_expert(ids, E))


def test_ids_far_out_of_range_count_as_none(emulator):
    ids = torch.tensor([[2**40, 1], [-(2**40), 0]])
    order, counts = sort(ids, 2)
    assert order.tolist() == [3, 1, 0, 2]
    assert counts.tolist() == [1, 1]


def test_sizes_past_2_to_the_31():
    assert (
        num_blocks(2**33 + 5) == 2**33 // BLOCK_ROWS + 1
    )  # that a block's offsets are right there, the header asserts
