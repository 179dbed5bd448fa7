"""Sorting, combining and the grouped linear map."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_moe.errors import InputError, ShapeError
from shared_moe.ops import combine, grouped_linear, sort_by_expert
from shared_moe.ops.backend import choose_backend, explain_backend, resolve

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9).flatmap(lambda E: st.tuples(st.just(E), st.lists(st.integers(-1, E), max_size=40))))
def test_sort_equals_python_and_is_stable(case):
    E, ids = case
    order, counts = sort_by_expert(torch.tensor(ids, dtype=torch.int64).view(-1, 1), E)
    assert counts.tolist() == [ids.count(e) for e in range(E)]
    expected = sorted((i for i in range(len(ids)) if 0 <= ids[i] < E), key=lambda i: ids[i])
    assert order[: len(expected)].tolist() == expected
    assert sorted(order.tolist()) == list(range(len(ids)))


def test_sort_refuses_bad_ids():
    for wrong in (-2, 4, 2**31 - 1):
        with pytest.raises(InputError, match=str(wrong)):
            sort_by_expert(torch.tensor([[0, wrong]]), 3)
    with pytest.raises(InputError):
        sort_by_expert(torch.tensor([[0]]), 0)
    for bad in (torch.tensor([0]), torch.tensor([[0]], dtype=torch.int32), torch.zeros(1, 1)):
        with pytest.raises(ShapeError):
            sort_by_expert(bad, 3)


def routed(T=11, K=3, E=4, D=10, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, E + 1, (T, K), generator=g)
    order, counts = sort_by_expert(ids, E)
    rows = torch.randn(T * K, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weights = torch.randn(T, K, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return ids, order, counts, rows, weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine_equals_a_plain_loop(dtype):
    ids, order, counts, rows, weights = routed(dtype=dtype)
    expected = torch.zeros(11, 10, dtype=torch.promote_types(dtype, torch.float32))
    where = {int(a): s for s, a in enumerate(order[: counts.sum()])}
    for t in range(11):
        for k in range(3):
            if 0 <= ids[t, k] < 4:
                expected[t] += weights[t, k].detach().to(expected.dtype) * rows[where[t * 3 + k]].detach().to(
                    expected.dtype
                )
    y = combine(rows, order, counts, weights)
    torch.testing.assert_close(y.detach(), expected.to(dtype), rtol=1e-6, atol=1e-6)


def test_combine_gradients_and_operator_contract():
    _, order, counts, rows, weights = routed(T=4, K=2, D=3)
    assert torch.autograd.gradcheck(lambda r, w: combine(r, order, counts, w), (rows, weights))
    torch.library.opcheck(torch.ops.shared_moe.combine.default, (rows, order, counts, weights, "auto"))
    torch.library.opcheck(torch.ops.shared_moe.sort_by_expert.default, (torch.tensor([[0, 1], [-1, 3]]), 3))
    rows.grad = None
    combine(rows, order, counts, weights).sum().backward()
    assert not rows.grad[counts.sum() :].any()


def test_combine_does_not_read_rows_without_an_expert():
    _, order, counts, rows, weights = routed()
    with torch.no_grad():
        rows[counts.sum() :] = float("nan")
    y = combine(rows, order, counts, weights)
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (rows, weights)))


def test_combine_accumulates_in_float32():
    order, counts = sort_by_expert(torch.zeros(1, 513, dtype=torch.int64), 1)
    rows = torch.ones(513, 2, dtype=torch.bfloat16)
    rows[0] = 512  # in bfloat16 512 + 1 = 512
    y = combine(rows, order, counts, torch.ones(1, 513, dtype=torch.bfloat16))
    assert y.tolist() == [[1024.0, 1024.0]]


def test_combine_refuses_what_does_not_fit():
    _, order, counts, rows, weights = routed()
    for bad in (
        (rows[:5], order, counts, weights),
        (rows, order[:5], counts, weights),
        (rows, order.int(), counts, weights),
        (rows, order, counts[:, None], weights),
    ):
        with pytest.raises(ShapeError):
            combine(*bad)
    with pytest.raises(InputError):
        combine(rows, order, counts + 100, weights)


def linear(dtype=torch.float64, counts=(3, 0, 4, 1), rows=10, D=6, F=5):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(len(counts), F, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    b = torch.randn(len(counts), F, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return x, w, torch.tensor(counts), b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_linear_equals_reference(dtype):
    x, w, counts, b = linear(dtype)
    results = []
    for backend in ("torch", "reference"):
        y = grouped_linear(x, w, counts, b, backend=backend)
        results.append([y, *torch.autograd.grad(y.sum(), (x, w, b))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    assert not results[0][0][8:].any()
    assert not results[0][2][1].any()
    torch.testing.assert_close(results[0][0][3:7], x[3:7] @ w[2].t() + b[2])


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_grouped_linear_gradcheck(backend):
    x, w, counts, b = linear()
    assert torch.autograd.gradcheck(
        lambda x, w, b: grouped_linear(x, w, counts, b, backend=backend), (x, w, b)
    )


def test_grouped_linear_operator_contract_and_compile():
    x, w, counts, b = linear(torch.float32)
    torch.library.opcheck(torch.ops.shared_moe.grouped_linear.default, (x, w, counts, "auto"))
    torch._dynamo.reset()
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w, counts, b), grouped_linear(x, w, counts, b))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_linear(x, w, counts, b).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_grouped_linear_refuses_bad_counts(backend):
    x, w, _, _ = linear()
    for bad in ([3, -2, 4, 1], [3, 3, 4, 1], [2**40, 0, 0, 0]):
        with pytest.raises(InputError):
            grouped_linear(x, w, torch.tensor(bad), backend=backend)
    for bad in (torch.tensor([3, 4]), torch.tensor([3, 0, 4, 1], dtype=torch.int32)):
        with pytest.raises(ShapeError):
            grouped_linear(x, w, bad, backend=backend)


def test_an_empty_group_gets_no_gradient():
    """Split sizes for which a grouped product elsewhere left garbage in groups 1 and 4."""
    counts = torch.tensor([162, 0, 2577, 446, 0, 83])
    x = torch.randn(int(counts.sum()), 8).bfloat16()
    w = torch.randn(6, 16, 8).bfloat16().requires_grad_()
    grouped_linear(x, w, counts).sum().backward()
    assert not w.grad[[1, 4]].any()
    assert w.grad[[0, 2, 3, 5]].flatten(1).any(1).all()


def test_the_backend_is_chosen_by_argument_then_environment(monkeypatch):
    monkeypatch.delenv("SHARED_MOE_BACKEND", raising=False)
    assert choose_backend("combine") == "auto"
    assert resolve("combine", "auto", torch.ones(1)) == "torch"
    assert explain_backend("combine")[0] == "torch"
    monkeypatch.setenv("SHARED_MOE_BACKEND", "reference")
    assert choose_backend("combine") == "reference"
    assert explain_backend("combine") == ("reference", "set by SHARED_MOE_BACKEND")
    assert choose_backend("combine", "torch") == "torch"
    monkeypatch.setenv("SHARED_MOE_BACKEND", "cuda")
    assert choose_backend("combine") == "auto"
    assert choose_backend("sample_log_dirichlet") == "cuda"
    monkeypatch.setenv("SHARED_MOE_BACKEND", "nonsense")
    with pytest.raises(InputError, match="SHARED_MOE_BACKEND"):
        choose_backend("combine")
    with pytest.raises(InputError, match="combine has no cuda kernel"):
        choose_backend("combine", "cuda")
    with pytest.raises(InputError, match="grouped_ffn can't run on backend 'triton': the tensor is on cpu"):
        resolve("grouped_ffn", "triton", torch.ones(1))
