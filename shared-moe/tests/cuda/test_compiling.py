"""CUDA sources to machine code without a GPU: limits, errors, the cache; on a GPU, the kernels themselves."""

from ctypes import c_void_p

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shared_moe.errors import InputError
from shared_moe.ops import backend
from shared_moe.ops.cuda import nvrtc
from shared_moe.ops.cuda.dirichlet import sample_op
from shared_moe.ops.cuda.slot_mix import WIDTHS, Sizes, _matrix, attend_backward_op, attend_op
from shared_moe.ops.sort import sort_by_expert
from shared_moe.routing.dirichlet import sample_log_dirichlet

needs_compiler = pytest.mark.skipif(not nvrtc.available(), reason=nvrtc.MISSING)


@needs_compiler
def test_machine_code_fits_every_architecture():
    compile_only = pytest.importorskip("shared_moe.ops.cuda.compile_only")
    rows = compile_only.cuda_rows()
    mixing = ("slot_forward", "slot_backward_rows", "slot_backward_columns")
    kernels = {("sort_count", "-"), ("sort_place", "-"), ("log_gamma", "-")}
    kernels |= {(name, f"D{width}") for name in mixing for width in WIDTHS}
    found = {(r["kernel"], r["tile"], r["arch"]) for r in rows}
    assert found == {(*kernel, arch) for kernel in kernels for arch in (80, 90, 100)}
    for row in rows:
        assert row["spills"] == 0, row
        assert row["registers"] <= 255, row
        assert row["shared"] <= 48 * 1024, row  # static shared memory


@needs_compiler
def test_a_source_that_does_not_compile_names_the_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "source", lambda name: "int main( {")
    with pytest.raises(nvrtc.CompileError, match="error"):
        nvrtc.compile_cubin("broken.cu", 90)
    assert not list(tmp_path.rglob("*.cubin"))


@needs_compiler
def test_an_offset_of_32_bits_would_not_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    narrow = nvrtc.source("slot_mix_16.cu").replace("using index_t = long long;", "using index_t = int;")
    monkeypatch.setattr(nvrtc, "source", lambda name: narrow)
    with pytest.raises(nvrtc.CompileError, match="offsets must not overflow"):
        nvrtc.compile_cubin("slot_mix_16.cu", 90)


@needs_compiler
def test_machine_code_comes_from_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = nvrtc.compile_cubin("sort.cu", 90)
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
    assert nvrtc.compile_cubin("sort.cu", 90) == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.compile_cubin("sort.cu", 80) != first


def test_a_cache_that_cannot_be_written_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "_compiler", lambda: "a compiler")
    (tmp_path / "shared-moe").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(nvrtc.CompileError, match="XDG_CACHE_HOME"):
        nvrtc.compile_cubin("sort.cu", 90)


def test_without_a_compiler_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(nvrtc, "_compiler", lambda: None)
    assert "NVRTC" in nvrtc.status()
    with pytest.raises(nvrtc.CompileError, match="nvcc"):
        nvrtc.compile_cubin("sort.cu", 90)
    with FakeTensorMode():
        ids = torch.empty(4, 2, dtype=torch.int64, device="cuda")
        assert backend.resolve("sample_log_dirichlet", "auto", ids) == "torch"
        with pytest.raises(InputError, match="no CUDA compiler"):
            backend.resolve("sort_by_expert", "cuda", ids)


@needs_compiler
def test_ops_trace_for_a_gpu_without_one():
    with FakeTensorMode(), torch.device("cuda"):
        order, counts = sort_by_expert(torch.empty(8, 2, dtype=torch.int64), 5)
        assert (order.shape, counts.shape, order.device.type) == ((16,), (5,), "cuda")
        a = torch.empty(8, 5, requires_grad=True)
        log_theta = sample_log_dirichlet(a)
        assert (log_theta.shape, log_theta.dtype, log_theta.device.type) == ((8, 5), torch.float64, "cuda")
        for part in sample_op(a.detach().double(), torch.empty(1, dtype=torch.int64)):
            assert (part.shape, part.dtype, part.device) == (a.shape, torch.float64, a.device)
        q, k, v = torch.empty(2, 3, 6, 8), torch.empty(2, 3, 70, 8), torch.empty(2, 3, 70, 12)
        out, lse = attend_op(q, k, v, None)
        assert (out.shape, lse.shape, out.device.type) == ((2, 3, 6, 12), (2, 3, 6), "cuda")
        grads = attend_backward_op(torch.empty_like(out), q, k, v, None, out, lse)
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_a_missing_barrier_would_show(emulator):
    """The emulator's own check: without the barriers of the tile products the orders of threads disagree."""
    library = emulator.library("slot_mix_16.cu", "        __syncthreads();\n")
    q, lse = torch.arange(64.0 * 16).sin().view(1, 1, 64, 16), torch.empty(1, 1, 64)
    answers = []
    for seed in range(3):
        out = torch.zeros_like(q)
        sizes, matrices = Sizes(1, 1, 64, 64, 1, 16, 16), (_matrix(q),) * 3
        arguments = (lse, sizes, *matrices, c_void_p(), _matrix(out))
        emulator.run(library, "slot_forward", 1, 256, arguments, seed)
        answers.append(out)
    assert not all(torch.equal(answers[0], other) for other in answers[1:])


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: CUDA kernels were only emulated"
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("S", "E"), [(0, 3), (1, 1), (1025, 7), (100_000, 1024)])
def test_sort_on_the_gpu(S, E):
    from shared_moe.ops.cuda.sort import sort

    ids = torch.randint(-1, E + 1, (S, 1))
    for got, expected in zip(sort(ids.cuda(), E), sort_by_expert(ids, E), strict=True):
        assert torch.equal(got.cpu(), expected)


@pytest.mark.gpu
@needs_gpu
def test_dirichlet_on_the_gpu_is_that_of_the_emulator(emulator, monkeypatch):
    a = torch.logspace(-3, 4, 5000, dtype=torch.float64)
    expected = sample_op(a, torch.tensor([9]))
    from shared_moe.ops.cuda import dirichlet, launch

    monkeypatch.setattr(dirichlet, "launch", launch.launch)
    for ours, theirs in zip(sample_op(a.cuda(), torch.tensor([9], device="cuda")), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)
