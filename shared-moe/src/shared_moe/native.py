"""C++ kernels for the CPU, compiled at first use with the machine's compiler.

The sources lie in the wheel and have a plain C interface (ctypes), so that they build in seconds, fit the processor
and outlive torch versions. The result is cached by a hash of source, flags and compiler. Without a compiler, or with
SHARED_MOE_NATIVE=0, the callers take their torch path: every function here returns False when it did nothing.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from shared_moe.files import atomic_path

FLAGS = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-shared", "-fPIC", "-std=c++17")
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "shared-moe" / "native"


def compile_library(source: str, name: str) -> tuple[Path | None, str]:
    """Compile C++ `source` to a shared library in the cache. Returns (path or None, what happened in words)."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        return None, "no C++ compiler found (install g++ for faster passes)"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()[:1]
    key = "\n".join([source, *FLAGS, *version, platform.machine(), _processor()])
    target = cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if target.is_file():
        return target, f"native passes from {target}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.is_file():
                with atomic_path(target) as out:
                    command = [compiler, *FLAGS, "-x", "c++", "-", "-o", str(out)]
                    built = subprocess.run(command, input=source, capture_output=True, text=True)
                    if built.returncode:
                        out.touch()
                        raise OSError(f"{compiler} failed: {built.stderr.strip()[:500]}")
    except OSError as e:
        target.unlink(missing_ok=True)
        return None, f"native passes could not be built: {e}"
    return target, f"native passes compiled to {target}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("SHARED_MOE_NATIVE") == "0":
        return None, "native passes switched off by SHARED_MOE_NATIVE=0"
    path, note = compile_library(files("shared_moe").joinpath("ops/cpu/moe.cpp").read_text(), "moe")
    if path is None:
        return None, note
    library = ctypes.CDLL(str(path))
    for name in ("swiglu_forward", "swiglu_backward", "combine"):
        getattr(library, name).restype = None
    return library, note


def status() -> str:
    """What became of the native passes, in words."""
    return _library()[1]


def _usable(*tensors: Tensor) -> ctypes.CDLL | None:
    first = tensors[0]
    if first.device.type != "cpu" or first.dtype not in DTYPES:
        return None
    if any(t.dtype != first.dtype or not t.is_contiguous() for t in tensors):
        return None
    return _library()[0]


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _int(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def swiglu_forward(h_SH: Tensor, out_SF: Tensor) -> bool:
    """out = silu(gate) · up, the gate in the first half of h's columns."""
    library = _usable(h_SH, out_SF)
    if library is None:
        return False
    S, F = out_SF.shape
    library.swiglu_forward(DTYPES[h_SH.dtype], _int(S), _int(F), _pointer(h_SH), _pointer(out_SF))
    return True


def swiglu_backward(
    h_SH: Tensor,
    grad_SF: Tensor,
    weight_S: Tensor,
    grad_h_SH: Tensor,
    scaled_SF: Tensor,
    grad_weight_S: Tensor,
) -> bool:
    """In one pass, with a = silu(gate) · up: grad_h of weight · grad, scaled = weight · a, grad_weight = Σ_f grad · a.

    weight and grad_weight are float32.
    """
    library = _usable(h_SH, grad_SF, grad_h_SH, scaled_SF)
    if library is None:
        return False
    S, F = grad_SF.shape
    library.swiglu_backward(
        DTYPES[h_SH.dtype],
        _int(S),
        _int(F),
        _pointer(h_SH),
        _pointer(grad_SF),
        _pointer(weight_S),
        _pointer(grad_h_SH),
        _pointer(scaled_SF),
        _pointer(grad_weight_S),
    )
    return True


def combine(rows_SD: Tensor, position_TK: Tensor, weights_TK: Tensor | None, out_TD: Tensor) -> bool:
    """out_t = Σ_k weight_tk rows[position_tk], k ascending, accumulated in float32."""
    library = _usable(rows_SD, out_TD)
    if library is None or not position_TK.is_contiguous():
        return False
    weights = None if weights_TK is None else weights_TK.to(torch.float32).contiguous()
    T, K = position_TK.shape
    library.combine(
        DTYPES[rows_SD.dtype],
        _int(T),
        _int(K),
        _int(rows_SD.shape[1]),
        _pointer(rows_SD),
        _pointer(position_TK),
        _pointer(weights),
        _pointer(out_TD),
    )
    return True
