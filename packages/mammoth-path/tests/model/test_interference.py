import pytest
import torch

from mammoth_path.interference import interference, linear_interference, mammoth_interference
from mammoth_path.model import Mammoth


def gram(vectors):
    v = torch.tensor(vectors, dtype=torch.float64)
    return v @ v.t()


def test_limits():
    agree = interference(gram([[1, 0], [2, 0], [0.5, 0]]))
    assert (agree.conflict_rate, agree.cancellation) == pytest.approx((0, 0))
    opposed = interference(gram([[1, 0], [-1, 0]]))
    assert (opposed.conflict_rate, opposed.cancellation) == pytest.approx((1, 1))
    unrelated = interference(gram([[1, 0], [0, 1]]))
    assert (unrelated.conflict_rate, unrelated.cancellation) == pytest.approx((0, 1 - 2**0.5 / 2))


def test_class_cosines():
    found = interference(gram([[1, 0], [2, 0], [-1, 0], [-3, 0]]), torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close(found.class_cosines, torch.tensor([[1.0, -1], [-1, 1]], dtype=torch.float64))


def test_linear_measures_equal_those_of_the_full_gradients():
    linear = torch.nn.Linear(5, 4).double()
    x = torch.randn(6, 5, dtype=torch.float64)

    def loss(pre):
        return pre.relu().mean(0).square().sum()

    per_patch = []
    for i in range(6):
        pre = linear(x).detach().requires_grad_()
        (delta,) = torch.autograd.grad(loss(pre), pre)
        per_patch.append(torch.outer(delta[i], x[i]).flatten())
    full = torch.stack(per_patch)
    expected, found = interference(full @ full.t()), linear_interference(linear, x, loss)
    assert found.conflict_rate == pytest.approx(expected.conflict_rate)
    assert found.cancellation == pytest.approx(expected.cancellation)


def test_one_answer_an_expert():
    model = Mammoth(10, 32, num_experts=3, num_slots=2, num_heads=4, slot_dim=16, rank=3).double().eval()
    found = mammoth_interference(model, torch.randn(8, 10).double(), lambda y: y.square().sum())
    assert len(found) == 3
    assert all(0 <= f.conflict_rate <= 1 and 0 <= f.cancellation <= 1 for f in found)
