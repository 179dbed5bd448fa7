"""Speed of the expert layer on the CPU beside the ways it is done today, in one run.

    python shared-moe/benchmarks/moe_cpu.py [--rounds 5] [--cells A,B,"decode A","decode B"] [--no-memory]

Every method gets the same weights, tokens and routing. Times are CPU time of one thread (`time.process_time`), the
minimum over interleaved rounds of which the first is the warm-up; each is given as a ratio to one dense SwiGLU MLP on
the same T·K rows (the same active FLOPs). A method over four times as slow as the fastest runs once. Peak memory is the
growth of the resident set over one call in a fresh process.

Cells: A is d=1024 ff=2048 T=2048, B is d=256 ff=512 T=2048, decode is T=8; all with 32 experts, 4 a token. For decode
the dense network reads one expert's weights only, so its column is no limit there.

A second table gives decode with int8 weights beside bfloat16's best known and torch's own int8 product: the limit there
is a pure read of the experts' bytes (their sum as 64-bit integers). These are medians of the interleaved rounds.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shared_moe import native
from shared_moe.ops import grouped_ffn, int8_ffn, quantize_int8

EXPERTS, TOP_K = 32, 4
CELLS = {
    "A": (1024, 2048, 2048),
    "B": (256, 512, 2048),
    "decode A": (1024, 2048, 8),
    "decode B": (256, 512, 8),
}


class Case:
    """One cell's tensors: D width, F hidden width, T tokens."""

    def __init__(self, cell: str, dtype: torch.dtype, skewed: bool):
        D, F, T = CELLS[cell]
        g = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(*shape, generator=g) * 0.02).to(dtype))

        self.gate_up, self.down = parameter(EXPERTS, 2 * F, D), parameter(EXPERTS, D, F)
        self.dense_up, self.dense_down = parameter(2 * F, D), parameter(D, F)
        self.x = torch.randn(T, D, generator=g).to(dtype).requires_grad_()
        self.rows = torch.randn(T * TOP_K, D, generator=g).to(dtype).requires_grad_()
        pull = -torch.arange(EXPERTS).float() / 6 if skewed else torch.zeros(EXPERTS)
        scores = torch.rand(T, EXPERTS, generator=g).log().neg().log().neg() + pull
        weights, self.ids = scores.topk(TOP_K, dim=1)
        self.weights = weights.softmax(1).to(dtype).requires_grad_()
        self.hf_experts: Qwen3MoeExperts | None = None
        self.int8: tuple[Tensor, ...] = ()
        self.load = (
            torch.bincount(self.ids.flatten(), minlength=EXPERTS).max().item() * EXPERTS / self.ids.numel()
        )

    def leaves(self) -> list[Tensor]:
        return [self.x, self.rows, self.gate_up, self.down, self.dense_up, self.dense_down, self.weights]


def hf(implementation: str) -> Callable[[Case], Tensor]:
    """Qwen3-MoE's own experts class on the case's weights."""

    def apply(c: Case) -> Tensor:
        if c.hf_experts is None:
            E, H, D = c.gate_up.shape
            config = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=H // 2, num_experts=E)
            with torch.device("meta"):
                c.hf_experts = Qwen3MoeExperts(config)
            c.hf_experts.gate_up_proj, c.hf_experts.down_proj = c.gate_up, c.down
        c.hf_experts.config._experts_implementation = implementation
        return c.hf_experts(c.x, c.ids, c.weights)

    return apply


