"""What a collection writes anew: rules as a value, decided by pure functions of what is in packs."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from casckpt.arguments import FLAG, NUMBER, WHOLE, check, maybe, within
from casckpt.ids import PackId
from casckpt_gc.mark import PackState


@dataclass(frozen=True)
class Compaction:
    """Which packs are rewritten, which objects encoded anew, which entries sealed, and how much in one collection.

    Attributes:
        needed_share_max: a pack of which at most this share is needed is rewritten.
        waste_share_max: so are others, those with most waste first, while more than this share of all packs is waste.
        tiny_size_bytes: packs smaller than this are merged …
        tiny_count_min: … when there are so many of them.
        held_share_max: bytes that are held for differences, as a share of live bytes. Above it, what is decoded from
            them is encoded anew without them …
        held_gain_min: … where that gives back at least so many times the bytes that it writes. With 1.5 all that is
            ever written for it is at most twice what was committed.
        cold_after: chunks that none of the newest so many snapshots of a branch has are encoded at level small, where
            that is smaller; None: they stay as they are.
        budget_bytes: read to be written anew in one collection; what is left waits for the next that lets something
            go (a pack of which more is needed, for a larger budget) …
        is_thorough: … or that looks at everything even where nothing was let go.
        epoch_count_max: hundreds of timeline entries sealed in one collection; 0: none.
    """

    needed_share_max: float = 0.5
    waste_share_max: float = 0.2
    tiny_size_bytes: int = 4 << 20
    tiny_count_min: int = 16
    held_share_max: float = 1.0
    held_gain_min: float = 1.5
    cold_after: int | None = None
    budget_bytes: int = 1 << 30
    is_thorough: bool = False
    epoch_count_max: int = 100

    def __post_init__(self) -> None:
        shares = ("needed_share_max", "waste_share_max", "held_share_max", "held_gain_min")
        counts = ("tiny_size_bytes", "tiny_count_min", "budget_bytes", "epoch_count_max")
        kinds = {**dict.fromkeys(shares, within(NUMBER, 0)), **dict.fromkeys(counts, within(WHOLE, 0))}
        check({**kinds, "cold_after": maybe(within(WHOLE, 1)), "is_thorough": FLAG}, vars(self))

    def chosen(self, states: Mapping[PackId, PackState], taken: Container[PackId] = ()) -> dict[PackId, PackState]:
        """Packs to rewrite: those `taken` already, then those that give back most."""
        packs = {pack_id: pack for pack_id, pack in states.items() if pack.needed_bytes}
        tiny = {pack_id for pack_id, pack in packs.items() if pack.size_bytes < self.tiny_size_bytes}
        merged = tiny if len(tiny) >= self.tiny_count_min else set()
        found = {pack_id: pack for pack_id, pack in packs.items() if pack_id in taken}
        left = self.budget_bytes - sum(pack.needed_bytes for pack in found.values())
        wasted = sum(pack.dead_bytes for pack_id, pack in packs.items() if pack_id not in found)
        allowed = self.waste_share_max * sum(pack.size_bytes for pack in packs.values())
        by_share = sorted(packs.items(), key=lambda each: (each[1].needed_bytes / each[1].size_bytes, each[1].pack_id))
        for pack_id, pack in by_share:
            is_sparse = pack.needed_bytes <= self.needed_share_max * pack.size_bytes or wasted > allowed
            is_wanted = pack_id in merged or (is_sparse and pack.dead_bytes)
            if pack_id in found or not is_wanted:
                continue
            if pack.needed_bytes > left:
                break
            left -= pack.needed_bytes
            wasted -= pack.dead_bytes
            found[pack_id] = pack
        return found

    def postponed(self, states: Mapping[PackId, PackState], chosen: Container[PackId]) -> list[PackState]:
        """Packs that would be rewritten too, had the budget no end."""
        endless = replace(self, budget_bytes=sum(pack.size_bytes for pack in states.values()))
        return [pack for pack_id, pack in endless.chosen(states, chosen).items() if pack_id not in chosen]


COMPACTION = Compaction()
