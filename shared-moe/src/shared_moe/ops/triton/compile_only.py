# pyright: reportArgumentType=false
"""Compile every kernel for a GPU that isn't there, and read what the compiler made of it.

A machine without a driver can't launch, but Triton's compiler and NVIDIA's tools in its wheel run anywhere. Each kernel
is compiled in the configurations that its launcher may choose; `examine` reads registers, spills, shared memory and
the matrix instructions from the machine code.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shared_moe.ops.triton import (
    combine,
    kern,
    launch,
    lowrank,
    rows_gemm,
    sort,
    spectral,
    swiglu_backward_gemm,
    swiglu_gemm,
    tiles,
    topk,
    weight_gemm,
)

ARCHS = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities)."""

REGISTER_LIMIT = 255
MATRIX_INSTRUCTIONS = {"UTCHMMA": "tcgen05", "HGMMA": "wgmma", "HMMA": "mma.sync"}
MATRIX_OF = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
"""The tensor-core instructions of each architecture; tiles of fewer than 64 rows use mma.sync everywhere."""

INT64_POINTERS = frozenset(
    [
        "in_row_ptr",
        "out_row_ptr",
        "token_ptr",
        "g_row_ptr",
        "x_row_ptr",
        "end_ptr",
        "tile_start_ptr",
        "tile_end_ptr",
        "num_tiles_ptr",
        "counts_ptr",
        "start_ptr",
        "total_ptr",
        "ids_ptr",
        "order_ptr",
        "position_ptr",
        "count_ptr",
    ]
)
FLOAT_POINTERS = frozenset(
    [
        "weight_ptr",
        "weights_ptr",
        "dots_ptr",
        "logits_ptr",
        "probs_ptr",
        "gates_ptr",
        "scores_ptr",
        "gamma_ptr",
        "grad_probs_ptr",
        "grad_gates_ptr",
        "grad_logits_ptr",
        "grad_scores_ptr",
        "grad_gamma_ptr",
        "grad_weights_ptr",
    ]
)
INT32_POINTERS = frozenset({"tile_expert_ptr", "expert_ptr"})
FLOATS = frozenset({"scale", "eps"})
ALIGNED = frozenset("NKFDOPRQ")
"""Sizes that are multiples of 16 in real layers, as are all strides."""


@dataclass(frozen=True)
class Case:
    """A kernel with its constants, warps and stages; `rows` of a product's tile, None for other kernels."""

    kernel: Any
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    rows: int | None = None

    @property
    def name(self) -> str:
        return plain(self.kernel).__name__

    @property
    def tile(self) -> str:
        """The block sizes, shortly; "back" for the product with the weights untransposed, the gradient of the rows."""
        blocks = [f"{k[6:]}{v}" for k, v in self.constants.items() if k.startswith("BLOCK_")]
        back = ["back"] if self.constants.get("K_INNER") is False else []
        return " ".join([*back, *blocks, f"w{self.warps}", f"s{self.stages}"])


def plain(kernel: Any) -> Any:
    """The jitted function below an autotuner."""
    return kernel.fn if hasattr(kernel, "configs") else kernel


def type_of(name: str, dtype: str) -> str:
    """The type of a kernel's argument, by the names that all kernels share."""
    if name.endswith("_ptr"):
        for names, element in ((INT64_POINTERS, "i64"), (FLOAT_POINTERS, "fp32"), (INT32_POINTERS, "i32")):
            if name in names:
                return f"*{element}"
        return f"*{dtype}"
    if name.startswith("stride_"):
        return "i64"
    return "fp32" if name in FLOATS else "i32"


