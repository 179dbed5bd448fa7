"""A transformers model with its experts over two processes trains as in one."""

import pytest
import torch
from torch import nn

from shared_moe.errors import InputError
from shared_moe.parallel.transformers import spread_transformers

pytest.importorskip("transformers")

import hf_jobs


def test_qwen3_moe_trains_as_in_one_process(pair):
    model = hf_jobs.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=hf_jobs.tokens(), labels=hf_jobs.tokens()).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    answers = pair.run(hf_jobs.train, 3)
    for step, loss in enumerate(expected):
        assert sum(losses[step] for losses, _ in answers) / 2 == pytest.approx(loss, abs=1e-5)
    weights = answers[0][1]
    assert weights.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-4)


def test_a_model_without_experts_is_refused():
    with pytest.raises(InputError, match="no experts"):
        spread_transformers(nn.Linear(2, 2), None)
