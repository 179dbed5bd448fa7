"""int8 experts: what is rounded, how far results can lie off, and that every path computes the same."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_moe import hub, native
from shared_moe.errors import InputError, ShapeError
from shared_moe.experts import FFNExperts, Int8Experts
from shared_moe.ops import grouped_ffn, int8, int8_error_bound, int8_ffn, int8_linear, quantize_int8
from shared_moe.routing import Routing

SHAPES = [(1, 1), (5, 7), (32, 64), (33, 129), (1030, 6), (512, 4), (544, 9)]
"""(D, H): below, at and past the blocks and vectors of the native pass."""


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def case(T=9, E=5, D=48, F=20, K=2, gated=True, seed=0, out=None):
    """x, gate_up, down, ids, weights in float64."""
    g = generator(seed)
    x = torch.randn(T, D, generator=g, dtype=torch.float64)
    gate_up = torch.randn(E, 2 * F if gated else F, D, generator=g, dtype=torch.float64) * D**-0.5
    down = torch.randn(E, out or D, F, generator=g, dtype=torch.float64) * F**-0.5
    weights, ids = torch.rand(T, E, generator=g, dtype=torch.float64).topk(K)
    return x, gate_up, down, ids, weights


def quantized(gate_up, down):
    return *quantize_int8(gate_up), *quantize_int8(down)


def widened(q, scale):
    return q.double() * scale.double()[..., None]


def without_native(monkeypatch):
    monkeypatch.setattr(native, "int8_linear", lambda *a: False)
    monkeypatch.setattr(native, "int8_swiglu", lambda *a: False)


@pytest.fixture(params=["native", "torch"])
def path(request, monkeypatch):
    """Both the native passes and what runs without a compiler."""
    if request.param == "torch":
        without_native(monkeypatch)
    return request.param


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([1e-44, 1e-30, 1e-3, 1.0, 1e30]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_weights_are_off_by_at_most_half_a_step(seed, size, dtype):
    weight = (torch.randn(3, 4, 17, generator=generator(seed)) * size).to(dtype)
    weight[0, 1] = 0
    q, scale = quantize_int8(weight)
    assert q.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert q.abs().max() <= 127
    assert scale[0, 1] == 0
    assert not q[0, 1].any()
    step = scale.double()[..., None]
    # scales are float32: below 1e-38 they lose digits, elsewhere the seventh
    assert ((weight.double() - step * q).abs() <= step / 2 * (1 + 2e-5) + 127 * 1e-45).all()


def test_the_largest_weight_of_a_row_is_127_steps():
    weight = torch.randn(2, 6, 30, generator=generator())
    q, scale = quantize_int8(weight)
    assert (q.abs().amax(2) == 127).all()
    torch.testing.assert_close(scale, weight.abs().amax(2) / 127)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_linear_multiplies_by_the_quantized_weights(shape, dtype, path):
    D, H = shape
    counts = torch.tensor([3, 0, 1, int8.FEW_ROWS + 3, 6])
    x = torch.randn(int(counts.sum()) + 2, D, generator=generator(1)).to(dtype)
    q, scale = quantize_int8(torch.randn(5, H, D, generator=generator(2)) * D**-0.5)
    bias = torch.randn(5, H, generator=generator(3)).to(dtype)
    parts = x.double().split([*counts.tolist(), 2])
    expected = torch.cat(
        [
            *(rows @ w.t() + b for rows, w, b in zip(parts, widened(q, scale), bias.double(), strict=False)),
            torch.zeros(2, H),
        ]
    )
    y = int8_linear(x, q, scale, counts, bias)
    assert y.dtype == dtype
    eps = max(torch.finfo(dtype).eps, 1e-4)  # 16-bit rows: 1.5e-5 of a block's largest value
    torch.testing.assert_close(y.double(), expected, rtol=2 * eps, atol=4 * eps)


def test_every_instruction_set_gives_the_same():
    """The source with instruction sets taken away one after another, down to plain C++."""
    counts, D, H = torch.tensor([1, 2, 3, 4, 7]), 700, 11
    x = torch.randn(17, D, generator=generator(1))
    q, scale = quantize_int8(torch.randn(5, H, D, generator=generator(2)))
    expected = int8_linear(x.double(), q, scale, counts)
    results = []
    for missing in ([], ["AVX512VNNI"], ["AVX512BW"], ["AVX512BW", "AVX2"]):
        source = "".join(f"#undef __{name}__\n" for name in missing) + native.source()
        compiled, note = native.compile_library(source, "int8-test")
        if compiled is None:
            pytest.skip(note)
        linear = ctypes.CDLL(str(compiled)).int8_linear
        linear.argtypes = [ctypes.c_int, *native.SIGNATURES["int8_linear"]]
        y = torch.full((17, H), float("nan"))
        pointers = [t.data_ptr() for t in (x, q, scale, counts, y)]
        linear(0, 1, 5, H, D, 100, *pointers)
        results.append(y)
    for y in results:
        torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(y, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 8, int8.FEW_ROWS, int8.FEW_ROWS + 1, 200])
def test_the_layer_computes_with_the_quantized_weights(T, dtype, path):
    x, gate_up, down, ids, weights = case(T=T)
    q = quantized(gate_up, down)
    expected = grouped_ffn(x.to(dtype).double(), widened(*q[:2]), widened(*q[2:]), ids, weights)
    y = int8_ffn(x.to(dtype), *q, ids, weights.to(dtype))
    assert y.dtype == dtype
    eps = max(torch.finfo(dtype).eps, 1e-4)
    torch.testing.assert_close(y.double(), expected, rtol=4 * eps, atol=4 * eps)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(sorted(int8.LIPSCHITZ)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.1, 1.0, 10.0]),
    st.sampled_from([3, 40]),
)
def test_errors_stay_below_the_bound(seed, activation, gated, bias, size, tokens):
    x, gate_up, down, ids, weights = case(T=tokens, gated=gated, seed=seed, out=31)
    g = generator(seed)
    x = x * size
    x[:, 3] *= 300  # an outlier channel, as transformers have
    gate_up[1] *= torch.rand(gate_up.shape[1:], generator=g) ** 8  # and weights of very unequal size
    weights = weights - 0.5
    biases = {}
    if bias:
        biases["gate_up_bias_EH"] = torch.randn(gate_up.shape[:2], generator=g)
        biases["down_bias_EO"] = torch.randn(down.shape[:2], generator=g)
    q = quantized(gate_up, down)
    options = {"activation": activation, "gated": gated}
    y = int8_ffn(x.float(), *q, ids, weights.float(), **options, **biases)
    bound = int8_error_bound(x, *q, ids, weights, **options, **biases)
    names = {"gate_up_bias_EH": "gate_up_bias_EH", "down_bias_EO": "down_bias_ED"}
    exact = grouped_ffn(
        x, gate_up, down, ids, weights, **options, **{names[k]: v.double() for k, v in biases.items()}
    )
    assert bound.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound + 1e-6 * (1 + exact.abs())).all()


def test_with_normal_weights_the_layer_is_off_by_little_over_a_percent():
    x, gate_up, down, ids, weights = case(T=32, E=8, D=512, F=1024, K=4)
    exact = grouped_ffn(x, gate_up, down, ids, weights)
    error = int8_ffn(x.float(), *quantized(gate_up, down), ids, weights.float()) - exact
    assert 0.011 < error.norm() / exact.norm() < 0.016


def test_the_bound_is_reached():
    """Weights halfway between two steps and inputs with the sign of the rounding errors."""
    D = 64
    row = torch.arange(D, dtype=torch.float64) % 50 + 0.501
    row[0] = 127
    x = torch.ones(1, D, dtype=torch.float64)
    x[0, 0] = 0.01
    q, scale = quantize_int8(row.expand(1, 4, D))
    error = (int8_linear(x, q, scale, torch.tensor([1])) - x @ row).abs()
    assert (error > 0.98 * scale / 2 * x.abs().sum()).all()
    identity, one = quantize_int8(torch.eye(4, dtype=torch.float64)[None])
    arguments = (q, scale, identity, one, torch.tensor([[0]]), torch.ones(1, 1))
    y = int8_ffn(x, *arguments, activation="identity", gated=False)
    bound = int8_error_bound(x, *arguments, activation="identity", gated=False)
    assert ((y - x @ row).abs() <= bound).all()
    assert ((y - x @ row).abs() > 0.5 * bound).all()


def test_the_bound_is_nearly_reached_through_swiglu():
    """Two inputs of which one only sets the scale; gate and up both round up, and silu is nearly the identity."""
    gate_up = torch.tensor([[[127, 30.501], [127, 20.501]]], dtype=torch.float64)
    q = quantized(gate_up, torch.ones(1, 1, 1, dtype=torch.float64))
    x, one = torch.tensor([[0, 1]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    exact = grouped_ffn(x, gate_up, one[None], ids, one)
    error, bound = (int8_ffn(x, *q, ids, one) - exact).abs(), int8_error_bound(x, *q, ids, one)
    # the second matrix is one weight, exact, for which the bound allows half a step all the same
    allowed = bound - (q[3].double() / 2) * (31 * 21 + 2 * bound)
    assert 0.8 * allowed < error < bound


@pytest.mark.parametrize("activation", sorted(int8.LIPSCHITZ))
def test_no_activation_is_steeper_than_its_constant(activation):
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64, requires_grad=True)
    from shared_moe.ops.activations import POINTWISE

    (slope,) = torch.autograd.grad(POINTWISE[activation][0](x).sum(), x)
    assert 0.99 * int8.LIPSCHITZ[activation] <= slope.abs().max() <= int8.LIPSCHITZ[activation]


def test_extreme_routing(path):
    x, gate_up, down, ids, weights = case(T=6)
    q = quantized(gate_up, down)
    x, weights = x.float(), weights.float()
    assert int8_ffn(x[:0], *q, ids[:0], weights[:0]).shape == (0, 48)
    nowhere = torch.tensor([[-1, 5]]).expand(6, 2)
    assert not int8_ffn(x, *q, nowhere, weights).any()
    mixed = ids.clone()
    mixed[2] = torch.tensor([-1, 3])
    mixed[3] = torch.tensor([3, 5])
    expected = grouped_ffn(
        x, widened(*q[:2]).float(), widened(*q[2:]).float(), mixed, weights, backend="reference"
    )
    torch.testing.assert_close(int8_ffn(x, *q, mixed, weights), expected, rtol=1e-3, atol=1e-3)
    for wrong in (-2, 6, 2**31 - 1):
        with pytest.raises(InputError, match=str(wrong)):
            int8_ffn(x, *q, torch.full((6, 2), wrong), weights)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("T", [6, int8.FEW_ROWS + 4])
def test_a_token_that_is_not_finite_spoils_itself_alone(bad, T):
    x, gate_up, down, ids, weights = case(T=T)
    q = quantized(gate_up, down)
    x, weights = x.float(), weights.float()
    clean = int8_ffn(x, *q, ids, weights)
    x[2, 7] = bad
    y = int8_ffn(x, *q, ids, weights)
    assert y[2].isnan().all()
    others = torch.arange(T) != 2
    assert torch.equal(y[others], clean[others])


def test_tiny_and_huge_rows():
    q, scale = quantize_int8(torch.randn(1, 8, 40, generator=generator()))
    x = torch.randn(1, 40, generator=generator(1))
    y = int8_linear(x, q, scale, torch.tensor([1]))
    for size in (1e-25, 1e25):
        scaled = int8_linear(x * size, q, scale, torch.tensor([1])) / size
        torch.testing.assert_close(scaled, y, rtol=1e-3, atol=1e-3)
    assert not int8_linear(x * 1e-36, q, scale, torch.tensor([1])).any()
    assert not int8_linear(x * 0, q, scale, torch.tensor([1])).any()


@pytest.mark.parametrize("T", [8, 60])
def test_repeatable_whatever_the_number_of_threads(T):
    x, gate_up, down, ids, weights = case(T=T, D=300, F=256)
    q = quantized(gate_up, down)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            results.append(int8_ffn(x.float(), *q, ids, weights.float()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, results[0]) for y in results)


def test_opcheck():
    x, gate_up, down, ids, weights = case()
    q = quantized(gate_up, down)
    torch.library.opcheck(int8._int8_ffn, (x.float(), *q, None, None, ids, weights.float(), "silu", True))
    counts = torch.tensor([2, 3, 0, 4, 0])
    torch.library.opcheck(int8._int8_linear, (x.float(), *q[:2], counts, None))


def test_compiles_whole_and_for_any_number_of_tokens():
    q = quantized(*case()[1:3])
    compiled = torch.compile(int8_ffn, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (3, 5, 40):
        x, _, _, ids, weights = case(T=T)
        arguments = (x.float(), *q, ids, weights.float())
        with torch.no_grad():
            torch.testing.assert_close(compiled(*arguments), int8_ffn(*arguments))


def test_a_backward_pass_is_refused():
    x, gate_up, down, ids, weights = case()
    q = quantized(gate_up, down)
    x = x.float().requires_grad_()
    with pytest.raises(InputError, match="no gradient"):
        int8_ffn(x, *q, ids, weights.float()).sum().backward()
    with pytest.raises(InputError, match="no gradient"):
        int8_linear(x, *q[:2], torch.tensor([9, 0, 0, 0, 0])).sum().backward()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named(bad):
    weight = torch.ones(3, 4, 5)
    weight[2, 1, 0] = bad
    with pytest.raises(InputError, match=r"expert 2.*row 1"):
        quantize_int8(weight)


@pytest.mark.parametrize(
    "weight",
    [torch.ones(3, 4), torch.ones(2, 3, 4, dtype=torch.int8), torch.ones(2, 0, 4)],
    ids=lambda w: str(w.shape),
)
def test_what_is_no_stack_of_matrices_is_refused(weight):
    with pytest.raises(ShapeError, match="E, H, D"):
        quantize_int8(weight)


def test_another_device_is_refused():
    x, gate_up, down, ids, weights = case()
    q = quantized(gate_up, down)
    for arguments in ((x.to("meta"), *q), (x, q[0].to("meta"), *q[1:])):
        with pytest.raises(InputError, match="CPU"):
            int8_ffn(*arguments, ids, weights)
    with pytest.raises(InputError, match="CPU"):
        quantize_int8(gate_up.to("meta"))


def test_shapes_and_dtypes_that_disagree_are_refused():
    x, gate_up, down, ids, weights = case()
    up, up_scale, down, down_scale = quantized(gate_up, down)
    good = [x, up, up_scale, down, down_scale, ids, weights]
    for place, wrong in [
        (0, x[:, 1:]),
        (0, x.long()),
        (1, up.float()),
        (1, up[:, 1:].contiguous()),
        (1, up.transpose(1, 2)),
        (2, up_scale.bfloat16()),
        (2, up_scale[:, 1:].contiguous()),
        (3, down[1:]),
        (4, down_scale.double()),
        (5, ids.int()),
        (5, ids[1:]),
        (6, weights[:, :1]),
        (6, weights.long()),
    ]:
        with pytest.raises(ShapeError):
            int8_ffn(*[wrong if i == place else value for i, value in enumerate(good)])
    with pytest.raises(ShapeError, match="bias"):
        int8_ffn(*good, gate_up_bias_EH=torch.zeros(5, 3))
    with pytest.raises(ShapeError, match="counts"):
        int8_linear(x, up, up_scale, torch.tensor([9]))
    with pytest.raises(InputError, match="rows"):
        int8_linear(x, up, up_scale, torch.tensor([9, 1, 0, 0, 0]))
    with pytest.raises(InputError, match="activation"):
        int8_ffn(*good, activation="tanh")
    with pytest.raises(InputError, match="gpt_oss"):
        int8_error_bound(*good, activation="gpt_oss")


@pytest.mark.parametrize(
    "options", [{}, {"gated": False, "activation": "gelu"}, {"bias": True, "out_dim": 9}], ids=str
)
def test_experts_of_a_layer(options, tmp_path):
    experts = FFNExperts(24, 40, 6, generator=generator(), **options)
    if options.get("bias"):
        torch.nn.init.normal_(experts.gate_up_proj_bias, generator=generator(1))
        torch.nn.init.normal_(experts.down_proj_bias, generator=generator(2))
    quantized = Int8Experts.quantize(experts)
    x, _, _, ids, weights = case(T=7, E=6, D=24)
    blank = torch.zeros(7, 6)
    routing = Routing(ids, weights.float(), blank, blank, {})
    y, expected = quantized(x.float(), routing), experts(x.float(), routing)
    assert y.shape == expected.shape
    assert 0 < (y - expected).abs().max() < 0.05 * expected.abs().max()
    assert not list(quantized.parameters())
    hub.save_pretrained(
        tmp_path / "experts", quantized, {"sizes": [24, 40, 6]} | options, "# Experts\nRandom."
    )
    tensors, config = hub.load_pretrained(tmp_path / "experts")
    loaded = Int8Experts(*config.pop("sizes"), **config)
    hub.load_weights(loaded, tensors)
    assert torch.equal(loaded(x.float(), routing), y)
    experts.down_proj.data[1, 0, 0] = float("nan")
    with pytest.raises(InputError, match="expert 1"):
        Int8Experts.quantize(experts)
