"""Compile the CUDA kernels for GPUs that aren't there, and read registers, spills and shared memory."""

import re
from typing import Any

from shared_moe.ops.cuda.nvrtc import compile_cubin
from shared_moe.ops.cuda.slot_mix import WIDTHS
from shared_moe.ops.triton.compile_only import ARCHS, run_tool

SOURCES = ("sort.cu", "dirichlet.cu", *(f"slot_mix_{width}.cu" for width in WIDTHS))


def cuda_rows() -> list[dict[str, Any]]:
    """One row for each kernel and architecture, with the keys of the Triton table."""
    return [row for name in SOURCES for arch in ARCHS for row in _rows(name, arch)]


def _rows(name: str, arch: int) -> list[dict[str, Any]]:
    width = re.search(r"_(\d+)\.cu", name)
    usage = run_tool("cuobjdump", "--dump-resource-usage", str(compile_cubin(name, arch)))
    pattern = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    return [
        {
            "kernel": kernel,
            "tile": f"D{width[1]}" if width else "-",
            "arch": arch,
            "registers": int(registers),
            "shared": int(shared),
            "spills": int(stack) + int(local),
            "mma": "-",
            "tma": False,
        }
        for kernel, registers, stack, shared, local in re.findall(pattern, usage)
    ]
