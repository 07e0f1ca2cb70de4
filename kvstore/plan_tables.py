"""Plans as tables for a terminal of 80 columns: what one chose, and how two differ."""

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.capacity import blocks_per_group
from kvstore.demand import STORED, InFlight
from kvstore.explain import (
    Column,
    alike,
    blocks_text,
    borrowed,
    bounds,
    compared,
    looked_at,
    page_runs,
    regrouped,
    sequence_bytes,
    slot_range,
    slot_runs,
    why_taken,
    worth_comparing,
)
from kvstore.memory import format_bytes
from kvstore.plan import CachePlan
from kvstore.specs import LayerSpec
from kvstore.wording import counted, group_range, layer_range, percent_over, reach, rows_of, stem

FIRST_WIDTH = 26
"""Names up to this many characters stay whole."""


def show_plan(plan: CachePlan, console: Console) -> None:
    """Prints a plan: groups, layer slots or frames, layouts and groupings compared, bytes per block, capacity."""
    if not plan.placements:
        console.print(Text(plan.explain()))
        return
    parts = [_groups(plan), _slots(plan) if plan.layout in ("buckets", "bestfit") else _frames(plan)]
    if plan.considered:
        parts.append(_layouts(plan))
    columns, problems = regrouped(plan)
    if worth_comparing(columns, problems):
        parts.append(_groupings(plan, columns, problems))
    console.print(*parts, _bounds(plan), _capacity(plan))


def show_comparison(this: CachePlan, other: CachePlan, console: Console) -> None:
    """Prints two plans side by side at the lengths of the first, and the layers that they treat differently."""
    table = _table("Two plans", "", "this#", "other#", "this/other#")
    for name in ("layout", "grouping"):
        table.add_row(name, getattr(this, name), getattr(other, name), "")
    for name, mine, theirs in _figures(this, other):
        table.add_row(name, f"{mine:,}", f"{theirs:,}", f"{mine / theirs:.3f}" if theirs else "-")
    console.print(_titled(table))
    lines = list(differences(this, other))
    console.print(Text("\n".join(lines) if lines else "The same layers, in the same groups."))


def _figures(this: CachePlan, other: CachePlan) -> Iterator[tuple[str, int, int]]:
    yield "groups", len(this.groups), len(other.groups)
    for name in ("frame_bytes", "num_frames", "arena_bytes"):
        yield name.replace("_", " ").replace("num frames", "frames"), getattr(this, name), getattr(other, name)
    for length in this.lengths:
        mine, theirs = this.capacity(length), other.capacity(length)
        yield f"{counted(length, 'token')}: bytes", mine.num_bytes, theirs.num_bytes
        yield f"{' ' * len(counted(length, 'token'))}  sequences", mine.num_sequences, theirs.num_sequences


def differences(this: CachePlan, other: CachePlan) -> Iterator[str]:
    """One line for each way in which layers of two plans differ: present, spec, group, owner of an alias."""
    mine, theirs = dict.fromkeys(this.layers), dict.fromkeys(other.layers)
    for name, here, there in (("this", mine, theirs), ("other", theirs, mine)):
        alone = [layer for layer in here if layer not in there]
        if alone:
            yield f"only in {name}: {layer_range(alone)}"
    specs: dict[str, list[str]] = {}
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in (layer for layer in mine if layer in theirs):
        if this.spec(layer) != other.spec(layer):
            specs.setdefault(_change(this.spec(layer), other.spec(layer)), []).append(layer)
        names = tuple(_group_of(plan, layer) for plan in (this, other))
        if names[0] != names[1]:
            groups.setdefault(tuple(map(stem, names)), []).append(layer)
    yield from (f"spec differs: {layer_range(layers)}: {change}" for change, layers in specs.items())
    for layers in groups.values():
        held = [group_range(sorted({_group_of(plan, layer) for layer in layers})) for plan in (this, other)]
        yield f"group differs: {layer_range(layers)}: {held[0]} here, {held[1]} there"
    aliases = [
        layer for layer in {**this.aliases, **other.aliases} if this.aliases.get(layer) != other.aliases.get(layer)
    ]
    if aliases:
        yield f"alias differs: {layer_range(aliases)}"


