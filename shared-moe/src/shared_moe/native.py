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

# The parts of -ffast-math that let sums vectorise. -ffast-math itself would switch denormals off in the whole process.
MATHS = (
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
)
FLAGS = ("-O3", *MATHS, "-shared", "-fPIC", "-pthread", "-std=c++17")
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "shared-moe" / "native"


def compile_library(source: str, name: str) -> tuple[Path | None, str]:
    """Compile C++ `source` to a shared library in the cache. Returns (path or None, what happened in words).

    Two processes never build at once, and a library appears whole or not at all.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        return None, "no C++ compiler found (install g++ for faster passes)"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        key = "\n".join([source, *FLAGS, version, platform.machine(), _processor()])
        target = cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
        if target.is_file():
            return target, f"native passes from {target}"
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.is_file():
                with atomic_path(target) as out:
                    _build(compiler, source, out)
    except (OSError, RuntimeError) as e:
        return None, f"native passes could not be built: {e}"
    return target, f"native passes compiled to {target}"


def _build(compiler: str, source: str, out: Path) -> None:
    error = ""
    for fit in (["-march=native"], []):  # not every compiler knows the processor it runs on
        command = [compiler, *FLAGS, *fit, "-x", "c++", "-", "-o", str(out)]
        built = subprocess.run(command, input=source, capture_output=True, text=True)
        if built.returncode == 0:
            return
        error = built.stderr.strip()[:500]
    raise OSError(f"{compiler} failed: {error}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())


_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
SIGNATURES = {
    "swiglu_forward": [_INT, *[_LONG] * 2, *[_POINTER] * 2],
    "swiglu_backward": [_INT, *[_LONG] * 2, *[_POINTER] * 6],
    "transpose": [*[_LONG] * 2, *[_POINTER] * 2],
    "combine": [_INT, *[_LONG] * 3, *[_POINTER] * 4],
    "swiglu_few_rows": [_INT, *[_LONG] * 5, *[_POINTER] * 8],
    "int8_linear": [_INT, *[_LONG] * 4, *[_POINTER] * 5],
    "int8_swiglu": [_INT, *[_LONG] * 5, *[_POINTER] * 8],
}
"""Arguments of each C function after the first, an int."""


def source() -> str:
    """The C++ of all passes, one translation unit."""
    folder = files("shared_moe").joinpath("ops/cpu")
    return "".join(folder.joinpath(name).read_text() for name in ("moe.cpp", "int8.cpp"))


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("SHARED_MOE_NATIVE") == "0":
        return None, "native passes switched off by SHARED_MOE_NATIVE=0"
    path, note = compile_library(source(), "moe")
    if path is None:
        return None, note
    try:
        library = ctypes.CDLL(str(path))
    except OSError as e:
        return None, f"native passes could not be loaded: {e}"
    for name, rest in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, [_INT, *rest]
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


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def swiglu_forward(h_SH: Tensor, out_SF: Tensor) -> bool:
    """out = silu(gate) · up, the gate in the first half of h's columns."""
    library = _usable(h_SH, out_SF)
    if library is None:
        return False
    S, F = out_SF.shape
    library.swiglu_forward(
        DTYPES[h_SH.dtype], torch.get_num_threads(), S, F, _pointer(h_SH), _pointer(out_SF)
    )
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
        torch.get_num_threads(),
        S,
        F,
        _pointer(h_SH),
        _pointer(grad_SF),
        _pointer(weight_S),
        _pointer(grad_h_SH),
        _pointer(scaled_SF),
        _pointer(grad_weight_S),
    )
    return True


def transposed(x: Tensor) -> Tensor:
    """x.t(), laid out in memory where that makes the following product faster: bfloat16 on the CPU."""
    library = _usable(x) if x.dtype == torch.bfloat16 else None
    if library is None:
        return x.t()
    out = x.new_empty(x.shape[1], x.shape[0])
    library.transpose(torch.get_num_threads(), *x.shape, _pointer(x), _pointer(out))
    return out


def combine(rows_SD: Tensor, position_TK: Tensor, weights_TK: Tensor | None, out_TD: Tensor) -> bool:
    """out_t = Σ_k weight_tk rows[position_tk], k ascending, accumulated in float32."""
    library = _usable(rows_SD, out_TD)
    if library is None or not position_TK.is_contiguous():
        return False
    weights = None if weights_TK is None else weights_TK.to(torch.float32).contiguous()
    library.combine(
        DTYPES[rows_SD.dtype],
        torch.get_num_threads(),
        *position_TK.shape,
        rows_SD.shape[1],
        _pointer(rows_SD),
        _pointer(position_TK),
        _pointer(weights),
        _pointer(out_TD),
    )
    return True


def swiglu_few_rows(
    x_TD: Tensor,
    gate_up_EHD: Tensor,
    down_EDF: Tensor,
    order_S: Tensor,
    counts_E: Tensor,
    position_TK: Tensor,
    weights_TK: Tensor,
    out_TD: Tensor,
) -> bool:
    """The whole SwiGLU layer, reading each weight at memory speed: for a few rows an expert."""
    library = _usable(x_TD, gate_up_EHD, down_EDF, out_TD)
    if library is None:
        return False
    weights = weights_TK.to(torch.float32).contiguous()
    library.swiglu_few_rows(
        DTYPES[x_TD.dtype],
        torch.get_num_threads(),
        x_TD.shape[0],
        gate_up_EHD.shape[0],
        position_TK.shape[1],
        x_TD.shape[1],
        down_EDF.shape[2],
        _pointer(x_TD),
        _pointer(gate_up_EHD),
        _pointer(down_EDF),
        _pointer(order_S),
        _pointer(counts_E),
        _pointer(position_TK),
        _pointer(weights),
        _pointer(out_TD),
    )
    return True


def int8_linear(
    x_SD: Tensor, weight_EHD: Tensor, scale_EH: Tensor, counts_E: Tensor, most: int, y_SH: Tensor
) -> bool:
    """y_s = scale_e · (W_e x_s) with int8 W, for the experts with at most `most` rows; others' rows stay as they are."""
    library = _usable(x_SD, y_SH)
    if library is None:
        return False
    library.int8_linear(
        DTYPES[x_SD.dtype],
        torch.get_num_threads(),
        *weight_EHD.shape,
        most,
        _pointer(x_SD),
        _pointer(weight_EHD),
        _pointer(scale_EH),
        _pointer(counts_E),
        _pointer(y_SH),
    )
    return True


def int8_swiglu(
    x_TD: Tensor,
    ids_TK: Tensor,
    gate_up_EHD: Tensor,
    gate_up_scale_EH: Tensor,
    down_EDF: Tensor,
    down_scale_ED: Tensor,
    weights_TK: Tensor,
    y_TD: Tensor,
) -> bool:
    """The whole SwiGLU layer with int8 weights, for few tokens; activations stay float32 between the products."""
    library = _usable(x_TD, y_TD)
    if library is None:
        return False
    ids, weights = ids_TK.contiguous(), weights_TK.to(torch.float32).contiguous()
    library.int8_swiglu(
        DTYPES[x_TD.dtype],
        torch.get_num_threads(),
        x_TD.shape[0],
        gate_up_EHD.shape[0],
        ids.shape[1],
        x_TD.shape[1],
        down_EDF.shape[2],
        _pointer(x_TD),
        _pointer(ids),
        _pointer(gate_up_EHD),
        _pointer(gate_up_scale_EH),
        _pointer(down_EDF),
        _pointer(down_scale_ED),
        _pointer(weights),
        _pointer(y_TD),
    )
    return True
