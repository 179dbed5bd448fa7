import math

import pytest
import torch

from shared_moe.errors import ShapeError
from shared_moe.losses import (
    dead_experts,
    load_balance,
    load_max_over_mean,
    orthogonality,
    specialisation,
    utilisation,
    z_loss,
)


def test_load_balance_is_k_when_even_and_more_when_not():
    ids = torch.arange(8).repeat(2).view(8, 2) % 8
    assert load_balance(torch.full((8, 8), 1 / 8), ids).item() == pytest.approx(2)
    one = torch.zeros(8, 1, dtype=torch.int64)
    probs = torch.nn.functional.one_hot(one[:, 0], 8).float()
    assert load_balance(probs, one).item() == pytest.approx(8)
    assert load_balance(torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int64)).item() == 0


def test_z_loss_by_hand():
    assert z_loss(torch.zeros(3, 4)).item() == pytest.approx(math.log(4) ** 2)
    assert z_loss(torch.zeros(0, 4)).item() == 0
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(z_loss, logits)


def test_orthogonality_limits():
    assert orthogonality(torch.eye(4)).item() == pytest.approx(0)
    assert orthogonality(torch.ones(4, 3)).item() == pytest.approx(1)
    assert orthogonality(torch.ones(1, 3)).item() == 0
    rows = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(orthogonality, rows)
    with pytest.raises(ShapeError):
        orthogonality(torch.ones(3))


def test_utilisation_limits():
    assert utilisation(torch.full((5, 4), 0.25)).item() == pytest.approx(1)
    one = torch.nn.functional.one_hot(torch.zeros(5, dtype=torch.int64), 4).float()
    assert utilisation(one).item() == pytest.approx(0, abs=1e-6)
    assert utilisation(torch.ones(5, 1)).item() == 1


def test_loads_and_dead_experts():
    ids = torch.tensor([[0, 1], [0, -1], [0, 4]])
    assert load_max_over_mean(ids, 4) == pytest.approx(3)
    assert dead_experts(ids, 4) == 2


def test_specialisation_limits():
    kinds = torch.tensor([0, 0, 1, 1])
    apart = torch.tensor([[0], [0], [1], [1]])
    assert specialisation(apart, kinds, 2) == pytest.approx(math.log(2))
    mixed = torch.tensor([[0], [1], [0], [1]])
    assert specialisation(mixed, kinds, 2) == pytest.approx(0)
    assert specialisation(torch.full((4, 1), -1), kinds, 2) == 0
    with pytest.raises(ShapeError):
        specialisation(apart, kinds[:3], 2)
