"""Which ranks hold which experts. An expert on several ranks is replicated: its tokens are spread over them.

Shapes: E experts, W ranks.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from shared_moe.errors import InputError


@dataclass(frozen=True)
class Placement:
    """A map [E] -> ranks. `ranks[e]` are the ranks that hold expert e, in ascending order; the first one owns it."""

    ranks: tuple[tuple[int, ...], ...]
    world_size: int

    def __post_init__(self):
        if self.world_size < 1 or not self.ranks:
            raise InputError(
                f"{len(self.ranks)} experts on {self.world_size} ranks; expected at least one each"
            )
        for e, ranks in enumerate(self.ranks):
            if list(ranks) != sorted(set(ranks)) or not ranks:
                raise InputError(f"expert {e} is placed on {ranks}; expected one or more ranks, ascending")
            if ranks[0] < 0 or ranks[-1] >= self.world_size:
                raise InputError(
                    f"expert {e} is placed on {ranks}; there are ranks 0 to {self.world_size - 1}"
                )
        empty = sorted(set(range(self.world_size)) - {r for ranks in self.ranks for r in ranks})
        if empty:
            raise InputError(
                f"ranks {empty} hold no expert; give each rank at least one, a replica if need be"
            )

    @classmethod
    def even(cls, num_experts: int, world_size: int) -> "Placement":
        """Consecutive experts side by side, as many on each rank as on any other, give or take one.

        There are replicas only where ranks outnumber experts.
        """
        if world_size > num_experts > 0:
            home = [r * num_experts // world_size for r in range(world_size)]
            return cls(
                tuple(tuple(r for r in range(world_size) if home[r] == e) for e in range(num_experts)),
                world_size,
            )
        return cls(tuple((e * world_size // num_experts,) for e in range(num_experts)), world_size)

    @classmethod
    def balanced(
        cls, load_E: Tensor | Sequence[float], world_size: int, slots_per_rank: int | None = None
    ) -> "Placement":
        """Spread experts by their load, with replicas of the hot ones in the slots that are left over.

        load_E          tokens (or any non-negative share) of each expert, as `expert_load` counts them
        slots_per_rank  experts a rank has room for; by default E / W rounded up

        Each free slot goes to the expert with the most load a replica; then replicas go, heaviest first, to the rank
        with the least load that has room (longest processing time first; Graham 1969). Same input, same placement.
        Raises `InputError` for loads that are negative or not finite, or fewer slots than experts.
        """
        loads = load_E.double().tolist() if isinstance(load_E, Tensor) else [float(v) for v in load_E]
        E = len(loads)
        room = -(-E // max(world_size, 1)) if slots_per_rank is None else slots_per_rank
        if not all(0 <= load < float("inf") for load in loads):
            raise InputError(f"loads must be finite and not negative, got {loads}")
        if room * world_size < E:
            raise InputError(f"{world_size} ranks with {room} slots each cannot hold {E} experts")
        copies = [1] * E
        for _ in range(room * world_size - E):
            hot = max(range(E), key=lambda e: (loads[e] / copies[e] if copies[e] < world_size else -1.0, -e))
            if copies[hot] == world_size:
                break
            copies[hot] += 1
        ranks: list[list[int]] = [[] for _ in range(E)]
        free, carried = [room] * world_size, [0.0] * world_size
        heaviest_first = sorted(range(E), key=lambda e: (-loads[e] / copies[e], e))
        for e in heaviest_first:
            for _ in range(copies[e]):
                fitting = [r for r in range(world_size) if free[r] and r not in ranks[e]]
                if not fitting:
                    break
                rank = min(fitting, key=lambda r: (carried[r], -free[r], r))
                ranks[e].append(rank)
                free[rank] -= 1
                carried[rank] += loads[e] / copies[e]
        return cls(tuple(tuple(sorted(r)) for r in ranks), world_size)

    @property
    def num_experts(self) -> int:
        return len(self.ranks)

    @cached_property
    def digest(self) -> int:
        """A number by which ranks find out whether they hold the same placement."""
        return zlib.crc32(repr((self.ranks, self.world_size)).encode())

    def experts_of(self, rank: int) -> list[int]:
        """The experts of a rank, ascending: slot i of the rank holds the i-th."""
        return [e for e, ranks in enumerate(self.ranks) if rank in ranks]

    def owned_slots(self, rank: int) -> list[int]:
        """The slots of a rank whose experts it owns: over all ranks, each expert exactly once."""
        return [slot for slot, e in enumerate(self.experts_of(rank)) if self.ranks[e][0] == rank]

    def common_slots(self, rank: int) -> list[list[int]] | None:
        """For each rank: this rank's slots whose experts both hold, of those that are replicated (itself included).

        None when no expert is replicated.
        """
        if all(len(ranks) == 1 for ranks in self.ranks):
            return None
        slots = [(slot, self.ranks[e]) for slot, e in enumerate(self.experts_of(rank))]
        return [
            [slot for slot, ranks in slots if len(ranks) > 1 and other in ranks]
            for other in range(self.world_size)
        ]
