# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""What the launchers share: block sizes, tuning configurations, persistent grids."""

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from shared_moe.ops.backend import capability as capability
from shared_moe.ops.backend import interpreting as interpreting

SHARED_BYTES = 99 * 1024
"""Shared memory that a block may use on every GPU since sm_80 (the smallest is consumer Ampere's)."""


def power_of_2(n: int, *, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(n))


def precision(x: Tensor) -> str:
    """How `tl.dot` multiplies float32: exactly, or in TF32 where torch may do so too."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_BYTES)


def persistent(device: torch.device, tiles: int, block_m: int = 128) -> tuple[int]:
    """A grid that fills the device; its programs walk over the tiles. Low tiles leave room for more programs."""
    per_multiprocessor = 4 if block_m <= 32 else 2
    programs = 3 if device.type == "cpu" else per_multiprocessor * _multiprocessors(device)
    return (max(1, min(tiles, programs)),)


def block_rows(rows: int, experts: int) -> int:
    """Rows of a tile, from the mean number of rows an expert has: few when decoding, many when training."""
    mean = rows // max(1, experts)
    return next((block for block in (16, 32, 64) if mean <= block), 128)


def gemm_configs(accumulators: int = 1) -> list[triton.Config]:
    """Tiles (columns, depth), warps and pipeline stages to choose from; the interpreter takes one small tile."""
    if interpreting():
        return [triton.Config({"BLOCK_N": 16, "BLOCK_K": 16}, num_warps=4, num_stages=1)]
    tiles = [
        (128, 64, 8, 3),
        (128, 64, 4, 4),
        (128, 32, 8, 4),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (32, 128, 4, 4),
    ]
    if accumulators == 1:
        tiles.append((256, 64, 8, 3))
    return [
        triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
        for n, k, warps, stages in tiles
    ]


def fits(config: triton.Config, block_m: int, itemsize: int, shared: int, accumulators: int = 1) -> bool:
    """Whether a tile of this configuration keeps within shared memory and the registers of its warps."""
    n, k, stages = config.kwargs["BLOCK_N"], config.kwargs["BLOCK_K"], config.num_stages
    tile_bytes = (block_m + n * accumulators) * k * itemsize * stages
    sums_a_thread = block_m * n * accumulators // (32 * config.num_warps)
    return tile_bytes <= shared and sums_a_thread <= 128


def prune(configs: list[triton.Config], arguments: dict[str, Any], **options: Any) -> list[triton.Config]:
    """The configurations that fit this device and dtype; used by autotune."""
    if interpreting():
        return configs
    x: Tensor = arguments["x_ptr"]
    accumulators = 1 if "y_ptr" in arguments else 2
    block_m, shared = options["BLOCK_M"], _shared_bytes(x.device)
    return [c for c in configs if fits(c, block_m, x.element_size(), shared, accumulators)] or configs[-1:]


def allocate_descriptors(device: torch.device) -> None:
    """Give kernels that build tensor-memory descriptors their scratch memory."""
    if device.type == "cuda":
        triton.set_allocator(lambda size, _, __: torch.empty(size, dtype=torch.int8, device=device))


def describable(weight: Tensor) -> bool:
    """Whether hardware can fetch tiles of this stack of matrices: contiguous, rows of a multiple of 16 bytes."""
    return (
        weight.is_contiguous()
        and weight.shape[-1] * weight.element_size() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def use_descriptors(weight: Tensor) -> bool:
    """On sm_90 and later weights come through the tensor memory accelerator; the interpreter emulates it."""
    if not describable(weight):
        return False
    return interpreting() or capability(weight.device) >= (9, 0)
