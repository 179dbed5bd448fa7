"""Which implementation of an op runs, and why.

`reference` is plain loops over experts in any dtype, the oracle of the tests; `torch` is the default everywhere, with
native C++ passes on the CPU where a compiler is there.
"""

import os
from typing import Any

import torch
from torch import Tensor

from shared_moe.errors import InputError

BACKENDS = ("reference", "torch")
VARIABLE = "SHARED_MOE_BACKEND"


def choose_backend(backend: str = "auto") -> str:
    """Resolve "auto" by the environment variable SHARED_MOE_BACKEND, then to "torch".

    Raises `InputError` for a name that is none of `BACKENDS`.
    """
    source = "backend"
    if backend == "auto":
        backend, source = os.environ.get(VARIABLE, "auto"), VARIABLE
        if backend == "auto":
            return "torch"
    if backend not in BACKENDS:
        raise InputError(f"{source} is {backend!r}; it can be auto, {' or '.join(BACKENDS)}")
    return backend


def explain_backend() -> tuple[str, str]:
    """(backend that "auto" means here, the reason in words)."""
    chosen = choose_backend()
    if os.environ.get(VARIABLE, "auto") != "auto":
        return chosen, f"set by {VARIABLE}"
    from shared_moe import native

    return chosen, f"the default; {native.status()}"


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype where it is on, as torch's own matrix products do; float64 stays."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)
