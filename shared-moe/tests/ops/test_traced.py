"""Every op traced on a GPU that isn't there: shapes, dtypes and devices of answers and gradients, and no waiting for it.

Autograd's engine asks for the GPU's streams, so the registered backward is called by hand.
"""

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shared_moe.experts.ffn import FFNExperts
from shared_moe.layer import MoE
from shared_moe.ops.sort import sort_by_expert
from shared_moe.routing.kern import KernRouter
from shared_moe.routing.topk import TopKRouter

OPS = torch.ops.shared_moe
T, K, E, D, F = 24, 2, 4, 16, 32
DTYPES = (torch.float32, torch.bfloat16)


class Context:
    """What an op's setup and backward ask of autograd's context."""

    def __init__(self, arguments: tuple):
        self.needs_input_grad = tuple(isinstance(a, Tensor) and a.is_floating_point() for a in arguments)
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Tensor) -> None:
        pass

    def set_materialize_grads(self, _: bool) -> None:
        pass


@pytest.fixture
def gpu():
    with FakeTensorMode(), torch.device("cuda"):
        yield


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def ids() -> Tensor:
    return torch.empty(T, K, dtype=torch.int64)


def trace(op, arguments: tuple, module: str, kind: str = "") -> list[Tensor]:
    """The outputs of the op; checks the gradient of each input against the input."""
    outputs = op(*arguments)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    assert all(o.device.type == "cuda" for o in outputs)
    context = Context(arguments)
    ops = import_module(f"shared_moe.ops.{module}")
    getattr(ops, f"{kind}_setup")(context, arguments, outputs[0] if len(outputs) == 1 else tuple(outputs))
    grads = getattr(ops, f"{kind}_backward")(context, *(torch.empty_like(o) for o in outputs))
    for needed, argument, grad in zip(context.needs_input_grad, arguments, grads, strict=True):
        if not needed:
            assert grad is None
        elif grad is not None:
            assert (grad.shape, grad.dtype, grad.device) == (argument.shape, argument.dtype, argument.device)
    assert sum(g is not None for g in grads) > 0
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_ffn(dtype, bias, gpu):
    biases = (rand(E, 2 * F, dtype=dtype), rand(E, D, dtype=dtype)) if bias else (None, None)
    weights = rand(E, 2 * F, D, dtype=dtype), rand(E, D, F, dtype=dtype)
    arguments = (rand(T, D, dtype=dtype), *weights, *biases, ids(), rand(T, K), "silu", True, True, "auto")
    y, hidden = trace(OPS.grouped_ffn, arguments, "grouped_ffn")
    assert (y.shape, y.dtype) == ((T, D), dtype)
    assert (hidden.shape, hidden.dtype) == ((T * K, 2 * F), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_linear(dtype, gpu):
    arguments = (
        rand(T, D, dtype=dtype),
        rand(E, F, D, dtype=dtype),
        torch.empty(E, dtype=torch.int64),
        "auto",
    )
    (y,) = trace(OPS.grouped_linear, arguments, "grouped_linear")
    assert (y.shape, y.dtype) == ((T, F), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sort_and_combine(dtype, gpu):
    order, counts = sort_by_expert(ids(), E)
    for made, shape in ((order, (T * K,)), (counts, (E,))):
        assert (made.shape, made.dtype, made.device.type) == (shape, torch.int64, "cuda")
    arguments = (rand(T * K, D, dtype=dtype), order, counts, rand(T, K), "auto")
    (y,) = trace(OPS.combine, arguments, "combine")
    assert (y.shape, y.dtype) == ((T, D), dtype)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_topk_gate(sigmoid, gpu):
    arguments = (rand(T, E), None, K, sigmoid, True, 1.0, "auto")
    outputs = trace(OPS.topk_gate, arguments, "topk_route", "_topk")
    assert [tuple(o.shape) for o in outputs] == [(T, K), (T, K), (T, E), (E,)]
    assert outputs[0].dtype == outputs[3].dtype == torch.int64


def test_kern_gate(gpu):
    outputs = trace(OPS.kern_gate, (rand(T, E), rand(), K, 1e-6, "auto"), "topk_route", "_kern")
    assert [tuple(o.shape) for o in outputs] == [(T, K), (T, K), (T, E), (E,)]
    assert outputs[0].dtype == outputs[3].dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
def test_lowrank(dtype, shared, gpu):
    B, H, S, P, R, Q = 2, 3, 5, 16, 8, 24
    down, bias = ((H, P, R), (H, R)) if shared else ((E, H, P, R), (E, H, R))
    shapes = ((B, H, E, S, P), down, bias, (E, H, R, Q), (E, H, Q))
    arguments = (*(rand(*shape, dtype=dtype) for shape in shapes), "auto")
    (v,) = trace(OPS.lowrank_experts, arguments, "lowrank")
    assert (v.shape, v.dtype) == ((B, E, S, H, Q), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_spectral(dtype, gpu):
    maps = (rand(T, D, dtype=dtype), rand(F, 8, dtype=dtype), rand(8, D, dtype=dtype))
    (y,) = trace(
        OPS.spectral_linear,
        (*maps, rand(E, 8), ids(), rand(T, K), "auto"),
        "spectral",
    )
    assert (y.shape, y.dtype) == ((T, F), dtype)


@pytest.mark.parametrize("router", [lambda: TopKRouter(D, E, K), lambda: KernRouter(D, E, K)])
def test_a_layer_never_waits_for_the_gpu(router, gpu):
    """Reading a value back (`.item()`, a shape that depends on the routing) is an error on tensors without values."""
    layer: nn.Module = MoE(router(), FFNExperts(D, F, E))
    y, routing = layer(rand(2, T // 2, D))
    assert (y.shape, y.device.type) == ((2, T // 2, D), "cuda")
    assert routing.expert_ids_TK.shape == (T, K)
