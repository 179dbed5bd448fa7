"""The CUDA sources run on the CPU in tests: kernels in an emulated block, with the Python code that launches them."""

import ctypes
import functools
import re
from pathlib import Path

import pytest

from shared_moe import native
from shared_moe.ops.cuda import nvrtc
from shared_moe.ops.cuda.launch import packed

EMULATOR = Path(__file__).with_name("emulator.hpp")
KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(")


def emulated_source(name: str) -> str:
    """C++ of ops/cuda/`name` with a function emulate_KERNEL(blocks, threads, arguments, seed) for each kernel."""
    source = nvrtc.source(name)
    return "\n".join([EMULATOR.read_text(), source, *(f"EMULATE({k})" for k in KERNEL.findall(source)), ""])


class Emulator:
    """Stands in for the GPU and its driver; `seed` shuffles the order of blocks and threads."""

    seed = 0
    launches = 0

    @functools.cache  # noqa: B019
    def library(self, name: str) -> ctypes.CDLL:
        path, note = native.compile_library(emulated_source(name), f"emulated-{Path(name).stem}")
        if path is None:
            pytest.skip(note)
        return ctypes.CDLL(str(path))

    def launch(self, name: str, kernel: str, blocks: int, threads: int, *arguments) -> None:
        _values, pointers = packed(arguments)
        run = getattr(self.library(name), f"emulate_{kernel}")
        assert run(blocks, threads, pointers, self.seed) == 0, f"{kernel}: a barrier is not reached by all"
        self.launches += 1


@pytest.fixture(scope="module")
def emulator():
    """ops.cuda on CPU tensors: every launch goes to the emulator."""
    from shared_moe.ops.cuda import dirichlet, slot_mix, sort

    emulator = Emulator()
    with pytest.MonkeyPatch.context() as patch:
        for module in (sort, dirichlet, slot_mix):
            patch.setattr(module, "launch", emulator.launch)
        yield emulator
