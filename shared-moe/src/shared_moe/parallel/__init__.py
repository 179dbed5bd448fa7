"""Expert parallelism over torch.distributed: each rank holds some experts, tokens travel to them and back."""

from shared_moe.parallel.dense import clip_grad_norm_, ddp, expert_parameters
from shared_moe.parallel.experts import ParallelExperts
from shared_moe.parallel.group import ExpertGroup
from shared_moe.parallel.moving import expert_load, move_experts
from shared_moe.parallel.placement import Placement
from shared_moe.parallel.state import full_state, load_full_state
from shared_moe.parallel.transformers import spread_transformers

__all__ = [
    "ExpertGroup",
    "ParallelExperts",
    "Placement",
    "clip_grad_norm_",
    "ddp",
    "expert_load",
    "expert_parameters",
    "full_state",
    "load_full_state",
    "move_experts",
    "spread_transformers",
]
