"""Cache layers of K and V, of latent rows, and of latent rows with an indexer: what `Cache.update` does with pages."""

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from kvstore.integrations.transformers.cache import KVStoreCache
    from kvstore.integrations.transformers.forward import Forward

PAGES = "kvstore_layer"
"""The keyword by which a layer of the cache reaches the attention function."""


class PagedLayer(CacheLayerMixin):
    """K and V of one layer, all of them or those in a window.

    `update` writes the new rows to their pages. It returns the old and the new ones in columns, as transformers' own
    cache does, unless the attention function reads pages: in a decode step that one gets nothing but the new row.
    """

    supports_early_init = False
    is_initialized = True
    keys = values = None

    def __init__(self, cache: "KVStoreCache", index: int, name: str) -> None:
        self.cache, self.index, self.name = cache, index, name
        self.window = cache.store.plan.spec(name).window
        self.is_sliding = self.window is not None
        self.reads_pages = False  # the attention function says so when it is called first

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return self.cache.is_croppable

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the pages are there."""

    def get_seq_length(self) -> int:
        """Columns computed so far."""
        return self.cache.length

    def get_max_length(self) -> int:
        """-1, none: the store raises where a sequence grows beyond its max_length."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns `update` returns, and the first of them."""
        first = self._first_column(self.cache.length)
        return self.cache.length + query_length - first, first

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes K and V, [rows, num_kv_heads, num_columns, head_dim], and returns those of all columns in reach."""
        forward = self.cache.begin(self.index, key_states.shape[0], key_states.shape[2], _passed_on(kwargs))
        self.store_rows(key_states, value_states)
        if self.hands_over(kwargs):
            return key_states, value_states
        first = self._first_column(forward.start)
        return self.split(forward.read(self.name, first, forward.end - first), key_states.shape[-1])

    def store_rows(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Writes what `update` got."""
        self.cache.forward.write(self.name, key_states, value_states)

    def split(self, parts: tuple[torch.Tensor, ...], num_first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors of `update`, from those of the row format."""
        keys, values = parts
        return keys, values

    def hands_over(self, kwargs: dict[str, Any]) -> bool:
        """Offers itself to the attention function; whether that one reads the pages of this pass."""
        passed_on = _passed_on(kwargs)
        if passed_on is None:
            return False
        passed_on[PAGES] = self
        return self.reads_pages and self.cache.forward.reads_pages

    def decode(self, module: Any, query: torch.Tensor, softmax_scale: float, **options: Any) -> torch.Tensor:
        """Attention of one new token per row over the pages.

        Args:
            module: the attention module of the model.
            query: [rows, num_heads, 1, head_dim].
            options: sinks, soft_cap: as `KVStore.gqa_decode`; visible: bool [rows, num_keys], what the mask leaves;
                others are for other kinds of layers.

        Returns: [rows, 1, num_heads, head_dim_v].

        Raises: ValueError for a mask that hides a token behind the padding. On a GPU it is not looked at, which would
            wait for the device.
        """
        forward = self._expect_whole(options.get("visible"))
        known = {name: options[name] for name in ("sinks", "soft_cap") if options.get(name) is not None}
        q = query.squeeze(2).contiguous()
        out, _ = forward.store.gqa_decode(self.name, forward.batch, q, softmax_scale, **known)
        return out.unsqueeze(1)

    def _expect_whole(self, visible: torch.Tensor | None) -> "Forward":
        """The pass, whose rows are all visible but for the padding."""
        forward = self.cache.forward
        if visible is not None and visible.device.type == "cpu":
            lens = forward.batch.seq_lens
            wanted = lens if self.window is None else lens.clamp(max=self.window)
            wrong = visible.sum(1) != wanted
            if wrong.any():
                row = int(wrong.int().argmax())
                raise ValueError(
                    f"attention_mask: expected ones for all tokens behind the padding, got {int(visible[row].sum())} "
                    f"visible tokens of {int(wanted[row])} in row {row}: pages are read whole"
                )
        return forward

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Nothing: the cache moves all layers at once."""

    def _first_column(self, start: int) -> int:
        return 0 if self.window is None else max(start - self.window + 1, 0)


class LatentLayer(PagedLayer):
    """Latent rows (MLA): `update` gets their nope and rope columns, [rows, 1, num_columns, dim] each."""

    def split(self, parts: tuple[torch.Tensor, ...], num_first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Nope and rope columns."""
        return parts[0][..., :num_first], parts[0][..., num_first:]

    def decode(self, module: Any, query: torch.Tensor, softmax_scale: float, **options: Any) -> torch.Tensor:
        """As `PagedLayer.decode`, over latent rows: the up-projections are absorbed into query and output."""
        forward = self._expect_whole(options.get("visible"))
        q, up_v = self._absorb(module, query)
        indices = options.get("indices")
        if indices is None:
            out, _ = forward.store.mla_decode(self.name, forward.batch, q, softmax_scale)
        else:  # [rows, 1, k], columns that the indexer has chosen
            slots = forward.slots(self.name, 0, forward.end).gather(1, indices.squeeze(1).long())
            out, _ = forward.store.sparse_mla_decode(self.name, forward.batch, q, slots, softmax_scale)
        return torch.einsum("bhr,hvr->bhv", out, up_v).unsqueeze(1)

    def _absorb(self, module: Any, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [rows, num_heads, latent_dim] on latent rows, and what turns an output to V [heads, v_dim, rank]."""
        nope_dim, v_dim = module.qk_nope_head_dim, module.v_head_dim
        up = module.kv_b_proj.weight.unflatten(0, (-1, nope_dim + v_dim))
        nope, rope = query.squeeze(2).split([nope_dim, module.qk_rope_head_dim], dim=-1)
        absorbed = torch.einsum("bhd,hdr->bhr", nope, up[:, :nope_dim])
        return torch.cat([absorbed, rope], dim=-1), up[:, nope_dim:]


class IndexedLayer(LatentLayer):
    """Latent rows, and the keys of an indexer that chooses among them."""

    def __init__(self, cache: "KVStoreCache", index: int, name: str, indexer: str) -> None:
        super().__init__(cache, index, name)
        self.indexer = indexer

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Writes keys [rows, num_columns, dim] and returns those of all columns."""
        forward = self.cache.forward
        forward.write(self.indexer, indexer_key_states.unsqueeze(1))
        return forward.read(self.indexer, 0, forward.end)[0].squeeze(1)


def _passed_on(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The keywords that the attention module passes on to the attention function, if it showed them."""
    passed_on = kwargs.get("kwargs")
    return passed_on if isinstance(passed_on, dict) else None
