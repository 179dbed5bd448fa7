"""Mixing into slots and back, its kernels emulated on the CPU, against torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shared_moe.ops.slot_mix  # noqa: F401  (the module; `ops.slot_mix` is the function)
from shared_moe.errors import InputError
from shared_moe.ops.cuda import slot_mix as kernels
from shared_moe.ops.cuda.slot_mix import WIDTHS, attend, attend_op, num_splits
from shared_moe.ops.slot_mix import slot_mix, slot_unmix


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def expected(q, k, v, mask, grad):
    """Output and gradients in float64; a row that sees no column gives 0."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, *(() if v is None else (v,)))]
    values = leaves[-1]
    logits = leaves[0] @ leaves[1].mT
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -torch.inf)
    weights = torch.where(logits == -torch.inf, 0, logits.softmax(-1))
    out = weights @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def found(q, k, v, mask, grad):
    leaves = [t.detach().requires_grad_() for t in (q, k, *(() if v is None else (v,)))]
    out = attend(leaves[0], leaves[1], None if v is None else leaves[2], mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check(answers, reference) -> None:
    for a, b in zip(answers, reference, strict=True):
        assert (a.double() - b).abs().max() <= 1e-4 * b.abs().max().clamp_min(1)


SHAPES = {
    "one of each": (1, 1, 1, 1, 1),
    "slots from instances": (2, 2, 6, 131, 16),
    "instances from slots": (1, 2, 131, 6, 33),
    "exact tiles": (1, 1, 64, 128, 64),
    "widest": (1, 1, 70, 65, 128),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_output_and_gradients(emulator, walls, shape, shared, masked):
    B, H, R, C, P = SHAPES[shape]
    q, k = rand(B, H, R, P), rand(B, H, C, P, seed=1)
    v = None if shared else rand(B, H, C, max(1, P - 5), seed=2)
    mask = (rand(B, C) > -0.5) if masked else None
    grad = rand(B, H, R, (k if shared else v).shape[3], seed=3)
    check(emulator.orders(lambda: found(q, k, v, mask, grad)), expected(q, k, v, mask, grad))
    assert emulator.launched == {"slot_forward", "slot_backward_rows", "slot_backward_columns"}


@settings(max_examples=15, deadline=None)
@given(
    st.tuples(
        st.integers(1, 2), st.integers(1, 2), st.integers(1, 90), st.integers(1, 90), st.integers(1, 40)
    ),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_shape(emulator, shape, V, masked, seed):
    B, H, R, C, P = shape
    q, k, v = rand(B, H, R, P, seed=seed), rand(B, H, C, P, seed=seed + 1), rand(B, H, C, V, seed=seed + 2)
    mask = (rand(B, C, seed=seed) > 0) if masked else None
    grad = rand(B, H, R, V, seed=seed + 3)
    check(found(q, k, v, mask, grad), expected(q, k, v, mask, grad))


def test_rows_that_see_nothing_give_zeros_and_no_gradient(emulator):
    mask = torch.tensor([[False] * 70, [True] * 70])
    q, k, grad = rand(2, 1, 5, 8), rand(2, 1, 70, 8), rand(2, 1, 5, 8)
    answers = found(q, k, None, mask, grad)
    check(answers, expected(q, k, None, mask, grad))
    for answer in answers:
        assert not answer[0].any()


def test_what_is_masked_has_no_influence(emulator):
    mask = rand(1, 100) > 0
    q, k, grad = rand(1, 1, 5, 8), rand(1, 1, 100, 8), rand(1, 1, 5, 8)
    wild = torch.where(mask[:, None, :, None], k, 1e30)
    for a, b in zip(found(q, k, None, mask, grad), found(q, wild, None, mask, grad), strict=True):
        assert torch.equal(a, b)


def test_large_logits_do_not_overflow(emulator):
    q, k, grad = 40 * rand(1, 1, 6, 16), 40 * rand(1, 1, 80, 16), rand(1, 1, 6, 16)
    answers = found(q, k, None, None, grad)
    assert torch.isfinite(torch.cat([a.flatten() for a in answers])).all()
    torch.testing.assert_close(answers[0].double(), expected(q, k, None, None, grad)[0], rtol=1e-3, atol=1e-2)


def test_long_loops_are_cut_and_put_together(emulator, monkeypatch):
    monkeypatch.setattr(kernels, "FEW_TILES", 1)
    assert num_splits(1, 300) == 5
    mask = torch.zeros(1, 300, dtype=torch.bool)
    mask[:, 100:180] = True  # some shares see no column
    q, k, grad = rand(1, 1, 5, 8), rand(1, 1, 300, 8), rand(1, 1, 5, 8)
    check(found(q, k, None, mask, grad), expected(q, k, None, mask, grad))


def test_any_strides(emulator):
    q, k = rand(5, 2, 1, 8).permute(2, 1, 0, 3), rand(8, 2, 70, 1).permute(3, 1, 2, 0)
    q, grad = q.expand(3, -1, -1, -1), rand(5, 3, 2, 8).permute(1, 2, 0, 3)
    k = k.expand(3, -1, -1, -1)
    check(found(q, k, None, None, grad), expected(q, k, None, None, grad))


def test_opcheck(emulator):
    leaves = [
        t.requires_grad_() for t in (rand(1, 2, 3, 4), rand(1, 2, 5, 4, seed=1), rand(1, 2, 5, 6, seed=2))
    ]
    torch.library.opcheck(attend_op, (*leaves, rand(1, 5) > 0))


@pytest.fixture
def on_gpu(emulator, monkeypatch):
    """The ops take CPU tensors for those of a GPU whose kernels the emulator runs."""
    monkeypatch.setattr("shared_moe.ops.backend.why_not", lambda kernel, x: None)
    emulator.launched.clear()
    return emulator


def test_slot_mix_and_unmix_take_the_kernel_and_agree(on_gpu):
    z, slots, scale = rand(2, 3, 70, 8), rand(3, 5, 8), torch.tensor(0.7)
    values, mask = rand(2, 3, 5, 12), rand(2, 70) > -0.5

    def answers(dtype, **options):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (z, slots, scale, values)]
        u = slot_mix(leaves[0], leaves[1], scale=leaves[2], mask_BN=mask, **options)
        y = slot_unmix(leaves[0], leaves[1], leaves[3], scale=leaves[2], **options)
        return [u.detach(), y.detach(), *torch.autograd.grad(u.square().sum() + y.square().sum(), leaves)]

    reference = answers(torch.float64, form="reference")
    assert not on_gpu.launched
    check(answers(torch.float32, backend="cuda"), reference)
    assert on_gpu.launched == {"slot_forward", "slot_backward_rows", "slot_backward_columns"}


def test_where_the_kernel_is_not_taken(on_gpu):
    z, slots = rand(1, 1, 20, 8), rand(1, 3, 8)
    slot_mix(z, slots)  # torch's attention stays first for the fused form
    slot_mix(z, slots, form="streamed", backend="torch")
    assert not on_gpu.launched
    wide = WIDTHS[-1] + 1
    for match, x, queries, options in (
        ("wide", rand(1, 1, 20, wide), rand(1, 3, wide), {}),
        ("float64", z.double(), slots.double(), {}),
        ("dropout", z, slots, {"dropped_BHNS": torch.zeros(1, 1, 20, 3, dtype=torch.bool)}),
    ):
        with pytest.raises(InputError, match=match):
            slot_mix(x, queries, backend="cuda", **options)
    assert not on_gpu.launched


def test_without_a_gpu_the_kernel_is_refused_by_name():
    with pytest.raises(InputError, match="the tensor is on cpu"):
        slot_mix(rand(1, 1, 20, 8), rand(1, 3, 8), backend="cuda")
