"""One expert layer of three published models beside torch's and transformers' ways, and beside the GPU's own ceilings.

Shapes: T tokens, S = T·K rows, D width, F hidden width, E experts, K experts of a token.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from shared_moe.errors import RefusedError
from shared_moe.gpu.check import check_ops
from shared_moe.ops import grouped_ffn

TOKENS = (8, 512, 8192, 65536)
TRAINED = 8192
"""Fewest tokens for which the backward pass is timed too."""

LOOPED = 512
"""Most tokens for which the loop over experts is timed."""

BUDGET = 300.0
"""Seconds after which no further cell begins."""

Timer = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True)
class Shape:
    """One expert layer: width, hidden width of an expert, experts, experts of a token."""

    dim: int
    hidden: int
    experts: int
    top_k: int


MODELS = {
    "OLMoE-1B-7B": Shape(2048, 1024, 64, 8),
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8),
    "DeepSeek-V3": Shape(7168, 2048, 256, 8),
}
"""From the models' published configurations; shared experts and routers are left out."""


@dataclass(frozen=True)
class Ceilings:
    """What this device reached in this run: bytes a second of a copy, FLOPs a second of a large bf16 product."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Cell:
    """Milliseconds of each way, and ours as a share of the roofline: the time that bytes or FLOPs need at the ceilings."""

    model: str
    tokens: int
    backward: bool
    milliseconds: dict[str, float]
    bound: str
    roofline: float

    @property
    def ahead(self) -> float:
        """The fastest other way's time over ours."""
        return min(t for name, t in self.milliseconds.items() if name != OURS) / self.milliseconds[OURS]


OURS = "shared_moe"


def do_bench(run: Callable[[], Any]) -> float:
    """Median milliseconds of a call, the cache flushed between calls."""
    from triton import testing

    times: Any = testing.do_bench(run, warmup=50, rep=200, return_mode="all")
    return statistics.median(times)