def compile_case(case: Case, arch: int, dtype: str = "bf16") -> Any:
    """The compiled kernel (`.asm`, `.metadata`) for sm_`arch`."""
    kernel = plain(case.kernel)
    signature = {
        name: "constexpr" if name in case.constants else type_of(name, dtype) for name in kernel.arg_names
    }
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in case.constants
        and (name.endswith("_ptr") or name.startswith("stride_") or name in ALIGNED)
    }
    source = ASTSource(kernel, signature, case.constants, attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def run_tool(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def examine(case: Case, arch: int, dtype: str = "bf16") -> dict[str, Any]:
    """kernel, tile, arch, registers a thread, shared bytes, spilled bytes a thread, matrix instructions, tma."""
    return examine_binary(case, arch, compile_case(case, arch, dtype))


def examine_binary(case: Case, arch: int, compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = run_tool("cuobjdump", "--dump-resource-usage", cubin.name)
        code = run_tool("nvdisasm", "-c", cubin.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump names no registers of {case.name}: {usage!r}")
    registers, stack, local = (int(g) for g in found.groups())
    kinds = [kind for name, kind in MATRIX_INSTRUCTIONS.items() if re.search(rf"\b{name}\b", code)]
    return {
        "kernel": case.name,
        "tile": case.tile,
        "arch": arch,
        "registers": registers,
        "shared": compiled.metadata.shared,
        "spills": stack + local,
        "mma": "+".join(kinds) or "-",
        "tma": "UTMALDG" in code,
    }


def narrow_offsets(compiled: Any) -> list[str]:
    """Address arithmetic that could overflow: offsets with a product of two 32-bit variables in them.

    A product with a block size counts columns, and a quotient or remainder counts tiles: those are small. The sizes of
    a tensor fit 32 bits each, the product of two need not.
    """
    made_by: dict[str, tuple[str, list[str], str]] = {}
    narrow = []

    def overflows(name: str, seen: set[str]) -> bool:
        if name in seen or name not in made_by:
            return False
        seen.add(name)
        op, operands, result = made_by[name]
        if op == "arith.muli" and "i32" in result and not any(_constant(o) for o in operands):
            return True
        return op in _CARRIES and any(overflows(o, seen) for o in operands)

    def _constant(name: str) -> bool:
        op, operands, _ = made_by.get(name, ("", [], ""))
        return op == "arith.constant" or (op in ("tt.splat", "tt.broadcast") and _constant(operands[0]))

    for line in compiled.asm["ttir"].splitlines():
        found = re.match(r"\s*(%[\w-]+) = \"?([\w.]+)\"?(.*?)( : .*)?$", line.split(" loc(")[0])
        if found is None:
            continue
        name, op, operands, result = found[1], found[2], re.findall(r"%[\w-]+", found[3]), found[4] or ""
        made_by[name] = op, operands, result
        if op == "tt.addptr" and overflows(operands[1], set()):
            narrow.append(line.split(" loc(")[0].strip())
    return narrow


_CARRIES = frozenset(
    [
        "arith.addi",
        "arith.subi",
        "arith.muli",
        "arith.extsi",
        "arith.extui",
        "arith.select",
        "arith.minsi",
        "arith.maxsi",
        "tt.splat",
        "tt.broadcast",
        "tt.expand_dims",
        "tt.trans",
        "tt.reshape",
        "ttg.convert_layout",
    ]
)
"""Operations whose result is as large as their operands allow."""


def cases(arch: int, *, every: bool = False) -> Iterator[Case]:
    """What the launchers may choose on sm_`arch`; without `every` the largest tile and the decoding tile of each."""
    yield Case(tiles.tile_table_kernel, {"BLOCK_M": 128, "BLOCK_T": 16, "BLOCK_E": 64})
    for experts in (64, 1024):
        blocks = {"BLOCK_S": sort.block_rows(experts), "BLOCK_E": experts}
        yield Case(sort.count_kernel, blocks)
        yield Case(sort.place_kernel, blocks)
    for experts, block_k, sigmoid in ((64, 8, False), (256, 8, True), (2048, 16, False)):
        rows = {"BLOCK_T": topk.block_tokens(experts), "BLOCK_E": experts}
        gate = {"K": 8, "SIGMOID": sigmoid, "NORMALISE": True, **rows}
        yield Case(topk.topk_kernel, gate | {"BIAS": sigmoid, "BLOCK_K": block_k})
        yield Case(topk.topk_backward_kernel, gate)
        yield Case(kern.kern_kernel, {"K": 8, "BLOCK_K": block_k, **rows})
        yield Case(kern.kern_backward_kernel, {"K": 8, **rows})
    yield Case(combine.combine_kernel, {"K": 8, "WEIGHTED": True, "BLOCK_T": 4, "BLOCK_D": 512})
    yield Case(combine.combine_backward_kernel, {"K": 8, "BLOCK_S": 4, "BLOCK_D": 512})
    for p, r in ((64, 16), (64, 64), (256, 128)):
        blocks = {"BLOCK_S": 64, "BLOCK_P": p, "BLOCK_R": r, "BLOCK_Q": 64}
        flags = {"SHARED": True, "PRECISION": "ieee"}
        yield Case(lowrank.lowrank_kernel, flags | blocks, lowrank.warps(p, r), rows=64)
    for block_m in (16, 32, 64, 128) if every else (16, 128):
        product = {"PRECISION": "ieee", "BLOCK_M": block_m, "GROUP_M": 8}
        flags = {"GATHER": False, "SCATTER": True, "BIAS": False, "TMA": arch >= 90}
        gemms = launch.gemm_configs()
        for config in _fitting(gemms, block_m, None, arch, 1, 1, every):
            for k_inner in (True, False):
                yield _case(rows_gemm.rows_gemm_kernel, config, flags | {"K_INNER": k_inner} | product)
        for config in _fitting(gemms, block_m, None, arch, spectral.HELD, 1, every):
            yield _case(spectral.spectral_kernel, config, {"K": 4} | product)
        for config in _fitting(gemms, block_m, None, arch, swiglu_gemm.HELD, 2, every):
            yield _case(swiglu_gemm.swiglu_gemm_kernel, config, {"KEEP": True, "TMA": arch >= 90} | product)
        back = swiglu_backward_gemm
        for config in _fitting(back.configs(), block_m, back.COLUMNS, arch, 1, 1, every):
            constants = {"TMA": arch >= 90, "BLOCK_N": back.COLUMNS} | product
            yield _case(back.swiglu_backward_gemm_kernel, config, constants)
    for config in weight_gemm.configs()[: None if every else 1]:
        flags = {"MEAN": 128, "GATHER_G": True, "GATHER_X": False, "PRECISION": "ieee"}
        yield _case(weight_gemm.weight_gemm_kernel, config, flags, rows=128)


def _fitting(
    configs: list[triton.Config],
    block_m: int,
    block_n: int | None,
    arch: int,
    held: int,
    fetched: int,
    every: bool,
) -> list[triton.Config]:
    """The configurations that the launcher would try; without `every` the one with the largest tile."""
    kept = [
        c
        for c in configs
        if launch.fits(c, block_m, block_n or c.kwargs["BLOCK_N"], 2, SHARED_LIMIT[arch], arch, held, fetched)
    ]
    size = {id(c): c.kwargs.get("BLOCK_N", 1) * c.kwargs["BLOCK_K"] for c in kept}
    return kept if every else [max(kept, key=lambda c: size[id(c)])]


def _case(kernel: Any, config: triton.Config, constants: dict[str, Any], rows: int | None = None) -> Case:
    rows = constants["BLOCK_M"] if rows is None else rows
    return Case(kernel, constants | config.kwargs, config.num_warps, config.num_stages, rows)
