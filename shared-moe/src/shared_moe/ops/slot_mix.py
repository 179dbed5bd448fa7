"""Mixing instances into slots: attention whose queries are the slots and whose keys and values are the instances.

    u_s = Σ_n softmax_n(scale · slot_s · z_n) z_n

Shapes: B batch, H heads, N instances, S slots, P head width. Three forms of one function: `reference` stores the
logits (the oracle), `fused` is torch's fused attention, `streamed` walks over the instances in chunks and recomputes
in the backward pass, so that nothing beyond z and its gradient grows with N. On a GPU a CUDA kernel takes the streamed
form, and the fused one where `backend` asks for it: until it has been measured there, torch's attention stays first.
"""

import torch
import torch.nn.functional as nnf
from torch import Tensor

from shared_moe.errors import InputError
from shared_moe.ops.backend import choose_backend, resolve

FORMS = ("fused", "streamed", "reference")
CHUNK = 2048


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def slot_logits(z_BHNP: Tensor, slots_HSP: Tensor, scale: Tensor | float) -> Tensor:
    """(B, H, N, S) in float32 or wider."""
    wide = _wide(z_BHNP)
    return torch.einsum("bhnp,hsp->bhns", z_BHNP.to(wide), slots_HSP.to(wide)) * scale


def keep_mask(mask_BN: Tensor | None, dropped_BHNS: Tensor | None) -> Tensor | None:
    """What each slot may see, broadcastable to (B, H, N, S): real instances less those dropped for it.

    A slot that lost every real instance sees them all again, so that its softmax stays finite.
    """
    if dropped_BHNS is None:
        return None if mask_BN is None else mask_BN[:, None, :, None]
    real = (
        torch.ones_like(dropped_BHNS)
        if mask_BN is None
        else mask_BN[:, None, :, None].expand_as(dropped_BHNS)
    )
    kept = real & ~dropped_BHNS
    return torch.where(kept.any(2, keepdim=True), kept, real)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z_BHNP: Tensor, slots_HSP: Tensor, scale: Tensor, mask_BN: Tensor | None, chunk: int):
        lse_BHS, u_BHSP = stream_slots(z_BHNP, slots_HSP, scale, mask_BN, chunk)
        ctx.save_for_backward(z_BHNP, slots_HSP, scale, lse_BHS, u_BHSP)
        ctx.mask_BN, ctx.chunk = mask_BN, chunk
        return u_BHSP

    @staticmethod
    def backward(ctx, grad_BHSP: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        z_BHNP, slots_HSP, scale, lse_BHS, u_BHSP = ctx.saved_tensors
        grad_z = torch.empty_like(z_BHNP)
        grad_slots = torch.zeros_like(slots_HSP)
        grad_scale = torch.zeros_like(scale)
        mean_BHS = (grad_BHSP * u_BHSP).sum(-1)
        for start in range(0, z_BHNP.shape[2], ctx.chunk):
            z = z_BHNP[:, :, start : start + ctx.chunk]
            raw = torch.einsum("hsp,bhnp->bhsn", slots_HSP, z)
            weight = (raw * scale - lse_BHS[..., None]).exp()
            if ctx.mask_BN is not None:
                weight = weight * ctx.mask_BN[:, None, None, start : start + ctx.chunk]
            grad_logits = weight * (torch.einsum("bhsp,bhnp->bhsn", grad_BHSP, z) - mean_BHS[..., None])
            grad_scale += (grad_logits * raw).sum()
            grad_logits = grad_logits * scale
            grad_slots += torch.einsum("bhsn,bhnp->hsp", grad_logits, z)
            grad_z[:, :, start : start + ctx.chunk] = torch.einsum(
                "bhsn,bhsp->bhnp", weight, grad_BHSP
            ) + torch.einsum("bhsn,hsp->bhnp", grad_logits, slots_HSP)
        return grad_z, grad_slots, grad_scale, None, None


def stream_slots(
    z_BHNP: Tensor, slots_HSP: Tensor, scale: Tensor | float, mask_BN: Tensor | None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """(logsumexp over the instances (B, H, S), the mixed slots (B, H, S, P)), by an online softmax over chunks."""
    B, H, N, P = z_BHNP.shape
    S = slots_HSP.shape[1]
    top = z_BHNP.new_full((B, H, S), float("-inf"))
    total = z_BHNP.new_zeros(B, H, S)
    mixed = z_BHNP.new_zeros(B, H, S, P)
    for start in range(0, N, chunk):
        z = z_BHNP[:, :, start : start + chunk]
        logits = torch.einsum("hsp,bhnp->bhsn", slots_HSP, z) * scale
        if mask_BN is not None:
            logits = logits.masked_fill(~mask_BN[:, None, None, start : start + chunk], float("-inf"))
        new_top = torch.maximum(top, logits.amax(-1))
        finite = new_top.masked_fill(new_top == float("-inf"), 0)
        shrink = (top - finite).exp()
        weight = (logits - finite[..., None]).exp()
        total = total * shrink + weight.sum(-1)
        mixed = mixed * shrink[..., None] + torch.einsum("bhsn,bhnp->bhsp", weight, z)
        top = new_top
    return top + total.log(), mixed / total[..., None]


def _takes_kernel(op: str, backend: str, form: str, z: Tensor, widest: int, dropped: Tensor | None) -> bool:
    """Whether the CUDA kernel runs: heads up to its widest, float32 sums, no dropped logits."""
    chosen = choose_backend(op, backend)
    if form == "reference" or (form == "fused" and chosen != "cuda") or resolve(op, chosen, z) != "cuda":
        return False
    from shared_moe.ops.cuda.slot_mix import WIDTHS

    if widest > WIDTHS[-1]:
        why = f"heads are {widest} wide, more than {WIDTHS[-1]}"
    elif z.dtype != torch.float32:
        why = f"there is no kernel for {z.dtype}"
    elif dropped is not None:
        why = "it has no slot dropout"
    else:
        return True
    if backend == "cuda":
        raise InputError(f"{op} can't run on backend 'cuda': {why}; use backend 'auto' or 'torch'")
    return False


def slot_mix(
    z_BHNP: Tensor,
    slots_HSP: Tensor,
    *,
    scale: Tensor | float = 1.0,
    mask_BN: Tensor | None = None,
    dropped_BHNS: Tensor | None = None,
    form: str = "fused",
    chunk: int = CHUNK,
    backend: str = "auto",
) -> Tensor:
    """u (B, H, S, P): each slot's softmax-weighted mean of the real instances.

    mask_BN: True = real. dropped_BHNS: logits replaced by -inf (slot dropout); it needs the N x S matrix, so the
    streamed form does not take it. Softmax runs in float32 or wider in every form.
    Raises `InputError` for an unknown form, or a backend that can't run here.
    """
    if form not in FORMS:
        raise InputError(f"form is {form!r}; there are: {', '.join(FORMS)}")
    wide = _wide(z_BHNP)
    keep = keep_mask(mask_BN, dropped_BHNS)
    z, slots = z_BHNP.to(wide), slots_HSP.to(wide)
    if form == "streamed" and dropped_BHNS is not None:
        raise InputError("slot dropout needs form='fused' or 'reference'")
    if _takes_kernel("slot_mix", backend, form, z, z.shape[-1], dropped_BHNS):
        from shared_moe.ops.cuda.slot_mix import attend

        queries = (slots * scale).expand(z.shape[0], -1, -1, -1)
        return attend(queries, z, None, mask_BN).to(z_BHNP.dtype)
    if form == "streamed":
        scale = torch.as_tensor(scale, dtype=wide, device=z.device)
        return _Streamed.apply(z, slots, scale, mask_BN, chunk).to(z_BHNP.dtype)
    if form == "reference":
        logits = slot_logits(z, slots, scale)
        if keep is not None:
            logits = logits.masked_fill(~keep, float("-inf"))
        return torch.einsum("bhns,bhnp->bhsp", logits.softmax(2), z).to(z_BHNP.dtype)
    queries = (slots * scale).expand(z.shape[0], -1, -1, -1)
    attend = None if keep is None else keep.transpose(2, 3)
    return nnf.scaled_dot_product_attention(queries, z, z, attn_mask=attend, scale=1.0).to(z_BHNP.dtype)


def slot_unmix(
    z_BHNP: Tensor,
    slots_HSP: Tensor,
    values_BHSQ: Tensor,
    *,
    scale: Tensor | float = 1.0,
    dropped_BHNS: Tensor | None = None,
    form: str = "fused",
    backend: str = "auto",
) -> Tensor:
    """y (B, H, N, Q): each instance's mean of the slots' values, weighted by softmax over the slots."""
    wide = _wide(z_BHNP)
    z, slots, values = z_BHNP.to(wide), slots_HSP.to(wide), values_BHSQ.to(wide)
    widest = max(z.shape[-1], values.shape[-1])
    if _takes_kernel("slot_unmix", backend, form, z, widest, dropped_BHNS):
        from shared_moe.ops.cuda.slot_mix import attend

        return attend(z, (slots * scale).expand(z.shape[0], -1, -1, -1), values).to(z_BHNP.dtype)
    kept = None
    if dropped_BHNS is not None:
        kept = ~dropped_BHNS
        kept = torch.where(kept.any(3, keepdim=True), kept, True)
    if form == "reference":
        logits = slot_logits(z, slots, scale)
        if kept is not None:
            logits = logits.masked_fill(~kept, float("-inf"))
        return torch.einsum("bhns,bhsq->bhnq", logits.softmax(3), values).to(z_BHNP.dtype)
    P, Q = z.shape[-1], values.shape[-1]
    queries = nnf.pad(z, (0, widest - P))  # equal widths keep torch on its fused kernel
    keys = nnf.pad(slots * scale, (0, widest - P)).expand(z.shape[0], -1, -1, -1)
    padded = nnf.pad(values, (0, widest - Q))
    mixed = nnf.scaled_dot_product_attention(queries, keys, padded, attn_mask=kept, scale=1.0)
    return mixed[..., :Q].to(z_BHNP.dtype)