def swiglu(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = nnf.linear(x, up).chunk(2, dim=-1)
    return nnf.linear(nnf.silu(gate) * value, down)


def dense(c: Case) -> Tensor:
    return swiglu(c.rows, c.dense_up, c.dense_down)


def index_add_loop(c: Case) -> Tensor:
    y = torch.zeros_like(c.x)
    for e in range(EXPERTS):
        t, k = torch.where(c.ids == e)
        if len(t):
            y = y.index_add(0, t, swiglu(c.x[t], c.gate_up[e], c.down[e]) * c.weights[t, k, None])
    return y


def unbind_loop(c: Case) -> Tensor:
    y = torch.zeros_like(c.x)
    for e, (up, down) in enumerate(zip(c.gate_up.unbind(0), c.down.unbind(0), strict=True)):
        t, k = torch.where(c.ids == e)
        if len(t):
            y = y.index_add(0, t, swiglu(c.x[t], up, down) * c.weights[t, k, None])
    return y


def ours(c: Case) -> Tensor:
    return grouped_ffn(c.x, c.gate_up, c.down, c.ids, c.weights)


METHODS: dict[str, Callable[[Case], Tensor]] = {
    "dense": dense,
    "hf eager": hf("eager"),
    "hf grouped_mm": hf("grouped_mm"),
    "hf batched_mm": hf("batched_mm"),
    "index_add": index_add_loop,
    "unbind loop": unbind_loop,
    "shared_moe": ours,
}


def int8(c: Case) -> Tensor:
    return int8_ffn(c.x, *c.int8, c.ids, c.weights)


def torch_int8(c: Case) -> Tensor:
    """A loop over experts with the int8 product that torch has for the CPU (it wants scales in x's dtype)."""
    gate_up, gate_up_scale, down, down_scale = c.int8
    y = torch.zeros_like(c.x)
    for e in c.ids.unique().tolist():
        t, k = torch.where(c.ids == e)
        h = torch._weight_int8pack_mm(c.x[t], gate_up[e], gate_up_scale[e].to(c.x.dtype))
        gate, up = h.chunk(2, dim=-1)
        rows = torch._weight_int8pack_mm(nnf.silu(gate) * up, down[e], down_scale[e].to(c.x.dtype))
        y = y.index_add(0, t, rows * c.weights[t, k, None])
    return y


def read_int8(c: Case) -> Tensor:
    hit = c.ids.unique().tolist()
    return torch.stack([w[e].view(torch.int64).sum() for w in (c.int8[0], c.int8[2]) for e in hit])


def read_weights(c: Case) -> Tensor:
    hit = c.ids.unique().tolist()
    return torch.stack([w[e].view(torch.int64).sum() for w in (c.gate_up, c.down) for e in hit])


INT8_METHODS: dict[str, Callable[[Case], Tensor]] = {
    "hf grouped_mm": hf("grouped_mm"),
    "shared_moe": ours,
    "read of its bytes": read_weights,
    "torch int8": torch_int8,
    "shared_moe int8": int8,
    "read of int8 bytes": read_int8,
}


def print_int8(cells: list[str], rounds: int) -> None:
    print("\ndecode with int8 weights, bf16 tokens: ms, median of interleaved rounds\n")
    print("| cell | " + " | ".join(INT8_METHODS) + " | grouped_mm / int8 | int8 / read |")
    print("| --- |" + " --- |" * (len(INT8_METHODS) + 2))
    for cell in cells:
        case = Case(cell, torch.bfloat16, False)
        case.int8 = (*quantize_int8(case.gate_up), *quantize_int8(case.down))
        times: dict[str, list[float]] = {name: [] for name in INT8_METHODS}
        for _ in range(rounds + 1):
            for name, method in INT8_METHODS.items():
                started = time.process_time()
                with torch.no_grad():
                    method(case)
                times[name].append(time.process_time() - started)
        median = {name: statistics.median(values[1:]) for name, values in times.items()}
        row = [f"{seconds * 1e3:.2f}" for seconds in median.values()]
        row.append(f"{median['hf grouped_mm'] / median['shared_moe int8']:.2f}")
        row.append(f"{median['shared_moe int8'] / median['read of int8 bytes']:.2f}")
        print(f"| {cell} | " + " | ".join(row) + " |", flush=True)


def call(method: Callable[[Case], Tensor], case: Case, train: bool) -> None:
    if not train:
        with torch.no_grad():
            method(case)
        return
    for leaf in case.leaves():
        leaf.grad = None
    y = method(case)
    y.backward(torch.ones_like(y))


def measure(case: Case, names: list[str], train: bool, rounds: int) -> dict[str, float]:
    best = dict.fromkeys(names, float("inf"))
    for round_ in range(rounds + 1):
        fastest = min(best[name] for name in names if name != "dense")
        for name in names:
            if round_ and best[name] > 4 * fastest:
                continue
            started = time.process_time()
            call(METHODS[name], case, train)
            best[name] = min(best[name], time.process_time() - started)
    return best


def peak_mb(name: str, cell: str, dtype: str, train: bool) -> float:
    """Growth of the peak resident set over one call, in a process of its own (Linux)."""
    command = [sys.executable, __file__, "--peak", json.dumps([name, cell, dtype, train])]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def resident_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def print_peak(name: str, cell: str, dtype: str, train: bool) -> None:
    call(METHODS[name], Case("decode B", getattr(torch, dtype), False), train)
    case = Case(cell, getattr(torch, dtype), False)
    gc.collect()
    before = resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    call(METHODS[name], case, train)
    print(resident_mb("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print_peak(*json.loads(args.peak))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, {native.status()}")
    print("ratio to dense (dense: ms); last column: shared_moe against the best other\n")
    print("| cell | " + " | ".join(METHODS) + " | ours / best | peak MB ours, hf grouped_mm |")
    print("| --- |" + " --- |" * (len(METHODS) + 2))
    for cell in args.cells.split(","):
        decode = cell.startswith("decode")
        for dtype in (torch.float32, torch.bfloat16):
            for train in (False,) if decode else (False, True):
                for skewed in (False,) if decode else (False, True):
                    case = Case(cell, dtype, skewed)
                    names = [n for n in METHODS if n != "hf batched_mm" or decode]
                    times = measure(case, names, train, args.rounds * (20 if decode else 1))
                    ratios = {n: times[n] / times["dense"] for n in names}
                    best = min(v for n, v in ratios.items() if n not in ("dense", "shared_moe"))
                    shown = [f"{times['dense'] * 1e3:.1f} ms"]
                    shown += [f"{ratios[n]:.2f}" if n in ratios else "-" for n in list(METHODS)[1:]]
                    memory = "-"
                    if not args.no_memory and not skewed:
                        name = str(dtype).removeprefix("torch.")
                        memory = ", ".join(
                            f"{peak_mb(n, cell, name, train):.0f}" for n in ("shared_moe", "hf grouped_mm")
                        )
                    title = f"{cell} {'bf16' if dtype == torch.bfloat16 else 'fp32'} {'fwd+bwd' if train else 'fwd'}"
                    title += f" skewed {case.load:.1f}x" if skewed else ""
                    row = [title, *shown, f"{ratios['shared_moe'] / best:.2f}", memory]
                    print("| " + " | ".join(row) + " |", flush=True)
    decode = [cell for cell in args.cells.split(",") if cell.startswith("decode")]
    if decode:
        print_int8(decode, args.rounds * 20)


if __name__ == "__main__":
    main()
