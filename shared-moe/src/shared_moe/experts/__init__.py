"""Expert networks: grouped weights, low-rank factors, adapters."""

from shared_moe.experts.adapters import AdapterExperts
from shared_moe.experts.ffn import FFNExperts

__all__ = ["AdapterExperts", "FFNExperts"]
