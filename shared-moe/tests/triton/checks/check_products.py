"""Grouped products, the expert layer and the combine against plain loops, over ragged groups."""

import pytest
import torch

from shared_moe.ops import combine, grouped_ffn, grouped_linear, sort_by_expert
from shared_moe.ops.triton import rows_gemm
from shared_moe.ops.triton.tiles import tile_table

KERNELS = (
    "tile_table_kernel",
    "rows_gemm_kernel",
    "weight_gemm_kernel",
    "swiglu_gemm_kernel",
    "swiglu_backward_gemm_kernel",
    "combine_kernel",
    "combine_backward_kernel",
)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3}


def close(found, expected, dtype):
    scale = expected.abs().max().clamp_min(1)
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert ((found.double() - expected.double()).abs().max() <= TOLERANCE[dtype] * scale).item()


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(
    "counts", [[5], [0, 0, 3], [16, 0, 17, 1, 0], [0, 0], [1] * 70, [40, 0] * 65], ids=str
)
def test_the_tile_table_lists_every_row_once(counts, block_m, device):
    table = tile_table(torch.tensor(counts, device=device), sum(counts) + 3, block_m)
    found = [
        (e, row)
        for e, start, end in zip(
            *(t[: int(table.total)].tolist() for t in (table.expert, table.start, table.end)), strict=True
        )
        for row in range(start, min(start + block_m, end))
    ]
    owner = [e for e, n in enumerate(counts) for _ in range(n)]
    assert found == list(zip(owner, range(len(owner)), strict=True))
    assert int(table.total) <= table.most


SHAPES = {
    "one token": {"T": 1, "K": 1, "E": 3, "D": 16, "F": 16},
    "one expert": {"T": 5, "K": 1, "E": 1, "D": 32, "F": 16},
    "odd sizes": {"T": 11, "K": 3, "E": 7, "D": 13, "F": 9},
    "unaligned experts": {"T": 21, "K": 2, "E": 13, "D": 24, "F": 40},
    "several tiles": {"T": 90, "K": 2, "E": 3, "D": 16, "F": 32},
}


def layer(T, K, E, D, F, dtype, device, *, gated=True, bias=False, O=None, ids=None):
    g = torch.Generator().manual_seed(T + E)

    def tensor(*shape):
        return (torch.randn(*shape, generator=g) * 0.4).to(device, dtype).requires_grad_()

    H, O = 2 * F if gated else F, O or D
    leaves = {"x": tensor(T, D), "up": tensor(E, H, D), "down": tensor(E, O, F), "weights": tensor(T, K)}
    if bias:
        leaves |= {"up_bias": tensor(E, H), "down_bias": tensor(E, O)}
    if ids is None:
        ids = torch.randint(-1, E + 1, (T, K), generator=g)
    return leaves, ids.to(device), tensor(T, O).detach()


def run(leaves, ids, grad, backend, dtype=None, activation="silu", gated=True):
    leaves = {n: (t if dtype is None else t.to(dtype)).detach().requires_grad_() for n, t in leaves.items()}
    y = grouped_ffn(
        leaves["x"],
        leaves["up"],
        leaves["down"],
        ids,
        leaves["weights"],
        gate_up_bias_EH=leaves.get("up_bias"),
        down_bias_ED=leaves.get("down_bias"),
        activation=activation,
        gated=gated,
        backend=backend,
    )
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), grad.to(y.dtype))]


def check_layer(problem, dtype, **options):
    found = run(*problem, "triton", **options)
    expected = run(*problem, "reference", torch.float64, **options)
    for a, b in zip(found, expected, strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_layer_and_its_gradients(shape, dtype, device):
    check_layer(layer(**SHAPES[shape], dtype=dtype, device=device), dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "identity"])
def test_other_activations_biases_and_widths(activation, device):
    for gated in (True, False):
        problem = layer(9, 2, 4, 16, 10, torch.float32, device, gated=gated, bias=True, O=12)
        check_layer(problem, torch.float32, activation=activation, gated=gated)


def test_gpt_oss_experts(device):
    check_layer(layer(9, 2, 4, 16, 16, torch.float32, device, bias=True), torch.float32, activation="gpt_oss")


