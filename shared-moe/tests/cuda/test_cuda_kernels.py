"""The CUDA kernels without a GPU: their headers built by g++, their machine code read, their ops traced."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shared_moe import native
from shared_moe.errors import InputError
from shared_moe.ops import backend
from shared_moe.ops.cuda import nvrtc
from shared_moe.ops.cuda.dirichlet import sample_op
from shared_moe.ops.cuda.sort import BLOCK_ROWS, num_blocks
from shared_moe.ops.sort import sort_by_expert
from shared_moe.routing.dirichlet import sample_log_dirichlet

TWIN = Path(__file__).with_name("twin.cpp")


def twin_source() -> str:
    headers = [
        nvrtc.source(name).replace(nvrtc.source("common.cuh"), "") for name in ("sort.cuh", "dirichlet.cuh")
    ]
    return "\n".join([nvrtc.source("common.cuh"), *headers, TWIN.read_text()])


@pytest.fixture(scope="module")
def twin() -> ctypes.CDLL:
    path, note = native.compile_library(twin_source(), "cuda-twin")
    if path is None:
        pytest.skip(note)
    library = ctypes.CDLL(str(path))
    library.twin_gamma_derivative.restype = ctypes.c_double
    library.twin_gamma_derivative.argtypes = [ctypes.c_double] * 2
    for function in (library.twin_block_begin, library.twin_block_end):
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.c_int64] * 2
    return library


def log_gamma(twin, a, seed=0):
    value, slope = torch.empty_like(a), torch.empty_like(a)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, value, slope)]
    twin.twin_log_gamma(*pointers, ctypes.c_int64(a.numel()), ctypes.c_int64(seed))
    return value, slope


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3000), st.integers(1, 1024), st.integers(0, 2**31))
def test_sort_is_the_stable_sort(twin, S, E, seed):
    ids = torch.randint(-1, E + 1, (S, 1), generator=torch.Generator().manual_seed(seed))
    order, counts = torch.empty(S, dtype=torch.int64), torch.empty(E, dtype=torch.int64)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (ids, order, counts)]
    twin.twin_sort(*pointers, ctypes.c_int64(S), ctypes.c_int(E))
    expected_order, expected_counts = sort_by_expert(ids, E)
    assert torch.equal(order, expected_order)
    assert torch.equal(counts, expected_counts)


def test_offsets_pass_2_to_the_31(twin):
    S = 2**33 + 5
    last = num_blocks(S) - 1
    assert twin.twin_block_begin(last, 0) == last * BLOCK_ROWS == 2**33
    assert twin.twin_block_end(last, S) == S


@settings(max_examples=150, deadline=None)
@given(st.floats(1.001, 1e4), st.floats(0.02, 0.98))
def test_derivative_is_that_of_the_distribution(twin, b, p):
    x = max(b + b**0.5 * 5 * (p - 0.5), 0.05 * b)
    shape, step = torch.tensor([b, x], dtype=torch.float64), 1e-5 * b
    P = torch.special.gammainc
    slope = (P(shape[0] + step, shape[1]) - P(shape[0] - step, shape[1])) / (2 * step)
    density = ((shape[0] - 1) * shape[1].log() - shape[1] - shape[0].lgamma()).exp()
    assert twin.twin_gamma_derivative(x, b) == pytest.approx(float(-slope / density), rel=1e-4)


@pytest.mark.parametrize("a", [0.05, 0.7, 1.0, 8.0, 300.0])
def test_samples_have_the_moments_of_log_gamma(twin, a):
    n = 40_000
    shape = torch.full((n,), a, dtype=torch.float64)
    value, slope = log_gamma(twin, shape, seed=3)
    mean, variance = torch.special.digamma(shape[0]), torch.special.polygamma(1, shape[0])
    assert float((value.mean() - mean) / (variance / n).sqrt()) == pytest.approx(0, abs=4.5)
    assert float(value.var() / variance) == pytest.approx(1, abs=0.06)
    assert float((slope.mean() - variance) / (slope.std() / n**0.5)) == pytest.approx(0, abs=4.5)


def test_samples_depend_on_seed_and_element_alone(twin):
    a = torch.full((100,), 0.3, dtype=torch.float64)
    first, second, other = (log_gamma(twin, a[:n], seed)[0] for n, seed in ((100, 1), (50, 1), (100, 2)))
    assert torch.equal(first[:50], second)
    assert not (first == other).any()
    assert first.unique().numel() == 100


def test_tiny_concentrations_stay_finite_and_bad_ones_are_nan(twin):
    value, slope = log_gamma(twin, torch.tensor([1e-3, 1e4, 0.0, -1.0, torch.nan], dtype=torch.float64))
    assert value.isfinite().tolist() == slope.isfinite().tolist() == [True, True, False, False, False]


def test_headers_under_sanitisers(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    flags = ["-std=c++17", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source, program = tmp_path / "twin.cpp", tmp_path / "twin"
    source.write_text("#define TWIN_MAIN\n" + twin_source())
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


needs_compiler = pytest.mark.skipif(not nvrtc.available(), reason=nvrtc.MISSING)


@needs_compiler
def test_machine_code_fits_every_architecture():
    compile_only = pytest.importorskip("shared_moe.ops.cuda.compile_only")
    rows = compile_only.cuda_rows()
    assert {(r["kernel"], r["arch"]) for r in rows} == {
        (kernel, arch) for kernel in ("sort_count", "sort_place", "log_gamma") for arch in (80, 90, 100)
    }
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
    with FakeTensorMode():
        ids = torch.empty(8, 2, device="cuda", dtype=torch.int64)
        order, counts = sort_by_expert(ids, 5)
        assert (order.shape, counts.shape, order.device.type) == ((16,), (5,), "cuda")
        a = torch.empty(8, 5, device="cuda", requires_grad=True)
        log_theta = sample_log_dirichlet(a)
        assert (log_theta.shape, log_theta.dtype, log_theta.device.type) == ((8, 5), torch.float64, "cuda")
        for part in sample_op(a.detach().double(), torch.empty(1, dtype=torch.int64, device="cuda")):
            assert (part.shape, part.dtype, part.device) == (a.shape, torch.float64, a.device)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


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
def test_dirichlet_on_the_gpu_is_that_of_the_headers(twin):
    a = torch.logspace(-3, 4, 5000, dtype=torch.float64)
    got = sample_op(a.cuda(), torch.tensor([9], device="cuda"))
    for ours, expected in zip(got, log_gamma(twin, a, 9), strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-9, atol=1e-9)
