"""StoreStats: what a store holds, now and since it was made."""

from dataclasses import dataclass

from kvstore.books import Books
from kvstore.wording import aligned, counted


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Blocks of one group by state.

    Attributes:
        name: of the group.
        in_use: blocks that sequences hold.
        cached: blocks that nobody holds and that can be hit, until they are evicted.
        fenced: blocks given back that an unfinished step may touch.
        reserved: free places in frames that belong to the group already.
        block_stride_bytes: bytes that a block takes out of the arena.
    """

    name: str
    in_use: int
    cached: int
    fenced: int
    reserved: int
    block_stride_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks in use, fenced ones included."""
        return (self.in_use + self.fenced) * self.block_stride_bytes


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Blocks by state, over all groups; the null block is not counted.

    Where a frame is a block, `num_blocks` = free + cached + in_use + fenced. In the layout "frames" blocks of groups
    differ in size: then `num_blocks` and `free` count frames.

    Attributes:
        num_blocks: blocks of the store, or frames.
        free: blocks, or frames, of no group.
        cached: blocks that nobody holds and that can be hit.
        in_use: blocks that sequences hold.
        fenced: blocks given back that an unfinished step may touch.
        peak_in_use: the most blocks in use at once, fenced ones included, since the store was made.
        evicted: cached blocks given up for lack of room, since the store was made.
        open_sequences: sequences opened and not released, suspended ones included.
        suspended_sequences: sequences whose bytes are in host memory.
        hit_tokens: prompt tokens that were cached at `open`.
        asked_tokens: prompt tokens that were asked for.
        partly_used_bytes: free places in frames that belong to a group already.
        frame_bytes: bytes of a frame.
        groups: the same for each group.
    """

    num_blocks: int
    free: int
    cached: int
    in_use: int
    fenced: int
    peak_in_use: int
    evicted: int
    open_sequences: int
    suspended_sequences: int
    hit_tokens: int
    asked_tokens: int
    partly_used_bytes: int
    frame_bytes: int
    groups: tuple[GroupStats, ...]

    def __str__(self) -> str:
        in_frames = any(group.block_stride_bytes != self.frame_bytes for group in self.groups)
        hits = f"{self.hit_tokens:,} of {self.asked_tokens:,} prompt tokens cached"
        head = ["group", "in use", "cached", "fenced", "reserved", "bytes in use"]
        rows = [
            [
                group.name,
                *(f"{n:,}" for n in (group.in_use, group.cached, group.fenced, group.reserved, group.held_bytes)),
            ]
            for group in self.groups
        ]
        waste = (
            f"; waste {100 * self.fragmentation:.1f} %: free, but only for the group that has the frame"
            if in_frames
            else ""
        )
        return "\n".join(
            [
                "Blocks by group and state",
                *aligned([head, *rows]),
                f"{self.free:,} of {self.num_blocks:,} {'frames' if in_frames else 'blocks'} free{waste}",
                f"{self.peak_in_use:,} blocks in use at the peak, {self.evicted:,} evicted",
                f"{counted(self.open_sequences, 'sequence')} open, {self.suspended_sequences:,} of them suspended",
                f"{hits}, hit rate {100 * self.hit_rate:.1f} %",
            ]
        )

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached; 0 before the first prompt."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0

    @property
    def fragmentation(self) -> float:
        """Share of the arena, the null frame aside, that is free and that only one group can have."""
        total = self.num_blocks * self.frame_bytes
        return self.partly_used_bytes / total if total else 0.0


def collect(books: Books, suspended: int) -> StoreStats:
    """The stats of books. Reads arrays and counters only, so that another thread may ask while a step is made."""
    allocator, plan, prefixes = books.allocator, books.plan, books.prefixes
    by_state = {name: counts.tolist() for name, counts in allocator.counts_by_state().items()}
    groups = tuple(
        GroupStats(
            group.name, by_state["in_use"][g], by_state["cached"][g], by_state["fenced"][g],
            by_state["free_in_partial"][g], stride,
        )
        for g, (group, stride) in enumerate(zip(plan.groups, plan.block_strides, strict=True))
    )  # fmt: skip
    return StoreStats(
        num_blocks=plan.num_frames - 1,
        free=allocator.num_free_frames,
        cached=sum(group.cached for group in groups),
        in_use=sum(group.in_use for group in groups),
        fenced=sum(group.fenced for group in groups),
        peak_in_use=allocator.peak_held,
        evicted=allocator.num_evicted,
        open_sequences=books.handles.num_open,
        suspended_sequences=suspended,
        hit_tokens=0 if prefixes is None else prefixes.hit_tokens,
        asked_tokens=0 if prefixes is None else prefixes.asked_tokens,
        partly_used_bytes=sum(group.reserved * group.block_stride_bytes for group in groups),
        frame_bytes=plan.frame_bytes,
        groups=groups,
    )