def measure_ceilings(device: torch.device | str, timer: Timer = do_bench, side: int = 8192) -> Ceilings:
    """The best copy and the best product of (side, side) bf16 matrices that torch does here."""
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product = timer(lambda: a @ b)
    source = torch.empty(16 * side * side, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy = timer(lambda: target.copy_(source))
    return Ceilings(2 * source.numel() / (copy * 1e-3), 2 * side**3 / (product * 1e-3))


def floor_ms(
    shape: Shape, visited: int, tokens: int, backward: bool, ceilings: Ceilings
) -> tuple[float, str]:
    """(least milliseconds, "bytes" or "flops"): weights of the visited experts and tokens cross memory once a pass.

    Forward reads weights and x and writes y. Backward reads the weights and the rows' hidden values again and writes
    the gradients of all weights, and does twice the FLOPs.
    """
    matrices, S = 3 * shape.dim * shape.hidden, tokens * shape.top_k
    read = 2 * (visited * matrices + 2 * tokens * shape.dim)
    flops = 2 * S * matrices
    if backward:
        hidden = 2 * 2 * S * shape.hidden
        read += 2 * (visited + shape.experts) * matrices + 2 * 2 * tokens * shape.dim + 2 * hidden
        flops *= 3
    by = {"bytes": read / ceilings.bytes * 1e3, "flops": flops / ceilings.flops * 1e3}
    bound = max(by, key=lambda name: by[name])
    return by[bound], bound


def grouped_mm_layer(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """torch's grouped_mm with the usual glue: sort, gather, two products, SwiGLU, weight, add up by index."""
    K = ids.shape[1]
    order = ids.reshape(-1).argsort(stable=True)
    ends = torch.bincount(ids.reshape(-1), minlength=len(gate_up)).cumsum(0).to(torch.int32)
    token = order // K
    gate, up = nnf.grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    rows = nnf.grouped_mm(nnf.silu(gate) * up, down.transpose(1, 2), offs=ends)
    rows = rows * weights.reshape(-1)[order, None].to(rows.dtype)
    return torch.zeros_like(x).index_add(0, token, rows)


def ways(
    shape: Shape, tokens: int, gate_up: nn.Parameter, down: nn.Parameter
) -> dict[str, Callable[..., Tensor]]:
    """Name -> f(x, ids, weights) -> y, ours first; transformers' where it is installed."""
    found: dict[str, Callable[..., Tensor]] = {
        OURS: lambda x, ids, w: grouped_ffn(x, gate_up, down, ids, w),
        "torch grouped_mm": lambda x, ids, w: grouped_mm_layer(x, gate_up, down, ids, w),
    }
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError:
        return found

    config = Qwen3MoeConfig(
        hidden_size=shape.dim, moe_intermediate_size=shape.hidden, num_experts=shape.experts
    )
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = gate_up, down

    def theirs(implementation: str) -> Callable[..., Tensor]:
        def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            experts.config._experts_implementation = implementation
            return experts(x, ids, weights)

        return forward

    found["transformers grouped_mm"] = theirs("grouped_mm")
    if tokens <= LOOPED:
        found["transformers eager"] = theirs("eager")
    return found


def measure_cell(
    model: str,
    shape: Shape,
    tokens: int,
    backward: bool,
    device: torch.device | str,
    ceilings: Ceilings,
    timer: Timer = do_bench,
    seed: int = 0,
) -> Cell:
    """Times every way on the same bf16 tensors and the same uniformly random routing."""
    g = torch.Generator(device=device).manual_seed(seed)

    def rand(*size: int, scale: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=scale, generator=g)

    E, D, F = shape.experts, shape.dim, shape.hidden
    x = rand(tokens, D).requires_grad_(backward)
    gate_up = nn.Parameter(rand(E, 2 * F, D, scale=D**-0.5), backward)
    down = nn.Parameter(rand(E, D, F, scale=F**-0.5), backward)
    scores = torch.rand(tokens, E, device=device, generator=g)
    weights, ids = scores.softmax(1).topk(shape.top_k)
    weights = weights.bfloat16().requires_grad_(backward)
    grad = rand(tokens, D)
    milliseconds = {}
    for name, forward in ways(shape, tokens, gate_up, down).items():

        def run(forward: Callable[..., Tensor] = forward) -> None:
            with torch.set_grad_enabled(backward):
                y = forward(x, ids, weights)
            if backward:
                y.backward(grad)
                x.grad = weights.grad = gate_up.grad = down.grad = None

        milliseconds[name] = timer(run)
    least, bound = floor_ms(shape, len(ids.unique()), tokens, backward, ceilings)
    return Cell(model, tokens, backward, milliseconds, bound, least / milliseconds[OURS])


def bench_gpu(seed: int = 0) -> dict[str, Any]:
    """Checks and timings on the first GPU, in under six minutes: {"device", "checks", "ceilings", "cells", "left_out"}.

    Raises `RefusedError` where there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RefusedError(
            "bench --gpu needs a CUDA GPU and torch finds none; `shared-moe doctor` says why, and `shared-moe bench` "
            "times the CPU"
        )
    started = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    checks = list(check_ops(device, seed=seed))
    ceilings = measure_ceilings(device)
    cells, left_out = [], []
    for model, tokens, backward in plan():
        title = f"{model}, {tokens} tokens{', training' if backward else ''}"
        if time.monotonic() - started > BUDGET:
            left_out.append(f"{title}: out of time")
            continue
        try:
            cells.append(measure_cell(model, MODELS[model], tokens, backward, device, ceilings, seed=seed))
        except torch.OutOfMemoryError:
            left_out.append(f"{title}: does not fit this GPU")
        torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "checks": [asdict(c) | {"passed": c.passed} for c in checks],
        "ceilings": asdict(ceilings),
        "cells": [asdict(c) | {"ahead": c.ahead} for c in cells],
        "left_out": left_out,
    }


def plan() -> Iterator[tuple[str, int, bool]]:
    """(model, tokens, backward) of every cell: the small models first, so that a slow GPU still answers for them."""
    for model in MODELS:
        for tokens in TOKENS:
            yield model, tokens, False
            if tokens >= TRAINED:
                yield model, tokens, True


def describe(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    ceilings = result["ceilings"]
    names = list(dict.fromkeys(name for c in result["cells"] for name in c["milliseconds"]))
    lines = [
        f"{result['device']}, torch {result['torch']}; ceilings of this run: copy {ceilings['bytes'] / 1e12:.2f} TB/s, "
        f"bf16 product {ceilings['flops'] / 1e12:.0f} TFLOP/s",
        "",
        "| op | backend | dtype | error | allowed | |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {c['op']} | {c['backend']} | {c['dtype']} | {c['error']:.1e} | {c['limit']:.1e} | "
            f"{'ok' if c['passed'] else '**WRONG**'} |"
            for c in result["checks"]
        ),
        "",
        f"| model | tokens | pass | {' | '.join(f'{n}, ms' for n in names)} | best other / ours | roofline | bound |",
        "| --- |" + " --- |" * (len(names) + 5),
    ]
    for c in result["cells"]:
        times = [f"{c['milliseconds'][n]:.3f}" if n in c["milliseconds"] else "-" for n in names]
        way = "training" if c["backward"] else "forward"
        shares = f"{c['ahead']:.2f} | {100 * c['roofline']:.0f} % | {c['bound']}"
        lines.append(f"| {c['model']} | {c['tokens']} | {way} | {' | '.join(times)} | {shares} |")
    return "\n".join([*lines, *(f"\nLeft out: {why}" for why in result["left_out"])])