@pytest.mark.parametrize("where", ["all to one", "nowhere", "only the last"])
def test_skewed_and_empty_routing(where, device):
    value = {"all to one": 2, "nowhere": -1, "only the last": 4}[where]
    ids = torch.full((20, 2), value)
    ids[:, 1] = -1
    problem = layer(20, 2, 5, 16, 16, torch.float32, device, ids=ids)
    check_layer(problem, torch.float32)
    _, _, grad_up, grad_down, _ = run(*problem, "triton")
    idle = [e for e in range(5) if e != value]
    assert not grad_up[idle].any()
    assert not grad_down[idle].any()


def test_no_tokens(device):
    leaves, ids, _grad = layer(1, 2, 3, 16, 16, torch.float32, device)
    leaves = leaves | {"x": leaves["x"][:0], "weights": leaves["weights"][:0]}
    y = grouped_ffn(leaves["x"], leaves["up"], leaves["down"], ids[:0], leaves["weights"], backend="triton")
    assert y.shape == (0, 16)


def test_repeated_runs_agree_bit_for_bit(device):
    problem = layer(30, 3, 5, 16, 24, torch.float32, device)
    first, second = run(*problem, "triton"), run(*problem, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_broken_row_of_another_expert_is_not_read(device):
    """NaN weights of an expert without tokens, and of a neighbour within the same hardware tile, leave no trace."""
    leaves, _, grad = layer(6, 1, 4, 24, 20, torch.float32, device)
    ids = torch.tensor([[1], [1], [3], [3], [1], [3]], device=device)
    clean = run(leaves, ids, grad, "triton")
    for name in ("up", "down"):
        broken = leaves[name].detach().clone()
        broken[[0, 2]] = float("nan")
        leaves[name] = broken
    found = run(leaves, ids, grad, "triton")
    assert all(torch.equal(a, b) for a, b in zip(found[:2], clean[:2], strict=True))


@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("counts", [[3, 0, 18], [0, 0, 1], [0, 0, 0], [7, 7, 7]], ids=str)
def test_grouped_linear(counts, descriptors, dtype, device, monkeypatch):
    if not descriptors:
        monkeypatch.setattr(rows_gemm.launch, "use_descriptors", lambda weight: False)
    g = torch.Generator().manual_seed(0)
    counts = torch.tensor(counts, device=device)
    S = int(counts.sum()) + 2
    x, w = ((torch.randn(*shape, generator=g) * 0.4).to(device, dtype) for shape in ((S, 24), (3, 40, 24)))
    grad = torch.randn(S, 40, generator=g).to(device, dtype)

    def answers(backend, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w)]
        y = grouped_linear(*leaves, counts, backend=backend)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]

    for a, b in zip(answers("triton", dtype), answers("reference", torch.float64), strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize(("T", "K", "E", "D"), [(1, 1, 1, 1), (7, 3, 4, 5), (33, 2, 9, 40)])
def test_combine(T, K, E, D, dtype, device):
    g = torch.Generator().manual_seed(T)
    ids = torch.randint(-1, E + 1, (T, K), generator=g).to(device)
    order, counts = sort_by_expert(ids, E)
    rows, weights = (torch.randn(*s, generator=g).to(device, dtype) for s in ((T * K, D), (T, K)))
    rows[int(counts.sum()) :] = float("nan")
    grad = torch.randn(T, D, generator=g).to(device, dtype)

    def answers(backend, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (rows, weights)]
        y = combine(leaves[0], order, counts, leaves[1], backend=backend)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]

    for a, b in zip(answers("triton", dtype), answers("torch", torch.float64), strict=True):
        close(a, b, dtype)


def test_weight_rows_that_no_hardware_tile_fits(device):
    """Rows that aren't a multiple of 16 bytes go without descriptors."""
    assert not rows_gemm.launch.describable(torch.zeros(2, 4, 9))
    assert rows_gemm.launch.describable(torch.zeros(2, 4, 8))
    assert not rows_gemm.launch.describable(torch.zeros(2, 8, 4).transpose(1, 2))
