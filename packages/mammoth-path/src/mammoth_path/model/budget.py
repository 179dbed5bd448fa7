"""How many parameters MAMMOTH has, and the rank that a budget allows.

Letters: D encoder width, D_out output width, d_s slot width, E experts, S slots an expert, H heads, r rank.
"""

from mammoth_path.errors import ConfigError


def linear_parameters(dim_in: int, dim_out: int) -> int:
    """The task-specific layer that MAMMOTH replaces: D·D_out weights and D_out biases."""
    return dim_in * dim_out + dim_out


def mammoth_parameters(
    dim_in: int,
    dim_out: int,
    *,
    experts: int,
    slots: int,
    heads: int,
    slot_dim: int,
    rank: int,
    share: bool = True,
) -> int:
    """Exact count: query projection, norms, slots, both factors with biases, output norm."""
    owners = 1 if share else experts
    return (
        dim_in * slot_dim
        + slot_dim
        + slot_dim
        + slot_dim // heads
        + experts * slots * slot_dim
        + owners * rank * (slot_dim + heads)
        + rank * experts * dim_out
        + experts * dim_out
        + experts * dim_out
    )


def auto_rank(dim_in: int, dim_out: int, *, experts: int, slot_dim: int) -> int:
    """The paper's budget, D·D_out = D·d_s + r·d_s + E·r·D_out, which leaves out slots, norms and biases.

    Raises `ConfigError` when no rank of at least 1 fits, as whenever D_out <= d_s.
    """
    rank = round((dim_in * dim_out - dim_in * slot_dim) / (slot_dim + experts * dim_out))
    if rank < 1:
        raise ConfigError(
            f"rank='auto' gives {rank} for input_dim={dim_in}, dim={dim_out}, slot_dim={slot_dim}, "
            f"num_experts={experts}: the query projection alone takes {dim_in * slot_dim} of {dim_in * dim_out} weights; "
            "choose slot_dim below dim, fewer experts, or a rank"
        )
    return rank


def matched_rank(
    dim_in: int, dim_out: int, *, experts: int, slots: int, heads: int, slot_dim: int, share: bool = True
) -> int:
    """The largest rank whose exact parameter count does not exceed the linear layer's."""
    counts = {"experts": experts, "slots": slots, "heads": heads, "slot_dim": slot_dim, "share": share}
    rest = mammoth_parameters(dim_in, dim_out, rank=0, **counts)
    per_rank = mammoth_parameters(dim_in, dim_out, rank=1, **counts) - rest
    rank = (linear_parameters(dim_in, dim_out) - rest) // per_rank
    if rank < 1:
        raise ConfigError(
            f"rank='match' cannot be met: without its low-rank factors MAMMOTH has {rest} parameters and the linear "
            f"layer {linear_parameters(dim_in, dim_out)}; choose a smaller slot_dim, fewer experts or slots, or a rank"
        )
    return rank


def mlp_width(dim_in: int, dim_out: int, parameters: int) -> int:
    """Hidden width of a two-layer MLP that has at most `parameters` parameters (at least 1)."""
    return max(1, (parameters - dim_out) // (dim_in + dim_out + 1))
