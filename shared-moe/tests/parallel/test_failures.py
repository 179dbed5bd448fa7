"""A rank that dies, is late or differs gives a ParallelError that names it, in time."""

import failing_jobs
import jobs
import pytest
from team import Team
from torch import nn

from shared_moe.errors import InputError, ParallelError
from shared_moe.experts import FFNExperts
from shared_moe.parallel import ExpertGroup, Placement, expert_parameters
from shared_moe.parallel.group import GRACE_S

SLACK_S = 15  # two cores for all ranks, and whatever else runs
LATEST_S = failing_jobs.TIMEOUT_S + GRACE_S + SLACK_S


@pytest.mark.parametrize(
    ("size", "rank", "where"), [(2, 1, "forward"), (4, 2, "backward"), (4, 0, "forward")]
)
def test_a_rank_that_dies_is_named_in_time(size, rank, where):
    with Team(size) as team:
        answers = team.answers(failing_jobs.die, rank, where)
    assert answers.pop(rank) is None
    for message, seconds, again in answers:
        assert f"no word from rank {rank}, dead or more than 3 s late" in message
        assert seconds < LATEST_S
        assert again.startswith("the expert group is closed since an earlier failure: ")
        assert message in again


def test_a_rank_that_is_late_is_named_in_time():
    with Team(4) as team:
        answers = team.run(failing_jobs.dawdle, 3)
    assert answers.pop() is None
    for message, seconds in answers:
        assert "no word from rank 3" in message
        assert failing_jobs.TIMEOUT_S * 0.9 < seconds < LATEST_S


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("experts", "experts (5 on ranks 0, 2, 3, 6 on rank 1)"),
        ("hidden width", "shapes ("),
        ("placement", "placement ("),
        ("gradients", "gradients (mean on ranks 0, 2, 3, sum on rank 1)"),
        ("top_k", "top_k (2 on ranks 0, 2, 3, 3 on rank 1)"),
        ("width", "width (6 on ranks 0, 2, 3, 7 on rank 1)"),
        ("dtype", "torch.float64 on rank 1)"),
        ("step", "operation (forward on ranks 0, 2, 3, clip gradients on rank 1)"),
        ("layer", "layer (0 on ranks 0, 2, 3, 1 on rank 1)"),
        ("no_grad", "gradients on (True on ranks 0, 2, 3, False on rank 1)"),
        ("frozen", "trainable ("),
        ("move", "placement ("),
    ],
)
def test_ranks_that_disagree_are_named(four, subject, words):
    for message in four.run(failing_jobs.disagree, subject):
        assert message.startswith("ParallelError: ranks disagree about ")
        assert words in message


def test_bad_input_on_one_rank_stops_the_others_at_once(four):
    told = four.run(failing_jobs.disagree, "ids")
    assert told[1].startswith("InputError: expert_ids holds 99")
    for message in (told[0], told[2], told[3]):
        assert message.startswith("ParallelError: rank 1 gave up: InputError: expert_ids holds 99")


def test_arguments_that_every_rank_got_wrong(pair):
    four_ranks = Placement.even(jobs.E, 4)
    for message in pair.run(failing_jobs.refuse, four_ranks, "mean"):
        assert "placement is for 5 experts on 4 ranks; there are 5 on 2" in message
    for message in pair.run(failing_jobs.refuse, None, "average"):
        assert "it can be 'mean' or 'sum'" in message


def test_without_torch_distributed():
    with pytest.raises(ParallelError, match="torchrun"):
        ExpertGroup()
    with pytest.raises(InputError, match="no ParallelExperts"):
        expert_parameters(nn.Sequential(FFNExperts(2, 2, 2)))
