"""The expert layer against plain loops in float64, on every path, and on the inputs that break other libraries."""

import importlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shared_moe import native
from shared_moe.errors import InputError, ShapeError
from shared_moe.ops import ffn_each, ffn_together, grouped_ffn, grouped_linear
from shared_moe.ops.activations import ACTIVATIONS

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
ALL_DTYPES = tuple(TOLERANCE)


class Problem:
    """Random tensors of a layer: T tokens, K slots, E experts, D width, F hidden width, O output width."""

    def __init__(
        self,
        T=37,
        K=3,
        E=5,
        D=16,
        F=24,
        O=None,
        dtype=torch.float64,
        gated=True,
        bias=False,
        ids=None,
        seed=0,
    ):
        g = torch.Generator().manual_seed(seed)
        O = D if O is None else O

        def tensor(*shape):
            values = torch.randn(*shape, generator=g, dtype=torch.float64) * 0.3
            return values.to(dtype).requires_grad_()

        self.gated = gated
        self.x, self.weights = tensor(T, D), tensor(T, K)
        self.up, self.down = tensor(E, 2 * F if gated else F, D), tensor(E, O, F)
        self.up_bias = tensor(E, self.up.shape[1]) if bias else None
        self.down_bias = tensor(E, O) if bias else None
        self.ids = torch.randint(-1, E + 1, (T, K), generator=g) if ids is None else ids
        self.grad = tensor(T, O).detach()

    def leaves(self):
        leaves = (self.x, self.up, self.down, self.weights, self.up_bias, self.down_bias)
        return [t for t in leaves if t is not None]

    def forward(self, activation="silu", backend="torch"):
        return grouped_ffn(
            self.x,
            self.up,
            self.down,
            self.ids,
            self.weights,
            gate_up_bias_EH=self.up_bias,
            down_bias_ED=self.down_bias,
            activation=activation,
            gated=self.gated,
            backend=backend,
        )

    def run(self, **options):
        """Output and every gradient."""
        y = self.forward(**options)
        return [y.detach(), *torch.autograd.grad(y, self.leaves(), self.grad)]


def assert_same(ours, expected, dtype):
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        error = (a.double() - b.double()).abs().max() if a.numel() else torch.zeros(())
        size = b.double().abs().max().item() if b.numel() else 0.0
        assert error <= TOLERANCE[dtype] * max(size, 0.1), f"result {i} is off by {error}"


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_backend_equals_reference(activation, bias, dtype):
    for gated in (True, False) if activation != "gpt_oss" else (True,):
        p = Problem(dtype=dtype, bias=bias, gated=gated)
        assert_same(p.run(activation=activation), p.run(activation=activation, backend="reference"), dtype)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "gpt_oss"])
def test_gradcheck_in_float64(activation, backend):
    p = Problem(T=4, K=2, E=3, D=3, F=2, O=4, bias=True)

    def layer(x, up, down, weights, up_bias, down_bias):
        return grouped_ffn(
            x,
            up,
            down,
            p.ids,
            weights,
            gate_up_bias_EH=up_bias,
            down_bias_ED=down_bias,
            activation=activation,
            backend=backend,
        )

    assert torch.autograd.gradcheck(layer, p.leaves())


def test_reference_equals_the_formula_token_by_token():
    p = Problem(T=6, bias=True)
    rows = []
    with torch.no_grad():
        for t, k in itertools.product(range(6), range(3)):
            e = int(p.ids[t, k])
            if not 0 <= e < 5:
                rows.append(torch.zeros(16, dtype=torch.float64))
                continue
            gate, up = (p.up[e] @ p.x[t] + p.up_bias[e]).chunk(2)
            a = gate / (1 + torch.exp(-gate)) * up
            rows.append(p.weights[t, k] * (p.down[e] @ a + p.down_bias[e]))
        expected = torch.stack(rows).view(6, 3, 16).sum(1)
        torch.testing.assert_close(p.forward(backend="reference"), expected, rtol=1e-12, atol=1e-14)


