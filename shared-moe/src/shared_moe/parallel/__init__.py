"""Expert parallelism over torch.distributed: each rank holds some experts, tokens travel to them and back."""

from shared_moe.parallel.experts import ParallelExperts
from shared_moe.parallel.group import ExpertGroup
from shared_moe.parallel.placement import Placement

__all__ = ["ExpertGroup", "ParallelExperts", "Placement"]
