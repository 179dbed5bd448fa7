"""Feed-forward experts with int8 weights, for inference. Shapes: T tokens, D width, F hidden width, E experts."""

import torch
from torch import Tensor, nn

from shared_moe.experts.ffn import FFNExperts
from shared_moe.ops.int8 import int8_ffn, quantize_int8
from shared_moe.routing.routing import Routing


class Int8Experts(nn.Module):
    """`FFNExperts` with one int8 value a weight and one scale an output channel; runs on the CPU, has no gradient.

    Made by `Int8Experts.quantize(experts)`, or with the sizes of the original (as in `FFNExperts`) to load saved
    tensors into. Convert dtypes before: the scales stay float32.
    """

    gate_up_proj: Tensor
    gate_up_proj_scale: Tensor
    gate_up_proj_bias: Tensor | None
    down_proj: Tensor
    down_proj_scale: Tensor
    down_proj_bias: Tensor | None

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        out_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.gated, self.activation = gated, activation
        shapes = {
            "gate_up_proj": (num_experts, 2 * hidden if gated else hidden, dim),
            "down_proj": (num_experts, dim if out_dim is None else out_dim, hidden),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.zeros(shape[:2]))
            self.register_buffer(f"{name}_bias", torch.zeros(shape[:2], dtype=dtype) if bias else None)

    @classmethod
    @torch.no_grad()
    def quantize(cls, experts: FFNExperts) -> "Int8Experts":
        """Raises `InputError` for weights that are not finite or not on the CPU."""
        E, out_dim, hidden = experts.down_proj.shape
        first, bias = experts.gate_up_proj, experts.gate_up_proj_bias
        with torch.device("meta"):
            quantized = cls(
                first.shape[2],
                hidden,
                E,
                gated=experts.gated,
                activation=experts.activation,
                bias=bias is not None,
                out_dim=out_dim,
            )
        for name in ("gate_up_proj", "down_proj"):
            weight, scale = quantize_int8(getattr(experts, name))
            setattr(quantized, name, weight)
            setattr(quantized, f"{name}_scale", scale)
            if bias is not None:
                setattr(quantized, f"{name}_bias", getattr(experts, f"{name}_bias").detach().clone())
        return quantized

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """(T, D) -> (T, out_dim): the weighted sum of each token's experts."""
        return int8_ffn(
            x_TD,
            self.gate_up_proj,
            self.gate_up_proj_scale,
            self.down_proj,
            self.down_proj_scale,
            routing.expert_ids_TK,
            routing.weights_TK,
            gate_up_bias_EH=self.gate_up_proj_bias,
            down_bias_EO=self.down_proj_bias,
            activation=self.activation,
            gated=self.gated,
        )