def test_gpt_oss_activation_equals_transformers():
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers import GptOssConfig

    config = GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=5)
    config._experts_implementation = "eager"
    experts = modeling.GptOssExperts(config).double()
    p = Problem(bias=True, ids=torch.randint(0, 5, (37, 3), generator=torch.Generator().manual_seed(1)))
    with torch.no_grad():
        p.x *= 30  # reaches the clamps
        for name, value in (
            ("gate_up_proj", p.up.transpose(1, 2)),
            ("down_proj", p.down.transpose(1, 2)),
            ("gate_up_proj_bias", p.up_bias),
            ("down_proj_bias", p.down_bias),
        ):
            getattr(experts, name).copy_(value)
        expected = experts(p.x, p.ids, p.weights)
        torch.testing.assert_close(p.forward(activation="gpt_oss"), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("D", "F"), [(64, 96), (63, 33), (129, 65)])
def test_native_passes_equal_torch_passes(D, F, dtype, monkeypatch):
    p = Problem(T=150, D=D, F=F, dtype=dtype)
    with torch.no_grad():
        p.x[3], p.x[4] = 300, -300  # far into both tails of the sigmoid
    with_native = p.run()
    if native._usable(p.x) is None:
        pytest.skip(native.status())
    monkeypatch.setattr(native, "_usable", lambda *tensors: None)
    assert_same(with_native, p.run(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("D", "F"), [(64, 96), (63, 33)])
def test_few_rows_an_expert(D, F, dtype, monkeypatch):
    for T in range(1, 9):  # one to eight rows an expert
        p = Problem(T=T, K=2, E=2, D=D, F=F, dtype=dtype, ids=torch.tensor([[0, 1]] * T))
        with torch.no_grad():
            ours = p.forward()
            assert_same([ours], [p.forward(backend="reference")], dtype)
            monkeypatch.setattr(ffn_each, "FEW_ROWS", 0)
            assert_same([ours], [p.forward()], dtype)
            monkeypatch.undo()


@pytest.mark.parametrize("threads", [2, 3])
def test_results_do_not_depend_on_the_number_of_threads(threads):
    h, grad = torch.randn(900, 2048).bfloat16(), torch.randn(900, 1024).bfloat16()

    def passes():
        out, grad_h, scaled, dots = grad.clone(), h.clone(), grad.clone(), torch.zeros(900)
        native.swiglu_forward(h, out)
        native.swiglu_backward(h, grad, torch.ones(900), grad_h, scaled, dots)
        return [out, grad_h, scaled, dots, native.transposed(h).clone()]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = passes()
        torch.set_num_threads(threads)
        several = passes()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


def bf16_counts():
    return [[7, 0, 12, 4, 0], [0, 0, 0, 0, 0], [23, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ["silu", "gpt_oss"])
def test_grouped_mm_path_equals_reference(activation, bias, monkeypatch):
    """The path that a GPU takes, run on the CPU."""
    monkeypatch.setattr(
        importlib.import_module("shared_moe.ops.grouped_ffn"), "use_grouped_mm", lambda *t: True
    )
    for fill in (None, 2, -1):
        ids = None if fill is None else torch.full((37, 3), fill)
        p = Problem(dtype=torch.bfloat16, bias=bias, ids=ids)
        ours = p.run(activation=activation)
        assert_same(ours, p.run(activation=activation, backend="reference"), torch.bfloat16)
        empty = torch.bincount(p.ids[(p.ids >= 0) & (p.ids < 5)].flatten(), minlength=5) == 0
        assert not ours[2][empty].any()
        assert not ours[3][empty].any()


@pytest.mark.parametrize("counts", bf16_counts())
def test_grouped_mm_path_of_grouped_linear(counts, monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("shared_moe.ops.grouped_linear"), "use_grouped_mm", lambda *t: True
    )
    g = torch.Generator().manual_seed(0)
    x = torch.randn(25, 16, generator=g).bfloat16().requires_grad_()
    w = torch.randn(5, 8, 16, generator=g).bfloat16().requires_grad_()
    results = []
    for backend in ("torch", "reference"):
        y = grouped_linear(x, w, torch.tensor(counts), backend=backend)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), [x, w], allow_unused=True)])
    results[1] = [torch.zeros_like(a) if b is None else b for a, b in zip(*results, strict=True)]
    assert_same(results[0], results[1], torch.bfloat16)


