"""Experts spread over ranks. Shapes: T tokens, K slots a token, D width, O output width, R rows received, L experts here."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shared_moe.errors import InputError, MoeError, ShapeError
from shared_moe.ops.backend import autocast
from shared_moe.parallel.group import ExpertGroup, summary
from shared_moe.parallel.itinerary import Itinerary, Tables, plan
from shared_moe.parallel.placement import Placement
from shared_moe.parallel.replicas import copy_from_owners, share
from shared_moe.parallel.rows import collect, exchange, spread
from shared_moe.routing.routing import Routing


class ParallelExperts(nn.Module):
    """The same answers and gradients as `experts`, of which each rank keeps only those that `placement` gives it.

    experts    any experts module whose parameters have one leading row an expert (`FFNExperts`, `AdapterExperts`,
               `LoRAExperts`), whole on every rank; it is cut down in place, and becomes `local`. Where ranks were
               initialised differently, the weights of an expert's first rank count
    placement  by default `Placement.even`
    gradients  "mean" (default): divided by the number of ranks, as DDP and FSDP do to the dense part, so that each rank's
               loss is a mean over its own tokens; "sum": for a loss that is already divided by all ranks' tokens

    Every rank must call it equally often, forward and backward, with no tokens at all if need be.
    Raises `InputError` for experts that can't be cut, `ParallelError` when ranks disagree, die or are late.
    """

    def __init__(
        self,
        experts: nn.Module,
        group: ExpertGroup,
        placement: Placement | None = None,
        *,
        gradients: Literal["mean", "sum"] = "mean",
    ):
        super().__init__()
        shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
        counts = {shape[:1] for shape in shapes.values()}
        if len(counts) != 1 or counts == {()} or any(True for _ in experts.buffers()):
            raise InputError(
                f"{type(experts).__name__} can't be spread over ranks: it needs parameters with one leading row an "
                f"expert and no buffers; it has {shapes}"
            )
        if gradients not in ("mean", "sum"):
            raise InputError(f"gradients is {gradients!r}; it can be 'mean' or 'sum'")
        num_experts = next(iter(shapes.values()))[0]
        placement = Placement.even(num_experts, group.size) if placement is None else placement
        self.local, self.group, self.gradients = experts, group, gradients
        self.layer = next(group.layers)
        group.agree(
            {
                "operation": "build",
                "layer": self.layer,
                "experts": num_experts,
                "shapes": summary(sorted(shapes.items())),
                "placement": placement.digest,
                "gradients": gradients,
            }
        )
        if (placement.num_experts, placement.world_size) != (num_experts, group.size):
            raise InputError(
                f"the placement is for {placement.num_experts} experts on {placement.world_size} ranks; there are "
                f"{num_experts} on {group.size}"
            )
        self.set_placement(placement)
        mine = placement.experts_of(group.rank)
        for parameter in experts.parameters():
            parameter.data = parameter.data[mine]
        if not any(p.is_meta for p in experts.parameters()):
            copy_from_owners(group, placement, [p.data for p in experts.parameters()])

    @property
    def num_experts(self) -> int:
        """Experts of all ranks together."""
        return self.placement.num_experts

    def set_placement(self, placement: Placement) -> None:
        """Take the placement as given; the weights must already lie so (`move_experts` sees to that)."""
        self.placement = placement
        self.common = placement.common_slots(self.group.rank)
        self._tables: dict[torch.device, Tables] = {}

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """(T, D) -> (T, O): the weighted sum of each token's experts, wherever they are."""
        return self._ask(x_TD, routing)  # pyright: ignore[reportCallIssue]

    @torch.compiler.disable
    def _ask(self, x_TD: Tensor, routing: Routing) -> Tensor:
        group = self.group
        (x_TD,) = autocast(x_TD)
        weights_TK = routing.weights_TK
        way = self._plan(x_TD, routing)
        mine = [*way.sends_W, x_TD.requires_grad + 2 * weights_TK.requires_grad]
        numbers_WN = group.agree(self._facts(x_TD, weights_TK), mine)
        receives = numbers_WN[:, group.rank].tolist()
        if torch.is_grad_enabled():
            # ranks meet in the backward pass too: all take part in it if the input of any needs a gradient
            needed = numbers_WN[:, -1].tolist()
            x_TD = _differentiable(x_TD, any(n & 1 for n in needed))
            weights_TK = _differentiable(weights_TK, any(n & 2 for n in needed))

        sends = way.sends_W
        slots_RK = group.exchange(way.slots_RK.int(), sends, receives, "slots").long()
        weights_RK = exchange(
            spread(weights_TK, way.token_R, way.position_TK), group, sends, receives, "weights"
        )
        x_RD = exchange(spread(x_TD, way.token_R, way.position_TK), group, sends, receives, "dispatch")
        y_RO = self._answer(x_RD, slots_RK, weights_RK)
        return collect(exchange(y_RO, group, receives, sends, "combine"), way.token_R, way.position_TK)

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, rank={self.group.rank}, here={self.placement.experts_of(self.group.rank)}"

    def _plan(self, x_TD: Tensor, routing: Routing) -> Itinerary:
        try:
            if x_TD.dim() != 2 or x_TD.shape[0] != routing.expert_ids_TK.shape[0]:
                raise ShapeError(
                    f"x {tuple(x_TD.shape)} must be (T, D) with T = {routing.expert_ids_TK.shape[0]} of the routing"
                )
            if routing.num_experts != self.num_experts:
                raise ShapeError(
                    f"the routing is over {routing.num_experts} experts; the layer has {self.num_experts}"
                )
            tables = self._tables.get(x_TD.device)
            if tables is None:
                tables = self._tables[x_TD.device] = Tables(self.placement, x_TD.device)
            return plan(routing.expert_ids_TK, tables, self.group.rank)
        except MoeError as e:
            self.group.give_up(e)
            raise

    def _facts(self, x_TD: Tensor, weights_TK: Tensor) -> dict[str, Any]:
        return {
            "operation": "forward",
            "layer": self.layer,
            "width": x_TD.shape[1],
            "top_k": weights_TK.shape[1],
            "dtype": f"{x_TD.dtype}, weights {weights_TK.dtype}",
            "placement": self.placement.digest,
            "gradients on": torch.is_grad_enabled(),
            "trainable": summary([name for name, p in self.local.named_parameters() if p.requires_grad]),
        }

    def _answer(self, x_RD: Tensor, slots_RK: Tensor, weights_RK: Tensor) -> Tensor:
        """What this rank's experts say to the rows that came: each row's experts here, weighted and added up."""
        names, weights = zip(*self.local.named_parameters(), strict=True)
        if torch.is_grad_enabled():
            scale = 1 / self.group.size if self.gradients == "mean" else 1.0
            weights = share(self.group, self.common, scale, list(weights))
        blank_RL = weights_RK.new_zeros(()).expand(x_RD.shape[0], weights[0].shape[0])
        routing = Routing(slots_RK, weights_RK, blank_RL, blank_RL)
        return functional_call(
            self.local, dict(zip(names, weights, strict=True)), self._arguments(x_RD, routing)
        )

    def _arguments(self, x_RD: Tensor, routing: Routing) -> tuple[Any, ...]:
        """What `local` is called with."""
        return x_RD, routing


def _differentiable(x: Tensor, needed: bool) -> Tensor:
    return x.detach().requires_grad_() if needed and not x.requires_grad else x
