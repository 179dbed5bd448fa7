"""Native passes: compiled once, cached, and never the reason that something fails."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shared_moe import native

SOURCE = 'extern "C" int answer() { return 42; }'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_compiles_once_also_when_two_ask_at_the_same_time():
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: native.compile_library(SOURCE, "answer"), range(2)))
    paths = {path for path, _ in results}
    assert len(paths) == 1
    (path,) = paths
    if path is None:
        pytest.skip("no C++ compiler here")
    written = path.stat().st_mtime_ns
    again, note = native.compile_library(SOURCE, "answer")
    assert again == path
    assert path.stat().st_mtime_ns == written
    assert "compiled" not in note
    assert native.compile_library(SOURCE + "\n", "answer")[0] != path


def test_a_source_that_does_not_compile_is_a_note():
    path, note = native.compile_library("int main( {", "broken")
    assert path is None
    assert note


def test_no_compiler_is_a_note(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.compile_library(SOURCE, "answer") == (
        None,
        "no C++ compiler found (install g++ for faster passes)",
    )


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path, note = native.compile_library(SOURCE, "answer")
    assert path is None
    assert note


def test_a_damaged_library_falls_back(tmp_path, monkeypatch):
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(native, "compile_library", lambda *a: (damaged, "native passes"))
    library, note = native._library.__wrapped__()
    assert library is None
    assert "could not be loaded" in note


def test_can_be_switched_off():
    code = (
        "import torch; from shared_moe import native; "
        "assert not native.swiglu_forward(torch.zeros(2, 4), torch.zeros(2, 2)); print(native.status())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"SHARED_MOE_NATIVE": "0"},
        check=True,
    )
    assert "switched off" in result.stdout


def test_denormal_numbers_survive_in_the_process():
    """-ffast-math in a shared library would flush them to zero everywhere."""
    native.status()
    assert (torch.tensor([1e-40]) * 1).item() > 0


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (32, 32), (31, 65), (64, 33), (100, 256)])
def test_transpose_is_exact(rows, columns):
    x = torch.randn(rows, columns).bfloat16()
    assert torch.equal(native.transposed(x), x.t())
