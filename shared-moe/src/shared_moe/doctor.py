"""What this machine can do, and which implementation of each op runs on it."""

import importlib.util
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shared_moe import __version__

OPTIONAL = {"pyarrow": "trace", "matplotlib": "viz", "huggingface_hub": "hub", "transformers": "hf"}
"""Package -> the extra that brings it."""

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve", "bf16")


def examine() -> dict[str, Any]:
    """Facts about Python, torch, processor, compiler, accelerator and backends, ready for JSON."""
    import torch

    from shared_moe.ops.backend import KERNELS, explain_backend
    from shared_moe.ops.cuda import nvrtc

    return {
        "shared-moe": __version__,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "torch": torch.__version__,
        "cpu": {
            "processor": _processor(),
            "flags": [flag for flag in CPU_FLAGS if flag in _cpu_flags()],
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "compiler": shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++"),
        "cuda": _cuda(),
        "cuda_kernels": nvrtc.status(),
        "triton": _version("triton"),
        "extras": {name: _version(name) for name in OPTIONAL},
        "ops": {
            name: dict(zip(("backend", "why"), explain_backend(name), strict=True))
            for name in sorted(KERNELS)
        },
    }


def describe(facts: dict[str, Any]) -> str:
    """The same for a reader."""
    cpu, cuda = facts["cpu"], facts["cuda"]
    lines = [
        f"shared-moe {facts['shared-moe']}, Python {facts['python']}, torch {facts['torch']} on {facts['system']}",
        f"processor  {cpu['processor']}: {cpu['cores']} cores, torch uses {cpu['threads']} threads; "
        f"{' '.join(cpu['flags']) or 'none of the flags we look for'}",
        f"compiler   {facts['compiler'] or 'none found; install g++ for the native CPU passes'}",
        f"CUDA       {', '.join(cuda['devices']) if cuda['available'] else cuda['why']}",
        f"           {facts['cuda_kernels']}",
        f"Triton     {facts['triton'] or 'not installed'}",
        *(
            f"{name:<16} {found or f'not installed (extra {OPTIONAL[name]})'}"
            for name, found in facts["extras"].items()
        ),
        "",
        *(f"{name:<16} {op['backend']}: {op['why']}" for name, op in facts["ops"].items()),
    ]
    return "\n".join(lines)


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown version"


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            f"no device found (torch was built for CUDA {built})" if built else "torch was built without CUDA"
        )
        return {"available": False, "why": why, "devices": []}
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "available": True,
        "why": f"CUDA {torch.version.cuda}",
        "devices": [
            f"{p.name} (sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB)" for p in properties
        ],
    }


def _cpu_lines(key: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [line.split(":", 1)[1].strip() for line in lines if line.lower().startswith(key) and ":" in line]


def _cpu_flags() -> set[str]:
    return set((_cpu_lines("flags") or _cpu_lines("features") or [""])[0].split())


def _processor() -> str:
    return (_cpu_lines("model name") or [platform.processor() or platform.machine()])[0]
