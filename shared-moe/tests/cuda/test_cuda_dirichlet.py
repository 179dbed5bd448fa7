"""Dirichlet sampling, its kernel emulated on the CPU, against the distribution."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_moe import native
from shared_moe.ops.cuda import nvrtc
from shared_moe.ops.cuda.dirichlet import sample_op
from shared_moe.routing.dirichlet import sample_log_dirichlet

TWIN = Path(__file__).with_name("twin.cpp")


def twin_source() -> str:
    common = nvrtc.source("common.cuh")
    headers = [nvrtc.source(name).replace(common, "") for name in ("sort.cuh", "dirichlet.cuh")]
    return "\n".join([common, *headers, TWIN.read_text()])


@pytest.fixture(scope="module")
def derivative():
    path, note = native.compile_library(twin_source(), "cuda-twin")
    if path is None:
        pytest.skip(note)
    function = ctypes.CDLL(str(path)).twin_gamma_derivative
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double] * 2
    return function


def log_gamma(a, seed=0):
    return sample_op(a, torch.tensor([seed]))


@settings(max_examples=150, deadline=None)
@given(st.floats(1.001, 1e4), st.floats(0.02, 0.98))
def test_derivative_is_that_of_the_distribution(derivative, b, p):
    x = max(b + b**0.5 * 5 * (p - 0.5), 0.05 * b)
    shape, step = torch.tensor([b, x], dtype=torch.float64), 1e-5 * b
    P = torch.special.gammainc
    slope = (P(shape[0] + step, shape[1]) - P(shape[0] - step, shape[1])) / (2 * step)
    density = ((shape[0] - 1) * shape[1].log() - shape[1] - shape[0].lgamma()).exp()
    assert derivative(x, b) == pytest.approx(float(-slope / density), rel=1e-4)


@settings(max_examples=100, deadline=None)
@given(st.floats(1.0, 1e6), st.floats(-4, 4))
def test_derivative_agrees_with_torch(derivative, b, z):
    x = max(b + z * b**0.5, 1e-3 * b)
    theirs = torch._standard_gamma_grad(*(torch.tensor(v, dtype=torch.float64) for v in (b, x)))
    assert derivative(x, b) == pytest.approx(float(theirs), rel=2e-3)  # torch approximates


def test_derivative_is_continuous_where_the_method_changes(derivative):
    for b, x in ((1e7, 1e7 + 5e3), (1e7, 1e7 - 5e3), (50.0, 51.0)):
        below, above = derivative(x * (1 - 1e-9), b * (1 - 1e-9)), derivative(x * (1 + 1e-9), b * (1 + 1e-9))
        assert below == pytest.approx(above, rel=1e-6)


@pytest.mark.parametrize("a", [0.05, 0.7, 1.0, 8.0, 300.0])
def test_samples_have_the_moments_of_log_gamma(emulator, a):
    n = 40_000
    shape = torch.full((n,), a, dtype=torch.float64)
    value, slope = log_gamma(shape, seed=3)
    mean, variance = torch.special.digamma(shape[0]), torch.special.polygamma(1, shape[0])
    assert float((value.mean() - mean) / (variance / n).sqrt()) == pytest.approx(0, abs=4.5)
    assert float(value.var() / variance) == pytest.approx(1, abs=0.06)
    assert float((slope.mean() - variance) / (slope.std() / n**0.5)) == pytest.approx(0, abs=4.5)


def test_samples_depend_on_seed_and_element_alone(emulator, walls):
    a = torch.full((300,), 0.3, dtype=torch.float64)
    first, _ = emulator.orders(lambda: log_gamma(a, 1))
    second, other = log_gamma(a[:150], 1)[0], log_gamma(a, 2)[0]
    assert torch.equal(first[:150], second)
    assert not (first == other).any()
    assert first.unique().numel() == 300


def test_tiny_concentrations_stay_finite_and_bad_ones_are_nan(emulator):
    value, slope = log_gamma(torch.tensor([1e-3, 1e4, 1e9, 0.0, -1.0, torch.nan], dtype=torch.float64))
    assert value.isfinite().tolist() == slope.isfinite().tolist() == [True] * 3 + [False] * 3


def test_the_sampler_takes_the_kernel_and_has_its_gradient(emulator, monkeypatch):
    monkeypatch.setattr("shared_moe.ops.backend.why_not", lambda kernel, x: None)
    monkeypatch.setenv("SHARED_MOE_BACKEND", "cuda")
    emulator.launched.clear()
    a = torch.tensor([0.4, 1.0, 5.0], dtype=torch.float64).expand(30_000, 3).clone().requires_grad_()
    theta = sample_log_dirichlet(a, torch.Generator().manual_seed(0)).exp()
    assert emulator.launched == {"log_gamma"}
    total = a[0].detach().sum()
    torch.testing.assert_close(theta.mean(0).detach(), a[0].detach() / total, rtol=0.03, atol=0)
    (grad,) = torch.autograd.grad(theta[:, 0].sum(), a)
    expected = (torch.tensor([1.0, 0, 0]) - a[0, 0].detach() / total) / total
    torch.testing.assert_close(grad.mean(0), expected.double(), rtol=0.1, atol=0)


def test_opcheck(emulator):
    a = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(sample_op, (a, torch.tensor([5])))


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
