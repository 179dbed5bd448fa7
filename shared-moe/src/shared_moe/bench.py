"""A quick side-by-side of one MoE layer on this machine: ours, the ways users would write it, and the dense limit.

Shapes: T tokens, D width, F hidden width, E experts, K chosen.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from shared_moe.errors import InputError
from shared_moe.ops import grouped_ffn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Timing:
    """CPU seconds of one pass, minimum of the rounds, and the ratio to the dense layer of the same active FLOPs."""

    method: str
    seconds: float
    ratio_to_dense: float


def bench(
    tokens: int = 512,
    dim: int = 256,
    hidden: int = 512,
    experts: int = 16,
    top_k: int = 4,
    *,
    dtype: str = "float32",
    backward: bool = False,
    rounds: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Time SwiGLU experts on random tokens, the methods taking turns within each round.

    Returns {"settings", "threads", "timings"}. Raises `InputError` for settings that make no layer.
    """
    if min(tokens, dim, hidden, experts, top_k, rounds) < 1 or top_k > experts:
        raise InputError(
            f"tokens={tokens}, dim={dim}, hidden={hidden}, experts={experts}, top_k={top_k}, rounds={rounds}: expected "
            "at least 1 each and top_k at most experts"
        )
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; there are: {', '.join(DTYPES)}")
    settings = {
        "tokens": tokens,
        "dim": dim,
        "hidden": hidden,
        "experts": experts,
        "top_k": top_k,
        "dtype": dtype,
        "backward": backward,
        "rounds": rounds,
        "seed": seed,
    }
    methods = _methods(tokens, dim, hidden, experts, top_k, DTYPES[dtype], backward, seed)
    best = dict.fromkeys(methods, float("inf"))
    for number in range(rounds + 1):
        for name, run in methods.items():
            started = time.process_time()
            run()
            if number:  # the first round warms up
                best[name] = min(best[name], time.process_time() - started)
    timings = [Timing(name, s, s / max(best["dense"], 1e-9)) for name, s in best.items()]
    return {
        "settings": settings,
        "threads": torch.get_num_threads(),
        "timings": [asdict(t) for t in timings],
    }


def describe(result: dict[str, Any]) -> str:
    """The result as a table for a reader."""
    s = result["settings"]
    what = "forward and backward" if s["backward"] else "forward"
    lines = [
        f"{what}, {s['dtype']}, {result['threads']} threads: {s['tokens']} tokens, width {s['dim']}, "
        f"{s['experts']} experts of {s['hidden']}, {s['top_k']} a token",
        "CPU time of one pass, minimum of "
        f"{s['rounds']} rounds; dense = one layer with the same multiplications",
        "",
        f"{'method':<34}{'ms':>10}{'x dense':>10}",
        *(
            f"{t['method']:<34}{1000 * t['seconds']:>10.2f}{t['ratio_to_dense']:>10.2f}"
            for t in result["timings"]
        ),
    ]
    return "\n".join(lines)


def _methods(T, D, F, E, K, dtype, backward: bool, seed: int) -> dict[str, Callable[[], None]]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g).to(dtype).requires_grad_(backward)
    gate_up = (torch.randn(E, 2 * F, D, generator=g) * D**-0.5).to(dtype).requires_grad_(backward)
    down = (torch.randn(E, D, F, generator=g) * F**-0.5).to(dtype).requires_grad_(backward)
    weights, ids = torch.randn(T, E, generator=g).softmax(1).topk(K)
    weights = weights.to(dtype)
    dense_x = x.detach().repeat_interleave(K, 0).requires_grad_(backward)
    dense_gate_up = gate_up.detach()[0].clone().requires_grad_(backward)
    dense_down = down.detach()[0].clone().requires_grad_(backward)

    def timed(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], None]:
        def run() -> None:
            y = forward()
            if backward:
                torch.autograd.grad(y.sum(), leaves)

        return run

    moe = [x, gate_up, down]
    methods = {
        "dense": timed(
            lambda: _swiglu(dense_x, dense_gate_up, dense_down), [dense_x, dense_gate_up, dense_down]
        ),
        "shared-moe": timed(lambda: grouped_ffn(x, gate_up, down, ids, weights), moe),
        "shared-moe, reference backend": timed(
            lambda: grouped_ffn(x, gate_up, down, ids, weights, backend="reference"), moe
        ),
        "loop over experts with index_add": timed(lambda: _index_add(x, gate_up, down, ids, weights), moe),
    }
    aligned = all(
        width * x.element_size() % 16 == 0 for width in (D, F)
    )  # torch's grouped_mm takes no others
    from_transformers = _transformers_grouped_mm(gate_up, down) if aligned else None
    if from_transformers is not None:
        methods["transformers grouped_mm"] = timed(lambda: from_transformers(x, ids, weights), moe)
    return methods


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = nnf.linear(x, gate_up).chunk(2, -1)
    return nnf.linear(nnf.silu(gate) * up, down)


def _index_add(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        token, slot = torch.where(ids == e)
        out = _swiglu(x[token], gate_up[e], down[e]) * weights[token, slot, None]
        y = y.index_add(0, token, out)
    return y


def _transformers_grouped_mm(gate_up: Tensor, down: Tensor) -> Callable[..., Tensor] | None:
    """transformers' default experts implementation on these weights; None where transformers is not installed."""
    try:
        from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward
    except ImportError:
        return None

    class Experts(torch.nn.Module):
        has_gate, has_bias, has_post_expert_norm, is_transposed, _is_expert_parallel = (
            True,
            False,
            False,
            False,
            False,
        )
        num_experts = gate_up.shape[0]
        act_fn = torch.nn.SiLU()
        _apply_gate = _default_apply_gate

    experts = Experts()
    experts.gate_up_proj, experts.down_proj = gate_up, down
    return lambda *arguments: grouped_mm_experts_forward(experts, *arguments)
