"""Every kernel compiled for GPUs that aren't here: registers, spills, shared memory, tensor cores, 64-bit offsets."""

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from shared_moe.ops.triton import compile_only, rows_gemm, swiglu_backward_gemm, swiglu_gemm, weight_gemm  # noqa: E402
from shared_moe.ops.triton.compile_only import Case, compile_case, examine_binary, narrow_offsets  # noqa: E402

PRODUCTS = {
    compile_only.plain(kernel).__name__
    for kernel in (
        rows_gemm.rows_gemm_kernel,
        swiglu_gemm.swiglu_gemm_kernel,
        swiglu_backward_gemm.swiglu_backward_gemm_kernel,
        weight_gemm.weight_gemm_kernel,
    )
} | {"spectral_kernel", "lowrank_kernel"}
WITH_DESCRIPTORS = {"rows_gemm_kernel", "swiglu_gemm_kernel", "swiglu_backward_gemm_kernel"}


def check(case: Case, arch: int, dtype: str = "bf16") -> None:
    compiled = compile_case(case, arch, dtype)
    row = examine_binary(case, arch, compiled)
    assert row["spills"] == 0, row
    assert row["registers"] <= compile_only.REGISTER_LIMIT, row
    assert row["shared"] <= compile_only.SHARED_LIMIT[arch], row
    assert narrow_offsets(compiled) == [], row
    if case.name in PRODUCTS:
        assert case.rows is not None
        assert row["mma"] == (compile_only.MATRIX_OF[arch] if case.rows >= 64 else "mma.sync"), row
    else:
        assert row["mma"] == "-", row
    assert row["tma"] == (arch >= 90 and case.name in WITH_DESCRIPTORS), row


@pytest.mark.parametrize("arch", compile_only.ARCHS)
@pytest.mark.parametrize("name", sorted({case.name for case in compile_only.cases(90)}))
def test_compiles_within_the_limits(name, arch):
    for case in compile_only.cases(arch):
        if case.name == name:
            check(case, arch)


def test_float16_and_float32_compile_too():
    case = next(c for c in compile_only.cases(90) if c.name == "rows_gemm_kernel" and c.rows == 16)
    for dtype in ("fp16", "fp32"):
        assert narrow_offsets(compile_case(case, 90, dtype)) == []


@triton.jit
def narrow_kernel(x_ptr, y_ptr, N, K, BLOCK_K: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    tl.store(
        y_ptr + (row * K + k).to(tl.int64), tl.load(x_ptr + row.to(tl.int64) * K + k, mask=k < K), mask=k < K
    )


@triton.jit
def spilling_kernel(x_ptr, y_ptr, N, K, BLOCK_K: tl.constexpr):
    k = tl.arange(0, BLOCK_K)
    held = tl.load(x_ptr + k)
    total = tl.zeros((BLOCK_K, 16), tl.float32) + held[:, None]
    for _ in range(N):
        total = total * total + tl.sum(total, 0)[None, :]
    tl.store(y_ptr + k, tl.sum(total, 1))


def test_a_32_bit_offset_is_found():
    found = narrow_offsets(compile_case(Case(narrow_kernel, {"BLOCK_K": 64}), 80))
    assert len(found) == 1
    assert "tt.addptr" in found[0]


def test_spills_are_found():
    case = Case(spilling_kernel, {"BLOCK_K": 2048})
    assert compile_only.examine(case, 80)["spills"] > 0