def test_grouped_mm_is_not_chosen_where_it_would_fail():
    from shared_moe.ops.products import fits_grouped_mm

    good = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert fits_grouped_mm(good)
    assert not fits_grouped_mm(torch.zeros(4, 63, dtype=torch.bfloat16))
    assert not fits_grouped_mm(good.t())
    assert not fits_grouped_mm(torch.zeros(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64))
    assert not fits_grouped_mm(good.float())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 20),
    st.integers(1, 6),
    st.integers(1, 7),
    st.integers(1, 19),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_size_equals_reference(T, K, E, D, gated, seed):
    p = Problem(T=T, K=K, E=E, D=D, F=D + 1, gated=gated, seed=seed, dtype=torch.float32)
    assert_same(p.run(), p.run(backend="reference"), torch.float32)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(0, 3, dtype=torch.int64),
        torch.full((9, 3), -1),
        torch.full((9, 3), 5),
        torch.full((9, 3), 4),
        torch.arange(5).repeat(9, 1),
        torch.zeros(1, 1, dtype=torch.int64),
    ],
    ids=["no tokens", "all -1", "all E", "one expert", "k = E", "one token"],
)
def test_extreme_routing(ids, backend):
    T, K = ids.shape
    p = Problem(T=T, K=K, ids=ids)
    y, grad_x, grad_up, grad_down, grad_weights = p.run(backend=backend)
    hit = torch.zeros(5, dtype=torch.bool)
    hit[ids[(ids >= 0) & (ids < 5)]] = True
    assert not grad_up[~hit].any()
    assert not grad_down[~hit].any()
    if hit.any():
        assert grad_up[hit].flatten(1).any(1).all()
    else:
        assert not y.any()
        assert not grad_x.any()
        assert not grad_weights.any()
    assert_same([y], [p.forward(backend="reference")], torch.float64)


