"""Steps: `extend` reserves rows for the next tokens of a batch, `commit` confirms them, `finish` lets go of fences."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.allocator import Ids
from kvstore.books import UNKNOWN, Books, Roster
from kvstore.copies import replace_blocks, shared_tails
from kvstore.errors import OutOfBlocks, SequenceError
from kvstore.fits import judged
from kvstore.sequences import Counts, Flags, Rows, SequenceState, committed_tokens, int_array, ragged_arange
from kvstore.tables import NO_ENTRIES, Entries, Numbers
from kvstore_kernels.checks import expect_int

NO_SLOTS = np.empty((0, 0), np.int64)
NO_BLOCKS = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Step:
    """What `extend` of some books reserved: rows of the tables, tokens before and new, what changes hands per group."""

    books: Books
    serial: int
    seq_ids: npt.NDArray[np.int64]
    rows: Rows
    starts: Counts
    counts: Counts
    ends: Counts
    roster: Roster
    number: int  # of batches of the roster before it
    num_tokens: int
    max_length: int
    is_single: bool  # one new token for each sequence
    new_blocks: list[Ids]
    slots: Numbers  # [num_variants, num_tokens]
    copies: list[tuple[Ids, Ids]] = field(default_factory=list)  # per group: from, to, before anything is written
    state_blocks: dict[int, Ids] = field(default_factory=dict)  # group -> [n, 2]: block to read, block to write
    checkpoints: dict[int, Numbers] = field(default_factory=dict)  # group -> [n, 2]: length, block; 0 where none
    committed: bool = False

    def positions(self) -> Counts:
        """The position of every new token in its sequence, flat, in an array of its own."""
        return self.starts.copy() if self.is_single else _positions(self.starts, self.counts)


def extend(books: Books, seq_ids: Any, num_new_tokens: Any, pad_to: int | None = None) -> Step:
    """Reserves rows for the next tokens of each sequence, for all of them or for none; `pad_to` is only checked.

    Raises: as `KVStore.extend`.
    """
    roster = books.roster_of(seq_ids)
    state, rows = roster.state, roster.rows
    is_single = num_new_tokens.__class__ is int and num_new_tokens == 1
    counts = roster.ones if is_single else _counts("num_new_tokens", num_new_tokens, len(rows))
    is_single = is_single or bool((counts == 1).all())
    if pad_to is not None:
        _check_padding(books, pad_to, counts)
    starts = state.length.copy()
    ends = starts + counts
    num_tokens, max_length = _check_extend(books, roster, counts, ends, is_single)
    growth = books.tables.missing(state, starts, ends, is_single)
    copied, owned = shared_tails(books, state, rows, starts, counts) if books.is_sharing else (NO_ENTRIES, None)
    saved, lengths = _checkpoints(books, state, starts, ends) if books.checkpointed else (NO_ENTRIES, starts)
    kinds = [NO_ENTRIES if growth is None else growth.entries]
    if len(copied.seq) or len(saved.seq):
        kinds += [copied, saved]
    try:
        taken, new_blocks = _take(books, kinds)
    except OutOfBlocks as error:
        raise judged(error, books, roster.ids, rows, starts, ends, kinds) from None

    step = Step(
        books, books.next_serial, roster.ids, rows, starts, counts, ends, roster, roster.num_extends, num_tokens,
        max_length, is_single, new_blocks, NO_SLOTS,
    )  # fmt: skip
    books.unfinished[step.serial] = step
    books.next_serial += 1
    reads = {g: _blocks_at(books, g, rows, starts) for g in books.in_fixed_blocks}
    if growth is not None:
        books.tables.grow(state, rows, growth, taken[0])
    if owned is not None:
        books.allocator.forget(owned)
        np.putmask(state.shared, counts > 0, 0)
    if len(kinds) > 1:
        step.copies = replace_blocks(books, step.serial, rows, copied, taken[1])
        replace_blocks(books, step.serial, rows, saved, taken[2])
        books.tables.refresh_tails(state, rows)
    for g in books.checkpointed:
        mine = saved.group == g
        step.checkpoints[g] = np.zeros((len(rows), 2), np.int64)
        step.checkpoints[g][saved.seq[mine], 0] = lengths[mine]
        step.checkpoints[g][saved.seq[mine], 1] = taken[2][mine] if mine.any() else 0
    for g in books.in_fixed_blocks:
        writes = np.where(counts > 0, _blocks_at(books, g, rows, ends), 0).astype(np.int32)
        step.state_blocks[g] = np.stack([writes if books.rules.is_ring[g] else reads[g], writes], axis=1)
    step.slots = _slots(books, step, state)
    np.copyto(state.length, ends)
    roster.num_extends += 1
    roster.in_flight += 1
    roster.longest = max_length
    return step


def commit(books: Books, step: Step, token_ids: Any, num_committed: Any = None, finish_too: bool = True) -> None:
    """Confirms written rows; see `KVStore.commit`."""
    expect_uncommitted(books, step)
    starts, counts, ends = step.starts, step.counts, step.ends
    withdrawn: Flags | None = None
    if num_committed is not None:
        counts = _counts("num_committed", num_committed, len(starts))
        if (counts > step.counts).any():
            raise ValueError(
                f"num_committed: expected at most the extended {step.counts.tolist()}, got {counts.tolist()}"
            )
        withdrawn, ends = counts < step.counts, starts + counts
    tokens, has_unknown = committed_tokens("token_ids", token_ids)
    num_tokens = step.num_tokens if withdrawn is None else int(counts.sum())
    if len(tokens) != num_tokens:
        raise ValueError(f"token_ids: expected {num_tokens} tokens, got {len(tokens)}")
    roster, alive = books.roster, None
    if roster is not step.roster:
        ids, rows = step.seq_ids, step.rows
        alive = books.handles.alive(ids, rows)
        if not alive.all():
            tokens = tokens[np.repeat(alive, counts)]
            starts, counts, ends = starts[alive], counts[alive], ends[alive]
            ids, rows = ids[alive], rows[alive]
            withdrawn = None if withdrawn is None else withdrawn[alive]
        roster = books.load(ids, rows)
    state = roster.state
    _check_commit(books, step, roster, alive, withdrawn)

    if books.prefixes is not None and len(tokens):
        history = books.prefixes.tokens.reshape(-1)
        if step.is_single and withdrawn is None:
            history[roster.row_starts + starts] = tokens
        else:
            history[np.repeat(roster.row_starts, counts) + _positions(starts, counts)] = tokens
    if has_unknown:
        unknown = np.flatnonzero(tokens < 0)
        seq = np.repeat(np.arange(len(starts)), counts)[unknown]
        np.minimum.at(state.unknown, seq, _positions(starts, counts)[unknown])
    np.copyto(state.committed, ends)
    roster.num_commits += 1
    roster.in_flight -= 1
    step.committed = True
    if withdrawn is not None and withdrawn.any():
        np.copyto(state.length, ends, where=withdrawn)
        roster.longest = UNKNOWN
        books.cut_back(state, roster.rows, state.length, step.serial)
    if roster.in_prompt:
        _index_prompts(books, step, roster, starts, alive)
    if finish_too:
        finish(books, step)
    if len(books.rules.windows):
        _let_go(books, step, roster, starts, ends, alive)


def finish(books: Books, step: Step) -> None:
    """Gives back what is fenced for this step, if no earlier one is unfinished; see `KVStore.finish`."""
    expect_unfinished(books, step)
    if not step.committed:
        raise ValueError("batch: expected a committed batch, got one that is not committed yet")
    del books.unfinished[step.serial]
    if books.fences:
        oldest = books.oldest_unfinished()
        due = [cells for serial, cells in books.fences if serial < oldest]
        books.fences = [(serial, cells) for serial, cells in books.fences if serial >= oldest]
        for cells in due:
            books.allocator.unfence(cells)


def expect_unfinished(books: Books, step: Step) -> None:
    """Raises ValueError unless the step is of these books and not finished."""
    _expect_own(books, step)
    if books.unfinished.get(step.serial) is not step:
        raise ValueError("batch: expected an unfinished batch, got one that was committed and finished already")


def expect_uncommitted(books: Books, step: Step) -> None:
    """Raises ValueError unless the step is of these books and not committed."""
    _expect_own(books, step)
    if step.committed:
        raise ValueError("batch: expected a batch that is not committed, got one that was committed already")


def _expect_own(books: Books, step: Step) -> None:
    if step.books is not books:
        raise ValueError("batch: expected a batch of this store, got one of another store")


def _slots(books: Books, step: Step, state: SequenceState) -> Numbers:
    """Where the row of each new token goes, for each variant."""
    tables, rules = books.tables, books.rules
    if step.is_single:
        slots = tables.tail_slots(state, step.starts)
        positions, replay_end = step.starts, state.replay_end
    else:
        positions = step.positions()
        rows = np.repeat(step.rows, step.counts)
        slots = np.empty((len(rules.variants), step.num_tokens), np.int64)
        for v in range(len(rules.variants)):
            slots[v] = tables.slots(v, rows, positions)
        replay_end = np.repeat(state.replay_end, step.counts)
        for v, variant in enumerate(rules.variants):
            if variant.is_ring:  # of rows that fall on the same place the last one stays
                slots[v][positions < np.repeat(step.ends, step.counts) - variant.rows_per_block] = -1
            elif rules.tail_only[variant.group]:
                stored = rules.stored_from(variant.group, step.starts, step.ends)
                size = int(rules.block_size[variant.group])
                begun = -(-step.starts // size) * size  # a block that an earlier step began is filled, or never found
                skipped = (positions >= np.repeat(begun, step.counts)) & (positions < np.repeat(stored, step.counts))
                slots[v][skipped] = -1
    if rules.replay:
        for v, variant in enumerate(rules.variants):
            if not variant.is_ring:
                slots[v][positions < replay_end] = -1
    return slots


def _checkpoints(books: Books, state: SequenceState, starts: Counts, ends: Counts) -> tuple[Entries, Counts]:
    """Where a step passes over the state that the longest hit of its prompt goes on from: the block to save it in.

    Returns: the entries, and the length of each at which the state is to be saved.
    """
    groups = np.array(books.checkpointed, np.int64)
    length = (state.prompt - 1) // books.rules.unit * books.rules.unit - books.rules.replay
    is_boundary = (length[:, None] % books.rules.block_size[groups] == 0).all(1)
    seq = np.flatnonzero((starts < length) & (length < ends) & is_boundary)
    number = np.repeat(groups, len(seq))
    seq = np.tile(seq, len(groups))
    return Entries(number, seq, length[seq] // books.rules.block_size[number] - 1), length[seq]


def _index_prompts(books: Books, step: Step, roster: Roster, starts: Counts, alive: Flags | None) -> None:
    """Makes what a batch committed of prompts findable; generated tokens wait for the release."""
    state, prefixes = roster.state, books.prefixes
    assert prefixes is not None
    inside = starts < state.prompt
    roster.in_prompt = bool((state.committed < state.prompt).any())
    if not inside.any():
        return
    exact = _saved_lengths(books, step, alive)
    for seq in np.flatnonzero(inside).tolist():
        end = min(int(state.committed[seq]), int(state.prompt[seq]))
        prefixes.update(state, seq, int(roster.rows[seq]), end, int(exact[seq]))


def _saved_lengths(books: Books, step: Step, alive: Flags | None) -> Counts:
    """Of each living sequence of a step: the length at which a state was saved within it, 0 for none."""
    saved = step.checkpoints[books.checkpointed[0]][:, 0] if books.checkpointed else np.zeros_like(step.starts)
    return saved if alive is None or alive.all() else saved[alive]


def _let_go(books: Books, step: Step, roster: Roster, starts: Counts, ends: Counts, alive: Flags | None) -> None:
    """Gives back the blocks that the first uncommitted token of each sequence cannot reach."""
    rules, state = books.rules, roster.state
    entries = books.tables.leaving(state, ends)
    if not len(entries.seq):
        return
    ids = books.tables.remove(entries, roster.rows)
    there = ids != 0
    if not there.all():
        ids, entries = ids[there], entries.where(there)
    cells = books.allocator.to_cells(ids, entries.group)
    if books.prefixes is not None:
        end = (entries.block + 1) * rules.block_size.take(entries.group)
        unknown = end > state.indexed[entries.seq]
        if rules.has_states:
            saved = _saved_lengths(books, step, alive)[entries.seq]
            exact = (end == starts[entries.seq]) | ((end == saved) & rules.is_checkpointed[entries.group])
            unknown &= exact | ~rules.is_state[entries.group]
        if unknown.any():
            if not unknown.all():
                ids, entries = ids[unknown], entries.where(unknown)
            books.prefixes.ghosts.add(entries, roster.rows.take(entries.seq), ids)
    books.give_back(cells, step.serial)


def _blocks_at(books: Books, group: int, rows: Rows, lengths: Counts) -> Ids:
    """The block that holds the last of `lengths` tokens; the null block for no token."""
    block = np.maximum(lengths - 1, 0) // int(books.rules.block_size[group])
    ids = books.tables.flat[books.tables.place(np.full_like(rows, group), rows, block)]
    return np.where(lengths > 0, ids, 0).astype(np.int32)


def _take(books: Books, kinds: list[Entries]) -> tuple[list[Ids], list[Ids]]:
    """Takes a block for each entry. Returns: the blocks of each kind in the order of its entries, and all per group."""
    num_groups = books.rules.num_groups
    if len(kinds) == 1:
        entries = kinds[0]
        if not len(entries.seq):
            return [], [NO_BLOCKS] * num_groups
        if num_groups == 1:
            new_blocks = books.allocator.take([len(entries.seq)])
            return new_blocks, new_blocks
        new_blocks = books.allocator.take(entries.counts(num_groups).tolist())
        return [np.concatenate(new_blocks)], new_blocks
    wanted = [entries.counts(num_groups) for entries in kinds]
    new_blocks = books.allocator.take(sum(wanted[1:], wanted[0]).tolist())
    parts: list[list[Ids]] = [[np.empty(0, np.int32)] for _ in wanted]
    for g, ids in enumerate(new_blocks):
        start = 0
        for kind, counts in enumerate(wanted):
            parts[kind].append(ids[start : start + int(counts[g])])
            start += int(counts[g])
    return [np.concatenate(kind) for kind in parts], new_blocks


def _counts(name: str, counts: Any, num_sequences: int) -> Counts:
    if isinstance(counts, int | np.integer) and not isinstance(counts, bool):
        counts = [counts] * num_sequences
    array = int_array(name, counts)
    if len(array) != num_sequences:
        raise ValueError(f"{name}: expected one count per sequence, {num_sequences} in all, got {len(array)}")
    if array.size and array.min() < 0:
        raise ValueError(f"{name}: expected counts >= 0, got {array.min()}")
    array.setflags(write=False)  # a batch shows them to the engine
    return array


def _check_extend(books: Books, roster: Roster, counts: Counts, ends: Counts, is_single: bool) -> tuple[int, int]:
    """Returns: all new tokens, and the length of the longest sequence behind them."""
    if not len(counts):
        return 0, 0
    limits, state = books.limits, roster.state
    # One count at a time before their sum, which could leave int64.
    if not is_single and counts.max() > limits.max_tokens_per_step:
        num_tokens = sum(counts.tolist())
    else:
        num_tokens = len(counts) if is_single else int(counts.sum())
    if num_tokens > limits.max_tokens_per_step:
        raise ValueError(
            f"num_new_tokens: expected at most {limits.max_tokens_per_step} in all (max_tokens_per_step), "
            f"got {num_tokens}"
        )
    longest = roster.longest + 1 if is_single and roster.longest >= 0 else int(ends.max())
    if longest > limits.max_length:
        raise ValueError(
            f"num_new_tokens: expected sequences of at most {limits.max_length} tokens (max_length), "
            f"got {longest} for sequence {roster.ids[int(ends.argmax())]}"
        )
    if roster.in_flight >= limits.max_in_flight:
        in_flight = state.num_extends - state.num_commits + (roster.num_extends - roster.num_commits)
        raise SequenceError(
            f"seq_ids: expected fewer than {limits.max_in_flight} uncommitted batches of a sequence "
            f"(max_in_flight), got {in_flight.max()} of sequence {roster.ids[int(in_flight.argmax())]}"
        )
    return num_tokens, longest


def _check_padding(books: Books, pad_to: int, counts: Counts) -> None:
    if (counts != 1).any():
        raise ValueError(f"pad_to: expected a batch with one new token per sequence, got {counts.tolist()}")
    expect_int("pad_to", pad_to, len(counts), books.limits.max_sequences)


def _check_commit(books: Books, step: Step, roster: Roster, alive: Flags | None, withdrawn: Flags | None) -> None:
    if roster is not step.roster or not roster.was_idle:
        before = step.roster.num_before + step.number  # how many batches of each sequence come before this one
        before = before if alive is None else before[alive]
        is_next = bool((roster.state.num_commits + roster.num_commits == before).all())
    else:
        is_next = step.number == roster.num_commits
    if not is_next:
        raise ValueError("batch: expected the earliest uncommitted batch of its sequences, got a later one")
    if withdrawn is None or not withdrawn.any():
        return
    num_later = roster.state.num_extends + roster.num_extends - roster.state.num_commits - roster.num_commits - 1
    if (withdrawn & (num_later > 0)).any():
        raise ValueError("num_committed: expected all tokens of a sequence that has a later batch in flight")
    rules = books.rules
    overwritten = [name for g, name in enumerate(rules.names) if rules.tail_only[g] or rules.is_ring[g]]
    if overwritten:
        names = ", ".join(map(repr, overwritten))
        raise ValueError(
            f"num_committed: expected all tokens, got fewer: groups {names} keep rings, states or tails, "
            "which a step overwrites"
        )


def _positions(starts: Counts, counts: Counts) -> Counts:
    return np.repeat(starts, counts) + ragged_arange(counts)
