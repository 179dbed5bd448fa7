"""Experts spread over ranks answer, and get gradients, as in one process."""

import jobs
import pytest
import torch

from shared_moe.parallel import Placement

PLACEMENTS = {
    "even": None,
    "uneven": lambda W: Placement(tuple((min(e, W - 1),) for e in range(jobs.E)), W),
    "replicas": lambda W: Placement.balanced([9.0, 1, 5, 1, 1], W, 4),
    "replicas on two ranks": lambda W: Placement(((0, 1), (W - 1,), (W // 2,), (0,), (1,)), W),
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


@pytest.mark.parametrize("kind", jobs.EXPERTS)
def test_any_experts_and_dropped_slots(pair, kind):
    experts = jobs.experts_of_kind(kind)
    for rank, y_TO in enumerate(pair.run(jobs.answer_assigned, kind, 12)):
        expected_TO = experts(jobs.tokens(rank, 12), jobs.assigned(rank, 12))
        torch.testing.assert_close(y_TO, expected_TO.detach())


@pytest.mark.parametrize(
    "way", ["checkpointed", "compiled", "accumulated", "input without gradient on one rank"]
)
def test_other_ways_to_the_same_gradients(pair, way):
    plain = pair.run(jobs.gradients, "plain")
    for expected, found in zip(plain, pair.run(jobs.gradients, way), strict=True):
        assert expected.keys() == found.keys()
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name])


def test_frozen_weights_get_no_gradient_and_the_others_theirs(pair):
    plain = pair.run(jobs.gradients, "plain")
    for expected, found in zip(plain, pair.run(jobs.gradients, "half frozen"), strict=True):
        assert expected.keys() - found.keys() == {"experts.local.down_proj"}
        for name, grad in found.items():
            assert torch.equal(grad, expected[name])


def test_bitwise_repeatable(four):
    once, again = (four.run(jobs.gradients, "plain") for _ in range(2))
    for a, b in zip(once, again, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_inference(pair):
    moe = jobs.layer(dtype=torch.float32)
    for rank, y_TD in enumerate(pair.run(jobs.answers_under, None)):
        with torch.no_grad():
            torch.testing.assert_close(y_TD, moe(jobs.tokens(rank, 9, torch.float32))[0])


def test_autocast_is_as_exact_as_in_one_process(pair):
    moe = jobs.layer(dtype=torch.float32)
    for rank, y_TD in enumerate(pair.run(jobs.answers_under, torch.bfloat16)):
        x_TD = jobs.tokens(rank, 9, torch.float32)
        with torch.no_grad():
            exact_TD, _ = moe(x_TD)
            with torch.autocast("cpu", torch.bfloat16):
                alone_TD, _ = moe(x_TD)
        assert y_TD.dtype == alone_TD.dtype == torch.bfloat16
        assert (y_TD - exact_TD).norm() < 1.5 * (alone_TD - exact_TD).norm() < 0.05 * exact_TD.norm()


def test_moving_changes_no_answer(four):
    for before, moved, back in four.run(jobs.move_twice):
        torch.testing.assert_close(moved, before)
        assert torch.equal(back, before)


def test_load_is_that_of_all_ranks(four):
    ids = torch.cat([jobs.assigned(rank, 10 + rank).expert_ids_TK.flatten() for rank in range(4)])
    expected_E = torch.bincount(ids[(ids >= 0) & (ids < jobs.E)], minlength=jobs.E)
    for load_E in four.run(jobs.load_over_ranks):
        assert torch.equal(load_E, expected_E)


def test_replicas_begin_equal_whatever_the_seeds(four):
    placement = Placement(((0, 1, 2, 3), (1,), (1, 3), (0,), (2, 3)), 4)
    answers = four.run(jobs.weights_of_unlike_ranks, placement)
    for rank, (_, after) in enumerate(answers):
        for slot, e in enumerate(placement.experts_of(rank)):
            owner = placement.ranks[e][0]
            for name, tensor in after.items():
                assert torch.equal(tensor[slot], answers[owner][0][name][e])


def test_built_without_memory_then_loaded(pair):
    moe = jobs.layer()
    for rank, y_TD in enumerate(pair.run(jobs.build_on_meta)):
        torch.testing.assert_close(y_TD, moe(jobs.tokens(rank, 9))[0].detach())
