import pytest
import torch

from shared_moe.errors import InputError, ShapeError
from shared_moe.ops import slot_mix, slot_unmix
from shared_moe.routing import SlotRouter, SlotRouting


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(**options) -> SlotRouter:
    return SlotRouter(12, 3, 2, **options, generator=seeded()).double()


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(1))


def test_soft_moe_by_hand():
    """One head, unit tokens and unit slots with one learned scale: Puigcerver et al. 2024, section 2."""
    router = build(scale="learned")
    with torch.no_grad():
        router.scale.fill_(3.0)
    x = tokens(2, 7, 12)
    unit = x / x.norm(dim=-1, keepdim=True)
    logits = 3 * unit @ (router.slots[0] / router.slots[0].norm(dim=-1, keepdim=True)).t()
    routing = router(x)
    torch.testing.assert_close(routing.dispatch_BHNS[:, 0], logits.softmax(1))
    torch.testing.assert_close(routing.combine_BHNS[:, 0], logits.softmax(2))
    torch.testing.assert_close(router.mix(x)[:, 0], logits.softmax(1).transpose(1, 2) @ x)
    values = tokens(2, 1, 6, 5)
    torch.testing.assert_close(router.unmix(x, values), logits.softmax(2) @ values[:, 0])


@pytest.mark.parametrize("norm", ["layer", "l2", "none"])
def test_mix_and_unmix_follow_the_stored_weights(norm):
    router = build(heads=3, norm=norm)
    x, mask = tokens(2, 7, 12), torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    routing = router(x, mask)
    z = x.unflatten(-1, (3, 4)).transpose(1, 2)
    for form in ("fused", "reference"):
        expected = torch.einsum("bhns,bhnp->bhsp", routing.dispatch_BHNS, z)
        torch.testing.assert_close(router.mix(x, mask, form=form), expected)
    values = tokens(2, 3, 6, 5)
    expected = torch.einsum("bhns,bhsq->bhnq", routing.combine_BHNS, values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(router.unmix(x, values) * mask[..., None], expected)


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_streamed_form_agrees_with_gradients(chunk):
    z = tokens(2, 3, 11, 4).requires_grad_()
    slots = tokens(3, 5, 4).requires_grad_()
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, 6:] = False
    found = []
    for form in ("reference", "streamed"):
        y = slot_mix(z, slots, scale=scale, mask_BN=mask, form=form, chunk=chunk)
        found.append((y, *torch.autograd.grad(y.square().sum(), [z, slots, scale])))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["fused", "streamed", "reference"])
def test_gradcheck(form):
    z, slots = tokens(1, 2, 5, 3).requires_grad_(), tokens(2, 4, 3).requires_grad_()
    scale = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda z, s, c: slot_mix(z, s, scale=c, form=form, chunk=2), (z, slots, scale)
    )


def test_slots_start_apart():
    few = SlotRouter(16, 2, 3, generator=seeded()).slots[0]
    torch.testing.assert_close(few @ few.t(), torch.eye(6), rtol=0, atol=1e-5)
    many = SlotRouter(4, 5, 5, generator=seeded()).slots
    torch.testing.assert_close(many.norm(dim=-1), torch.ones(1, 25))


def test_half_precision_mixes_in_float32():
    z, slots = torch.randn(1, 2, 9, 4), torch.randn(2, 3, 4)
    half = slot_mix(z.bfloat16(), slots.bfloat16())
    assert half.dtype == torch.bfloat16
    exact = slot_mix(z.bfloat16().float(), slots.bfloat16().float())
    torch.testing.assert_close(half.float(), exact, rtol=1e-2, atol=1e-2)


def test_bad_arguments():
    with pytest.raises(InputError, match="heads is 5"):
        SlotRouter(12, 2, 2, heads=5)
    with pytest.raises(InputError, match=r"dropout is 1\.0"):
        SlotRouter(12, 2, 2, dropout=1.0)
    with pytest.raises(InputError, match="form is 'flash'"):
        slot_mix(tokens(1, 1, 3, 2), tokens(1, 2, 2), form="flash")
    with pytest.raises(ShapeError, match=r"\(B, H, N, S\)"):
        SlotRouting(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))


def test_unmix_pads_narrow_heads_for_the_fused_kernel():
    z, slots, values = tokens(1, 2, 9, 3), tokens(2, 4, 3), tokens(1, 2, 4, 7)
    torch.testing.assert_close(
        slot_unmix(z, slots, values, form="fused"), slot_unmix(z, slots, values, form="reference")
    )
