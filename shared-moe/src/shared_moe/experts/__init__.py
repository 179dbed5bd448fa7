"""Expert networks: grouped weights, low-rank factors, adapters."""

from shared_moe.experts.adapters import AdapterExperts, LoRAExperts
from shared_moe.experts.ffn import FFNExperts
from shared_moe.experts.int8 import Int8Experts
from shared_moe.experts.lowrank import LowRankExperts

__all__ = ["AdapterExperts", "FFNExperts", "Int8Experts", "LoRAExperts", "LowRankExperts"]
