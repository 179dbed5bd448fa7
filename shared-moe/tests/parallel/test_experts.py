"""Experts spread over ranks answer, and get gradients, as in one process."""

import jobs
import pytest
import torch

from shared_moe.parallel import Placement

PLACEMENTS = {
    "even": None,
    "uneven": lambda W: Placement(tuple((min(e, W - 1),) for e in range(jobs.E)), W),
    "replicas": lambda W: Placement.balanced([9.0, 1, 5, 1, 1], W, 4),
    "everything everywhere": lambda W: Placement((tuple(range(W)),) * jobs.E, W),
}


def one_process(counts):
    moe = jobs.layer(bias=True)
    x_TD = torch.cat([jobs.tokens(rank, count) for rank, count in enumerate(counts)]).requires_grad_()
    y_TD, _ = moe(x_TD)
    (y_TD.square().sum() / sum(counts)).backward()
    experts = {name: p.grad for name, p in moe.experts.named_parameters()}
    return y_TD.detach().split(counts), x_TD.grad.split(counts), moe.router.weight.grad, experts


def check_equal(team, counts, placement, gradients):
    size = len(counts)
    placement = Placement.even(jobs.E, size) if placement is None else placement(size)
    y, grad_x, grad_router, grad_experts = one_process(counts)
    answers = team.run(jobs.forward_backward, counts, placement, gradients)
    for rank, (y_TD, grad_TD, router, experts) in enumerate(answers):
        torch.testing.assert_close(y_TD, y[rank])
        torch.testing.assert_close(grad_TD, grad_x[rank])
        torch.testing.assert_close(router, grad_router)
        for name, grad in experts.items():
            torch.testing.assert_close(grad, grad_experts[name][placement.experts_of(rank)])


@pytest.mark.parametrize("gradients", ["mean", "sum"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("counts", [(7, 12), (9, 0), (1, 64)])
def test_two_processes_equal_one(pair, counts, placement, gradients):
    check_equal(pair, list(counts), PLACEMENTS[placement], gradients)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("counts", [(7, 12, 3, 5), (0, 0, 11, 0)])
def test_four_processes_equal_one(four, counts, placement):
    check_equal(four, list(counts), PLACEMENTS[placement], "mean")
