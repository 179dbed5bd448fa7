"""The hot functions, each one custom op with a reference and faster implementations."""

from shared_moe.ops.combine import combine
from shared_moe.ops.grouped_ffn import grouped_ffn
from shared_moe.ops.grouped_linear import grouped_linear
from shared_moe.ops.int8 import int8_error_bound, int8_ffn, int8_linear, quantize_int8
from shared_moe.ops.lowrank import lowrank_experts
from shared_moe.ops.slot_mix import slot_mix, slot_unmix
from shared_moe.ops.sort import sort_by_expert
from shared_moe.ops.spectral import spectral_linear

__all__ = [
    "combine",
    "grouped_ffn",
    "grouped_linear",
    "int8_error_bound",
    "int8_ffn",
    "int8_linear",
    "lowrank_experts",
    "quantize_int8",
    "slot_mix",
    "slot_unmix",
    "sort_by_expert",
    "spectral_linear",
]
