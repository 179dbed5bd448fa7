"""CUDA sources to machine code: by NVRTC from torch's wheels, or by nvcc; cached on disk."""

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import FileLock

from shared_moe.errors import MoeError
from shared_moe.files import atomic_path
from shared_moe.native import cache_folder

FLAGS = ("-std=c++17",)
MISSING = "no CUDA compiler found (NVRTC comes with torch's CUDA wheels, nvcc with the CUDA toolkit)"


class CompileError(MoeError):
    """A CUDA source did not compile, or no compiler is there."""


def source(name: str) -> str:
    """The text of a source with its headers written in, each once."""
    seen: set[str] = set()

    def read(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = files("shared_moe").joinpath("ops/cuda", file).read_text().replace("#pragma once\n", "")
        return re.sub(r'#include "(.+)"\n', lambda m: read(m[1]), text)

    return read(name)


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    spec = find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = [p for root in roots for p in sorted(root.glob("*/lib/libnvrtc.so.*"))]
    major = (torch.version.cuda or "").split(".")[0]
    for path in [*map(str, found), f"libnvrtc.so.{major}", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


@functools.cache
def _compiler() -> str | None:
    """Name and version of what compiles; None if nothing is there."""
    library = _nvrtc()
    if library is not None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"NVRTC {major.value}.{minor.value}"
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    return f"nvcc {version.strip().splitlines()[-1] if version.strip() else 'of unknown version'}"


def status() -> str:
    """What compiles the CUDA kernels, in words."""
    compiler = _compiler()
    return MISSING if compiler is None else f"CUDA kernels compiled by {compiler}"


def available() -> bool:
    return _compiler() is not None


def compile_cubin(name: str, arch: int) -> Path:
    """The machine code of ops/cuda/`name` for sm_`arch`, from the cache where it is there.

    Two processes never compile at once, and a file appears whole or not at all. Raises `CompileError` with the
    compiler's words, or when the cache can't be written.
    """
    compiler = _compiler()
    if compiler is None:
        raise CompileError(MISSING)
    text = source(name)
    key = "\n".join([text, *FLAGS, compiler, str(arch)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    target = cache_folder() / f"{Path(name).stem}-sm_{arch}-{digest}.cubin"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.is_file():
                with atomic_path(target) as out:
                    _compile(text, name, arch, out)
    except OSError as e:
        raise CompileError(
            f"can't keep machine code in {target.parent} ({e}); set XDG_CACHE_HOME to a folder that can be written"
        ) from e
    return target


def _compile(text: str, name: str, arch: int, out: Path) -> None:
    library = _nvrtc()
    if library is None:
        _by_nvcc(text, arch, out)
    else:
        out.write_bytes(_by_nvrtc(library, text, name, arch))


def _by_nvcc(text: str, arch: int, out: Path) -> None:
    command = ["nvcc", *FLAGS, f"-arch=sm_{arch}", "-cubin", "-x", "cu", "-", "-o", str(out)]
    built = subprocess.run(command, input=text, capture_output=True, text=True)
    if built.returncode:
        raise CompileError(f"nvcc failed: {built.stderr.strip()[:2000]}")


def _by_nvrtc(library: ctypes.CDLL, text: str, name: str, arch: int) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None):
        raise CompileError("NVRTC could not be started")
    try:
        flags = [flag.encode() for flag in (*FLAGS, f"--gpu-architecture=sm_{arch}")]
        if library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags)):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise CompileError(f"NVRTC failed: {log.value.decode(errors='replace').strip()[:2000]}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
