# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""What the launchers share: block sizes, tuning configurations, persistent grids."""

import functools
from collections.abc import Callable
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


def gemm_configs() -> list[triton.Config]:
    """Tiles (columns, depth), warps and pipeline stages to choose from; the interpreter takes one small tile."""
    if interpreting():
        return [triton.Config({"BLOCK_N": 16, "BLOCK_K": 16}, num_warps=4, num_stages=1)]
    tiles = [
        (256, 64, 8, 3),
        (128, 64, 16, 3),
        (128, 64, 8, 3),
        (128, 64, 4, 4),
        (128, 32, 8, 4),
        (64, 64, 8, 3),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (32, 128, 4, 4),
    ]
    return [
        triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
        for n, k, warps, stages in tiles
    ]


def fits(
    config: triton.Config,
    block_m: int,
    block_n: int,
    itemsize: int,
    shared: int,
    arch: int,
    held: int,
    fetched: int,
) -> bool:
    """Whether a tile keeps within `shared` bytes and the registers of its warps on sm_`arch`.

    held: float32 tiles (block_m, block_n) that live at the same time; fetched: weight tiles of one step. The upper bound
    on values a thread is where the compiler begins to spill; below the lower one fewer warps do the same. Sixteen warps
    hold a large tile without spilling on sm_90 alone.
    """
    if config.num_warps > 8 and not 90 <= arch < 100:
        return False
    tile_bytes = (block_m + block_n * fetched) * config.kwargs["BLOCK_K"] * itemsize * config.num_stages
    values = block_m * block_n * held // (32 * config.num_warps)
    least = 64 if config.num_warps > 4 else 0
    most = 128 if arch >= 90 and config.num_warps == 8 and held == 1 else 64
    return tile_bytes <= shared and least <= values <= most


def pruner(held: int = 1, fetched: int = 1) -> Callable[..., list[triton.Config]]:
    """For autotune: keeps the configurations that fit the device and dtype of the kernel's first tensor."""

    def prune(configs: list[triton.Config], arguments: dict[str, Any], **options: Any) -> list[triton.Config]:
        if interpreting():
            return configs
        x: Tensor = next(iter(arguments.values()))
        major, minor = capability(x.device)
        device = x.element_size(), _shared_bytes(x.device), 10 * major + minor
        kept = [
            c
            for c in configs
            if fits(
                c, options["BLOCK_M"], c.kwargs.get("BLOCK_N", options.get("BLOCK_N")), *device, held, fetched
            )
        ]
        return kept or configs[-1:]

    return prune


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
