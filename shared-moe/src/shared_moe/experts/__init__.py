"""Expert networks: grouped weights, low-rank factors, adapters."""

from shared_moe.experts.adapters import AdapterExperts, LoRAExperts
from shared_moe.experts.ffn import FFNExperts
from shared_moe.experts.lowrank import LowRankExperts

__all__ = ["AdapterExperts", "FFNExperts", "LoRAExperts", "LowRankExperts"]
