"""The same answers with rows over NCCL, one GPU a rank, as over gloo, and as in one process."""

import jobs
import pytest
import torch
from team import Team


def check(answers):
    moe = jobs.layer(dtype=torch.float32)
    for rank, (y_TD, _) in enumerate(answers):
        expected_TD, _ = moe(jobs.tokens(rank, 9, torch.float32))
        expected_TD.square().sum().backward()
        torch.testing.assert_close(y_TD, expected_TD.detach(), rtol=1e-3, atol=1e-3)
    for _, grads in answers:
        for name, grad in grads.items():
            expected = moe.experts.get_parameter(name).grad
            assert (grad - expected).norm() < 1e-3 * expected.norm()


def test_gloo(pair):
    check(pair.run(jobs.answers_and_gradients_on, "cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: rows went over gloo only")
def test_nccl():
    with Team(min(torch.cuda.device_count(), 4), "nccl") as team:
        check(team.run(jobs.answers_and_gradients_on, "cuda"))