def _group_of(plan: CachePlan, layer: str) -> str:
    return plan.groups[plan.group_index(layer)].name


def _change(this: LayerSpec, other: LayerSpec) -> str:
    """The fields of two specs that are not equal."""
    mine, theirs = ({"rows": rows_of([spec]), "page_bytes": spec.page_bytes} | spec.to_dict() for spec in (this, other))
    shown = [
        f"{name} {mine[name]} / {theirs[name]}" for name in mine if name != "format" and mine[name] != theirs[name]
    ]
    return ", ".join(shown) or "row format"


def _table(title: str, *columns: str) -> Table:
    """A table; columns whose name ends in a number sign are right-aligned and never broken."""
    table = Table(title=Text(title, style="bold"), box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for column in columns:
        number = column.endswith("#")
        table.add_column(
            Text(column.removesuffix("#")), justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    return table


def _row(table: Table, *cells: str) -> None:
    """Cells as they are, since a name may look like markup; those of the first column are broken late."""
    first = table.columns[0]
    first.min_width = max(first.min_width or 0, *(min(len(line), FIRST_WIDTH) for line in cells[0].split("\n")))
    table.add_row(*map(Text, cells))


def _brief(num_bytes: int) -> str:
    """The number in its largest unit: "1.00 MiB"."""
    return format_bytes(num_bytes).partition("(")[2].removesuffix(")") or format_bytes(num_bytes)


def _lines(names: str) -> str:
    """A range of names over several lines."""
    return re.sub(r", (?![^(]*\))", "\n", names).replace(" ... ", " ...\n")


def _names(plan: CachePlan, run: Sequence[int]) -> str:
    return _lines(group_range([plan.groups[index].name for index in run]))


def _groups(plan: CachePlan) -> RenderableType:
    title = f"Groups ({len(plan.groups)}, grouping {plan.grouping})"
    table = _table(
        title, "group", "keeps", "layers#", "tokens#", "pages of\na block#", "padding#", "waste of\na block#"
    )
    for run in alike(plan):
        group, stride = plan.groups[run[0]], plan.block_strides[run[0]]
        _row(
            table,
            _names(plan, run),
            reach(group) + "\ndraft layers" * group.holds_draft,
            f"{f'{len(run)} x ' if len(run) > 1 else ''}{len(group.layers):,}",
            f"{group.block_size:,}",
            f"{group.block_bytes:,}",
            f"{group.block_bytes - group.payload_bytes:,}",
            f"{(stride - group.block_bytes) / stride:.1%}",
        )
    return _titled(table, borrowed(plan))


def _slots(plan: CachePlan) -> RenderableType:
    title = f"Layer slots (layout {plan.layout}): tensors of {plan.num_frames:,} pages"
    table = _table(title, "page, layer slot", "layers, rows", "groups", "waste of a block")
    held = {layer: plan.spec(layer) for layer in plan.layers}
    for run in slot_runs(plan):
        _row(
            table,
            f"{run.page_bytes:,} B\n{slot_range(run)}",
            f"{_lines(layer_range(run.layers))}\n{_lines(rows_of(held[layer] for layer in run.layers))}",
            _lines(group_range(run.groups)),
            "\n".join(f"{waste:,} B in\n{_lines(group_range(names))}" for waste, names in run.waste) or "-",
        )
    return _titled(table)


def _frames(plan: CachePlan) -> RenderableType:
    frames = plan.layout == "frames"
    title = f"{'Frames' if frames else 'Blocks'} (layout {plan.layout}): {plan.num_frames:,} of {plan.frame_bytes:,} B"
    table = _table(title, "group", "from byte#", "page#", "layers, rows")
    for run in alike(plan):
        group, stride, per_frame = plan.groups[run[0]], plan.block_strides[run[0]], plan.blocks_per_frame[run[0]]
        begin = _names(plan, run) + (f"\n{counted(per_frame, 'block')} a frame,\n{stride:,} B each" if frames else "")
        for first, _, layers, spec in page_runs(plan, run[0]):
            _row(
                table, begin, f"{first:,}", f"{spec.page_bytes:,}", f"{_lines(layer_range(layers))}\n{rows_of([spec])}"
            )
            begin = ""
        if group.block_bytes < stride:
            _row(table, begin, f"{group.block_bytes:,}", "", f"unused, {stride - group.block_bytes:,} B a block")
    return _titled(table)


def _share(num_bytes: int, own: int) -> str:
    return f"{_brief(num_bytes)}\n{percent_over(num_bytes, own)}"


def _layouts(plan: CachePlan) -> RenderableType:
    head, *rows = compared(plan, looked_at(plan), _share)
    table = _table(
        "Layouts compared: bytes of one sequence, over its own pages", "", *(f"{name}#" for name in head[1:])
    )
    for row in rows:
        _row(table, *row)
    return _titled(table, [f"* taken: {why_taken(plan)}"])


def _groupings(plan: CachePlan, columns: Sequence[Column], problems: Sequence[str]) -> RenderableType:
    head, *rows = compared(plan, columns, _share)
    table = _table("Groupings compared, each in the layout overlay", "", *(f"{name}#" for name in head[1:]))
    for row in rows[:-1]:
        _row(table, *row)
    return _titled(table, problems)


def _bounds(plan: CachePlan) -> RenderableType:
    table = _table("Bytes per block of these groups", "", "bytes#", "over the lower bound#")
    for name, size in bounds(plan.groups):
        _row(table, name, f"{size:,}", percent_over(size, plan.lower_bound))
    narrow, wide = min(plan.block_strides), max(plan.block_strides)
    name = f"this layout ({plan.layout}){'' if narrow == wide else ', widest group'}"
    _row(table, name, f"{wide:,}", percent_over(wide, plan.lower_bound))
    note = f"a block of the narrowest group takes {narrow:,} B: each cuts frames its own way"
    return _titled(table, [note] if narrow < wide else [])


def _capacity(plan: CachePlan) -> RenderableType:
    unit, longest, flight = (
        "frame" if plan.layout == "frames" else "block",
        plan.max_length(in_flight=plan.max_tokens_in_flight),
        plan.max_tokens_in_flight,
    )
    table = _table(
        f"Capacity: {_brief(plan.arena_bytes)}, {counted(plan.num_frames, unit)} with the null {unit}",
        *("tokens#", "blocks#", *(f"{stored} ^#" for stored in STORED if flight)),
        *("one takes#", "its rows#", "sequences\nat once#", "their\ntokens#"),
    )
    for length in plan.lengths:
        fits = plan.capacity(length, flight)
        busy = [blocks_per_group(plan.groups, length, InFlight(flight, stored)) for stored in STORED if flight]
        _row(
            table,
            f"{length:,}",
            f"{sum(fits.blocks):,}",
            *(f"{sum(blocks):,}" for blocks in busy),
            _brief(fits.num_bytes),
            _brief(sequence_bytes(plan, length)[1]),
            f"{fits.num_sequences:,}",
            f"{fits.num_tokens:,}",
        )
    notes = [f"longest sequence alone: {'any length' if longest is None else counted(longest, 'token')}"]
    if flight:
        notes += [
            f"^ most blocks during a step with up to {counted(flight, 'token')} of it:",
            "  all = every row is stored, tail = those that a later step can read;",
            "  room for one such sequence is held in the columns to the right",
        ]
    if len(plan.groups) > 1:
        blocks = ((length, blocks_text(plan, plan.capacity(length).blocks)) for length in plan.lengths)
        notes += [f"blocks by group at {counted(length, 'token')}: {text}" for length, text in blocks]
    return _titled(table, notes)


def _titled(table: Table, notes: Sequence[str] = ()) -> RenderableType:
    """The table between its title, which may be wider, and notes."""
    title, table.title = table.title, None
    assert isinstance(title, Text)
    return Group(Text("\n") + title, table, *(Text(note) for note in notes))
