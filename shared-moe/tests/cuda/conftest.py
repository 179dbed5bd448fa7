"""The CUDA sources run on the CPU in tests: kernels in an emulated block, with the Python code that launches them."""

import ctypes
import functools
import re
from pathlib import Path

import pytest
import torch

from shared_moe import native
from shared_moe.ops.cuda import dirichlet, nvrtc, slot_mix, sort
from shared_moe.ops.cuda.launch import packed

EMULATOR = Path(__file__).with_name("emulator.hpp")
KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(")


def emulated_source(name: str) -> str:
    """C++ of ops/cuda/`name` with a function emulate_KERNEL(blocks, threads, arguments, seed) for each kernel."""
    source = nvrtc.source(name)
    return "\n".join([EMULATOR.read_text(), source, *(f"EMULATE({k})" for k in KERNEL.findall(source)), ""])


class Emulator:
    """Stands in for the GPU and its driver; `seed` shuffles the order of blocks and threads."""

    def __init__(self):
        self.seed = 0
        self.launched: set[str] = set()

    @functools.cache  # noqa: B019
    def library(self, name: str, left_out: str = "") -> ctypes.CDLL:
        """The kernels of a source, less a line of it."""
        text = emulated_source(name)
        assert left_out in text
        if left_out:
            text = text.replace(left_out, "")
        path, note = native.compile_library(text, f"emulated-{Path(name).stem}")
        if path is None:
            pytest.skip(note)
        return ctypes.CDLL(str(path))

    @staticmethod
    def run(library: ctypes.CDLL, kernel: str, blocks: int, threads: int, arguments, seed: int) -> int:
        """0, or 1 when a barrier is not reached by all threads."""
        _values, pointers = packed(arguments)
        return getattr(library, f"emulate_{kernel}")(blocks, threads, pointers, seed)

    def launch(self, name: str, kernel: str, blocks: int, threads: int, *arguments) -> None:
        stuck = self.run(self.library(name), kernel, blocks, threads, arguments, self.seed)
        assert not stuck, f"{kernel}: a barrier is not reached by all"
        self.launched.add(kernel)

    def orders(self, answer):
        """The answer under three orders of threads and blocks, which must agree bit by bit."""
        answers = []
        for self.seed in range(3):
            answers.append(answer())
        for other in answers[1:]:
            for a, b in zip(answers[0], other, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        return answers[0]


@pytest.fixture(scope="module")
def emulator():
    """ops.cuda on CPU tensors: every launch goes to the emulator."""
    emulator = Emulator()
    with pytest.MonkeyPatch.context() as patch:
        for module in (sort, dirichlet, slot_mix):
            patch.setattr(module, "launch", emulator.launch)
        yield emulator


@pytest.fixture
def walls(monkeypatch):
    """Tensors that the wrappers make lie between walls; a write past either end fails the test."""
    built: list[torch.Tensor] = []
    thickness, brick = 64, 0x5A

    def walled(size: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.full((size * dtype.itemsize + 2 * thickness,), brick, dtype=torch.uint8)
        built.append(whole)
        return whole[thickness : whole.numel() - thickness].view(dtype)

    def new_empty(self, *shape, dtype=None):
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return walled(torch.Size(sizes).numel(), self, dtype or self.dtype).view(*sizes)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda t: new_empty(t, t.shape))
    yield built
    assert built
    for whole in built:
        assert (whole[:thickness] == brick).all()
        assert (whole[-thickness:] == brick).all()
