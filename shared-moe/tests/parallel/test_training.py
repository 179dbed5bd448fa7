"""Training under DDP and FSDP2, with experts that move, is training in one process."""

import jobs
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared_moe.parallel import Placement

STEPS = 4


@pytest.fixture(scope="module")
def one_process():
    return jobs.train_one_process(STEPS)


def check_weights(found, model):
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name])


def placements(size):
    return [
        Placement.even(jobs.E, size),
        Placement.balanced([9.0, 1, 5, 1, 1], size, 4),
        Placement.balanced([1.0, 1, 1, 1, 9], size, 2 if size == 4 else 3),
    ]


@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [2, 4])
def test_training_equals_one_process_while_experts_move(request, one_process, dense, size):
    team = request.getfixturevalue({2: "pair", 4: "four"}[size])
    model, expected_norms = one_process
    answers = team.run(jobs.train, dense, STEPS, placements(size))
    assert expected_norms[0] > jobs.MAX_NORM  # clipping is at work
    for norms, *_ in answers:
        assert norms == pytest.approx(expected_norms)
    check_weights(answers[0][3], model)
    assert all(not answer[3] and not answer[4] for answer in answers[1:])


def test_replicas_stay_equal_bit_by_bit(four):
    everywhere = Placement((tuple(range(4)),) * jobs.E, 4)
    answers = four.run(jobs.train, "ddp", STEPS, [everywhere])
    for _, _, local, _, _ in answers[1:]:
        for name, tensor in local.items():
            assert torch.equal(tensor, answers[0][2][name])


@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
def test_a_checkpoint_continues_at_another_world_size(pair, four, one_process, tmp_path, dense):
    answers = four.run(jobs.train, dense, 2, placements(4))
    weights, state = answers[0][3:]
    save_file(weights | state, tmp_path / "checkpoint.safetensors")
    loaded = load_file(tmp_path / "checkpoint.safetensors")
    weights = {name: tensor for name, tensor in loaded.items() if "/" not in name}
    state = {name: tensor for name, tensor in loaded.items() if "/" in name}
    resumed = pair.run(jobs.resume, dense, 2, STEPS - 2, weights, state)
    check_weights(resumed[0], one_process[0])

    alone = jobs.Block(jobs.layer())
    alone.load_state_dict(weights)
    torch.testing.assert_close(alone.state_dict(), jobs.train_one_process(2)[0].state_dict())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "missing moe.experts.local.down_proj"),
        ("as many experts as this rank has", "the model has (5, 6, 8)"),
        ("unknown name", "unknown moe.experts.nothing"),
        ("unknown state", "holds 'moe.nothing/exp_avg', but the optimizer has no such parameter"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(pair, damage, words):
    for message in pair.run(jobs.load_damaged, damage):
        assert words in message
