"""A tiny transformers model over ranks."""

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from shared_moe.parallel import ExpertGroup, ddp, full_state, spread_transformers


def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    return Qwen3MoeForCausalLM(config)


def tokens() -> Tensor:
    return torch.randint(0, 40, (4, 12), generator=torch.Generator().manual_seed(3))


def train(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses on this rank's half of the batch, and the weights afterwards."""
    group = ExpertGroup(timeout_s=40)
    spread = model()
    spread_transformers(spread, group)
    parallel = ddp(spread)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.5)
    losses = []
    for _ in range(steps):
        ids = tokens().chunk(group.size)[group.rank]
        optimizer.zero_grad()
        loss = parallel(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, full_state(parallel)
