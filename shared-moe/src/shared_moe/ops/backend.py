"""Which implementation of an op runs, and why.

`reference` is plain loops over experts in any dtype, the oracle of the tests; `torch` runs everywhere, with native C++
passes on the CPU where a compiler is there; `triton` and `cuda` are kernels for GPUs. "auto" takes, for tensors on a
GPU, the first kernel of `KERNELS` that can run there, and torch otherwise.
"""

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from shared_moe.errors import InputError

BACKENDS = ("reference", "torch", "triton", "cuda")
VARIABLE = "SHARED_MOE_BACKEND"
KERNELS: dict[str, tuple[str, ...]] = {
    "combine": ("triton",),
    "grouped_ffn": ("triton",),
    "grouped_linear": ("triton",),
    "lowrank_experts": ("triton",),
    "sample_log_dirichlet": ("cuda",),
    "slot_mix": ("cuda",),
    "slot_unmix": ("cuda",),
    "sort_by_expert": ("cuda", "triton"),
    "spectral_linear": ("triton",),
    "topk_route": ("triton",),
}
"""Op -> its kernels for GPUs, the preferred one first."""

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_backend(op: str, backend: str = "auto") -> str:
    """What was asked for: `backend`, or for "auto" the environment variable SHARED_MOE_BACKEND.

    A kernel that only the variable names and that this op lacks means "auto". Raises `InputError` for an unknown name,
    or one that was passed and that this op lacks.
    """
    source, given = "backend", backend
    if backend == "auto":
        backend, source = os.environ.get(VARIABLE, "auto"), VARIABLE
    if backend != "auto" and backend not in BACKENDS:
        raise InputError(f"{source} is {backend!r}; it can be auto, {' or '.join(BACKENDS)}")
    if backend in ("triton", "cuda") and backend not in KERNELS[op]:
        if given == "auto":
            return "auto"
        raise InputError(
            f"{op} has no {backend} kernel; it runs on reference, torch{''.join(', ' + k for k in KERNELS[op])}"
        )
    return backend


def resolve(op: str, backend: str, x: Tensor) -> str:
    """ "torch", "triton" or "cuda": what runs for this tensor. Call it where tensors are real, inside an op.

    Raises `InputError` when a kernel was asked for by name and can't run here.
    """
    if backend in ("torch", "reference"):
        return "torch"
    if backend != "auto":
        why = why_not(backend, x)
        if why:
            raise InputError(f"{op} can't run on backend {backend!r}: {why}; use backend 'auto' or 'torch'")
        return backend
    if x.device.type != "cuda":
        return "torch"
    return next((name for name in KERNELS[op] if why_not(name, x) is None), "torch")


def why_not(kernel: str, x: Tensor) -> str | None:
    """Why a Triton or CUDA kernel can't take this tensor, in words; None if it can."""
    if kernel == "cuda":
        return _why_not_cuda(x)
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if x.is_floating_point() and x.dtype not in TRITON_DTYPES:
        return f"there is no kernel for {x.dtype}"
    if interpreting():
        return None
    if x.device.type != "cuda":
        return f"the tensor is on {x.device.type}"
    return None if capability(x.device) >= (8, 0) else f"{x.device} is older than sm_80"


def _why_not_cuda(x: Tensor) -> str | None:
    from shared_moe.ops.cuda import nvrtc

    if x.device.type != "cuda":
        return f"the tensor is on {x.device.type}"
    if not nvrtc.available():
        return nvrtc.MISSING
    if torch.cuda.is_available() and capability(x.device) < (8, 0):
        return f"{x.device} is older than sm_80"
    return None


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a GPU: (9, 0) is sm_90."""
    return torch.cuda.get_device_capability(device)


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def explain_backend(op: str) -> tuple[str, str]:
    """(what runs for this op on this machine's best device, the reason in words)."""
    chosen = choose_backend(op)
    if chosen != "auto":
        return chosen, f"set by {VARIABLE}"
    if not torch.cuda.is_available():
        from shared_moe import native

        return "torch", f"no GPU; {native.status()}"
    probe = torch.empty(0, device="cuda")
    reasons = []
    for kernel in KERNELS[op]:
        why = why_not(kernel, probe)
        if why is None:
            return kernel, "; ".join([*reasons, "the first kernel that runs on this GPU"])
        reasons.append(f"not {kernel}: {why}")
    return "torch", "; ".join(reasons) or "there is no kernel for a GPU"


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype where it is on, as torch's own matrix products do; float64 stays."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)
