"""The layers of DeepSeek V4: a window of rows that are K and V, and beside it compressed rows and their compressors.

A compressor needs the tokens of its unfinished window, and with overlap those of the window before. Their K and gates
lie in a window of fp32 rows, [K | gate] of each token. transformers adds the position bias to the gates of a window
when it closes, and keeps the sum; so do these rows: a closed window is written again, in the blocks that the pass
extends anyway, since a block of such a state never ends inside a window.
"""

from typing import TYPE_CHECKING, Any

import torch

from kvstore.integrations.transformers.layers import PagedLayer, _passed_on

if TYPE_CHECKING:
    from kvstore.integrations.transformers.cache import KVStoreCache


class WindowLayer(PagedLayer):
    """Rows of one head in a window, each of them K and V at once."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes rows [rows, 1, num_columns, head_dim] and returns those of all columns in reach, twice."""
        forward = self.cache.begin(self.index, key_states.shape[0], key_states.shape[2], _passed_on(kwargs))
        forward.write(self.name, key_states)
        first = self._first_column(forward.start)
        count = forward.end - first
        if self.hands_over(kwargs):  # the module puts compressed rows behind as many rows as the mask has columns
            rows = key_states.new_zeros(1).expand(*key_states.shape[:2], count, key_states.shape[3])
        else:
            (rows,) = forward.read(self.name, first, count)
        return rows, rows

    def decode(self, module: Any, query: torch.Tensor, softmax_scale: float, **options: Any) -> torch.Tensor:
        """As `PagedLayer.decode`; `visible` [rows, keys] tells which rows the mask leaves, window rows first."""
        forward = self.cache.forward
        first = self._first_column(forward.start)
        slots = forward.slots(self.name, first, forward.end - first)
        visible = options.get("visible")
        if visible is not None:
            slots = torch.where(visible[:, : slots.shape[1]], slots, -1)
        out, _ = forward.store.sparse_mla_decode(
            self.name,
            forward.batch,
            query.squeeze(2).contiguous(),
            slots,
            softmax_scale,
            second=self._second(visible, slots.shape[1]),
            sinks=options.get("sinks"),
        )
        return out.unsqueeze(1)

    def _second(self, visible: torch.Tensor | None, num_window: int) -> tuple[str, torch.Tensor] | None:
        """The compressed rows that a decode step reads as well."""
        return None


class CompressedLayer(WindowLayer):
    """A window, compressed rows of `ratio` tokens, and for ratio 4 the rows of an indexer."""

    def __init__(self, cache: "KVStoreCache", index: int, layer: str, has_indexer: bool) -> None:
        super().__init__(cache, index, f"{layer}.window")
        self.rows = {"compressor": f"{layer}.compressed"}
        self.states = {"compressor": f"{layer}.state"}
        if has_indexer:
            self.rows["indexer"] = f"{layer}.indexer"
            self.states["indexer"] = f"{layer}.indexer_state"
        self.compress_rate = cache.store.plan.spec(self.rows["compressor"]).tokens_per_row

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Writes K and gates of the new tokens, [rows, num_columns, dim] each.

        Returns: those of all tokens in windows that are full now, and the position of the first of these tokens.
        """
        forward, rate = self.cache.forward, self.compress_rate
        first = forward.start // rate * rate
        forward.write(self.states[name], torch.cat([kv, gate], dim=-1).float().unsqueeze(1))
        if first < forward.start:
            (held,) = forward.read(self.states[name], first, forward.start - first)
            held_kv, held_gate = held.squeeze(1).chunk(2, dim=-1)
            kv, gate = torch.cat([held_kv.to(kv.dtype), kv], dim=1), torch.cat([held_gate.to(gate.dtype), gate], dim=1)
        usable = kv.shape[1] // rate * rate
        return kv[:, :usable], gate[:, :usable], first

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Writes full windows, [rows, num_windows, rate, dim], with the gates as they are used.

        Returns: K and gates of the window before, [rows, rate, head_dim] each; None where there is none.
        """
        forward, rate = self.cache.forward, self.compress_rate
        first = forward.start // rate * rate
        full = torch.cat([chunk_kv.float(), chunk_gate.float()], dim=-1).flatten(1, 2)
        forward.write_at(self.states[name], first, full)
        if not first:
            return None, None
        (held,) = forward.read(self.states[name], first - rate, rate)
        kv, gate = held.squeeze(1).chunk(2, dim=-1)
        return kv[..., :head_dim], gate[..., :head_dim]

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Writes the rows that have closed, [rows, n, dim], and returns all rows of the sequence.

        Rows of the compressor that the attention function reads from their pages come as zeros.
        """
        forward, rate = self.cache.forward, self.compress_rate
        count = forward.end // rate
        if compressed.shape[1]:
            forward.write_at(self.rows[name], forward.start // rate, compressed)
        forward.written.add(self.rows[name])
        if name == "compressor" and self.reads_pages and forward.reads_pages:
            return compressed.new_zeros(1).expand(len(compressed), count, compressed.shape[2])
        if not count:
            return compressed
        return forward.read(self.rows[name], 0, count)[0].squeeze(1)

    def _second(self, visible: torch.Tensor | None, num_window: int) -> tuple[str, torch.Tensor] | None:
        forward = self.cache.forward
        count = forward.end // self.compress_rate
        if not count:
            return None
        slots = forward.slots(self.rows["compressor"], 0, count)
        if visible is not None:
            slots = torch.where(visible[:, num_window:], slots, -1)
        return self.rows["compressor"], slots
