import pytest
import torch

from shared_moe.errors import InputError
from shared_moe.experts import LowRankExperts


@pytest.mark.parametrize("share", [True, False])
def test_each_slot_by_hand(share):
    experts = LowRankExperts(3, 2, 4, 5, 2, share_factors=share).double()
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_(generator=torch.Generator().manual_seed(0))
    u = torch.randn(2, 2, 3, 6, 4, dtype=torch.float64)
    v = experts(u)
    assert v.shape == (2, 3, 6, 2, 5)
    for e in range(3):
        for h in range(2):
            down = experts.down[h] if share else experts.down[e, h]
            bias = experts.down_bias[h] if share else experts.down_bias[e, h]
            expected = (u[:, h, e] @ down + bias) @ experts.up[e, h] + experts.up_bias[e, h]
            torch.testing.assert_close(v[:, e, :, h], expected)


def test_gradcheck():
    experts = LowRankExperts(2, 2, 3, 3, 2).double()
    u = torch.randn(1, 2, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    names = [n for n, _ in experts.named_parameters()]

    def run(u, *values):
        return torch.func.functional_call(experts, dict(zip(names, values, strict=True)), (u,))

    assert torch.autograd.gradcheck(
        run, (u, *(p.detach().clone().requires_grad_() for p in experts.parameters()))
    )


def test_rank_is_at_least_one():
    with pytest.raises(InputError, match="rank is 0"):
        LowRankExperts(2, 2, 3, 3, 0)