def test_a_single_expert_is_a_dense_network():
    p = Problem(E=1, K=1, ids=torch.zeros(37, 1, dtype=torch.int64))
    gate, up = torch.nn.functional.linear(p.x, p.up[0]).chunk(2, dim=1)
    dense = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, p.down[0]) * p.weights
    torch.testing.assert_close(p.forward(), dense, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("wrong", [-2, 6, 2**31 - 1, -(2**63)])
def test_an_id_out_of_range_is_refused(wrong, backend):
    p = Problem()
    p.ids[5, 1] = wrong
    with pytest.raises(InputError, match=str(wrong)):
        p.forward(backend=backend)


def test_wrong_shapes_and_dtypes_are_refused():
    p = Problem()
    x, up, down, ids, w = p.x, p.up, p.down, p.ids, p.weights
    for bad in (
        (x[:, :5], up, down, ids, w),
        (x[0], up, down, ids, w),
        (x, up[:, :-2], down, ids, w),
        (x, up, down[:3], ids, w),
        (x, up, down, ids[:3], w),
        (x, up, down, ids.int(), w),
        (x, up, down, ids, ids),
        (x, up, down, ids, w[:, :2]),
        (x.float(), up, down, ids, w),
        (x, up[:0], down[:0], ids, w),
    ):
        with pytest.raises(ShapeError):
            grouped_ffn(*bad)
    for bias in (torch.zeros(5, 3, dtype=torch.float64), torch.zeros(5, 48)):
        with pytest.raises(ShapeError, match="gate_up_bias"):
            grouped_ffn(x, up, down, ids, w, gate_up_bias_EH=bias)
    with pytest.raises(InputError, match="swish"):
        grouped_ffn(x, up, down, ids, w, activation="swish")
    with pytest.raises(InputError, match="fastest"):
        grouped_ffn(x, up, down, ids, w, backend="fastest")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_stays_with_its_token(dtype):
    p = Problem(dtype=dtype)
    with torch.no_grad():
        p.x[7] = float("nan")
        p.ids[7] = 1
        bad = p.forward().isnan().any(1)
    assert bad.nonzero().flatten().tolist() == [7]


def test_a_weight_without_an_expert_is_never_read():
    p = Problem()
    with torch.no_grad():
        p.weights[(p.ids < 0) | (p.ids == 5)] = float("nan")
    for backend in ("torch", "reference"):
        y, *grads = p.run(backend=backend)
        assert y.isfinite().all()
        assert all(g.isfinite().all() for g in grads)


def test_bitwise_repeatable():
    p = Problem(T=200, D=64, F=32, dtype=torch.bfloat16)
    first = p.run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, p.run(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides_and_alignment(dtype):
    p = Problem(T=33, D=63, F=31, dtype=dtype)
    expected = p.run()

    def strided(t):
        return t.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()

    def unaligned(t):
        base = torch.zeros(t.numel() + 1, dtype=t.dtype)
        base[1:] = t.detach().flatten()
        return base[1:].view(t.shape).requires_grad_()

    for change in (strided, unaligned):
        q = Problem(T=33, D=63, F=31, dtype=dtype)
        q.x, q.up, q.down, q.weights = (change(t) for t in (p.x, p.up, p.down, p.weights))
        q.ids = p.ids.t().contiguous().t()
        assert_same(q.run(), expected, dtype)
        with torch.no_grad():
            q.x, q.ids, q.weights = q.x[:3], q.ids[:3], q.weights[:3]
            assert_same([q.forward()], [expected[0][:3]], dtype)


def test_an_expanded_gradient_is_accepted():
    p = Problem(dtype=torch.float32)
    summed = torch.autograd.grad(p.forward().sum(), p.leaves())
    ones = torch.autograd.grad(p.forward(), p.leaves(), torch.ones(37, 16))
    assert all(torch.equal(a, b) for a, b in zip(summed, ones, strict=True))


def test_only_the_gradients_that_are_needed():
    p = Problem()
    full = p.run()
    for keep in range(4):
        q = Problem()
        for i, leaf in enumerate(q.leaves()):
            leaf.requires_grad_(i == keep)
        (grad,) = torch.autograd.grad(q.forward(), q.leaves()[keep], q.grad)
        torch.testing.assert_close(grad, full[keep + 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_runs_in_its_dtype_and_returns_gradients_in_the_parameters(dtype):
    p = Problem(dtype=torch.float32, bias=True)
    expected = p.run()
    with torch.autocast("cpu", dtype=dtype):
        y = p.forward()
        assert y.dtype == dtype
        assert p.forward(backend="reference").dtype == dtype
        grads = torch.autograd.grad(y, p.leaves(), p.grad.to(dtype))
    for ours, exact in zip([y, *grads], expected, strict=True):
        torch.testing.assert_close(ours.float(), exact, rtol=0.05, atol=0.05)
    assert all(g.dtype == torch.float32 for g in grads)


def test_autocast_leaves_float64_alone_and_a_backward_under_autocast_is_exact():
    p = Problem()
    expected = p.run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(p.run(), expected, torch.float64)
    p = Problem(dtype=torch.float32)
    y, expected = p.forward(), p.run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = torch.autograd.grad(y, p.leaves(), p.grad)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[1:], strict=True))


def test_activation_checkpointing_gives_the_same_gradients():
    p = Problem(dtype=torch.float32)
    y = checkpoint(p.forward, use_reentrant=False)
    grads = torch.autograd.grad(y, p.leaves(), p.grad)
    assert all(torch.equal(a, b) for a, b in zip(grads, p.run()[1:], strict=True))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_opcheck(bias):
    p = Problem(T=6, dtype=torch.float32, bias=bias)
    arguments = (p.x, p.up, p.down, p.up_bias, p.down_bias, p.ids, p.weights, "silu", True, True, "auto")
    torch.library.opcheck(torch.ops.shared_moe.grouped_ffn.default, arguments)
    with torch.no_grad():
        _, hidden = torch.ops.shared_moe.grouped_ffn(*arguments)
        tensors = (p.grad, p.x, p.up, p.down, p.up_bias, p.down_bias, p.ids, p.weights, hidden)
        detached = [t if t is None else t.detach() for t in tensors]
        for needs in itertools.product((True, False), repeat=2):
            torch.library.opcheck(
                torch.ops.shared_moe.grouped_ffn_backward.default, (*detached, "silu", True, *needs, "auto")
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiles_whole_and_for_any_number_of_tokens(dtype):
    torch._dynamo.reset()
    traces = 0

    def counting(graph, inputs):
        nonlocal traces
        traces += 1
        return graph

    layer = torch.compile(grouped_ffn, fullgraph=True, dynamic=True, backend=counting)
    for T in (37, 64, 5):
        p = Problem(T=T, dtype=dtype)
        y = layer(p.x, p.up, p.down, p.ids, p.weights)
        grads = torch.autograd.grad(y, p.leaves(), p.grad)
        assert_same([y.detach(), *grads], p.run(), dtype)
    assert traces == 1


def test_compiles_with_gradients_through_aot_autograd():
    torch._dynamo.reset()
    p = Problem(dtype=torch.float32)
    layer = torch.compile(grouped_ffn, fullgraph=True, backend="aot_eager")
    y = layer(p.x, p.up, p.down, p.ids, p.weights)
    assert_same([y.detach(), *torch.autograd.grad(y, p.leaves(), p.grad)], p.run(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_traces_for_a_gpu_without_one(dtype):
    with FakeTensorMode():
        x = torch.empty(8, 16, device="cuda", dtype=dtype)
        up = torch.empty(5, 48, 16, device="cuda", dtype=dtype)
        down = torch.empty(5, 16, 24, device="cuda", dtype=dtype)
        weights = torch.empty(8, 2, device="cuda", dtype=dtype)
        ids = torch.empty(8, 2, device="cuda", dtype=torch.int64)
        y = grouped_ffn(x, up, down, ids, weights)
        assert (y.shape, y.device.type, y.dtype) == ((8, 16), "cuda", dtype)
        arguments = (x, up, down, None, None, ids, weights)
        _, hidden = torch.ops.shared_moe.grouped_ffn(*arguments, "silu", True, True, "auto")
        grads = torch.ops.shared_moe.grouped_ffn_backward(
            y, *arguments, hidden, "silu", True, True, True, "auto"
        )
        for leaf, grad in zip((x, up, down, weights), (*grads[:3], grads[5]), strict=True):
            assert (grad.shape, grad.dtype, grad.device) == (leaf.shape, leaf.dtype, leaf.device)


def test_grouped_mm_path_does_not_ask_the_device_for_counts(monkeypatch):
    """On a GPU `.tolist()`, `.item()` and `int(tensor)` stall the stream."""
    p = Problem(dtype=torch.bfloat16)
    arguments = (p.x, p.up, p.down, None, None, p.ids, p.weights)
    with torch.no_grad():
        from shared_moe.ops.sort import sort_op

        sorted_ = sort_op(p.ids, 5)
        monkeypatch.setattr(ffn_together, "sort_op", lambda *a: sorted_)
        monkeypatch.setattr(native, "combine", lambda *a: False)

        def refuse(*args, **kwargs):
            raise AssertionError("waited for the device")

        for name in ("tolist", "item", "__int__", "__bool__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        _, hidden = ffn_together.forward(*arguments, "silu", True, True)
        ffn_together.backward(p.grad, *arguments, hidden, "silu", True, True, True)
