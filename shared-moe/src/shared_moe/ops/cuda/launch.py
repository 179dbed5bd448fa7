"""Launch compiled kernels on torch's current stream, through the driver."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared_moe.errors import MoeError
from shared_moe.ops.backend import capability
from shared_moe.ops.cuda.nvrtc import compile_cubin


class LaunchError(MoeError):
    """The driver refused a kernel."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(words))
        raise LaunchError(f"{what} failed: {(words.value or b'unknown error').decode()} ({code})")


def _attach(device: torch.device) -> None:
    """Make the device's context current on this thread; a thread of autograd's may have none yet."""
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
    if not context.value:
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index), f"using {device}")
        _check(_driver().cuCtxSetCurrent(context), f"using {device}")


@functools.cache
def _function(name: str, kernel: str, device: torch.device) -> ctypes.c_void_p:
    major, minor = capability(device)
    code = compile_cubin(name, 10 * major + minor).read_bytes()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code), f"loading {name}")
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()), kernel)
    return function


Argument = Tensor | ctypes._SimpleCData | ctypes.Structure


def packed(arguments: Sequence[Argument]) -> tuple[list[Any], ctypes.Array]:
    """(the values, which must outlive the call; their addresses) as the driver wants a kernel's arguments."""
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    return values, (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))


def launch(name: str, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None:
    """Run `kernel` of ops/cuda/`name`; the first argument is a tensor on the device that runs it."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    with torch.cuda.device(first.device):
        _attach(first.device)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        function = _function(name, kernel, first.device)
        _values, pointers = packed(arguments)
        code = _driver().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)
        _check(code, f"launching {kernel}")
