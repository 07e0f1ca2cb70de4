"""StateLayer: a linear-attention layer, whose convolution inputs and recurrent tensor lie in state blocks."""

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers.cache_utils import LinearAttentionCacheLayerMixin

if TYPE_CHECKING:
    from kvstore.integrations.transformers.cache import KVStoreCache


class StateLayer(LinearAttentionCacheLayerMixin):
    """The state of one layer after the last computed token of each row.

    transformers keeps `kernel` inputs of the convolution, [rows, channels, kernel], and changes them in place in a
    decode step; the last kernel - 1 of them matter and are stored. So a state is read where the module asks for it,
    and written where the module hands over the recurrent tensor, which is what it does last.
    """

    is_croppable = False
    record_past = False

    def __init__(self, cache: "KVStoreCache", index: int, name: str) -> None:
        self.cache, self.index, self.name = cache, index, name
        spec = cache.store.plan.spec(name)
        shapes = {part.name: part.shape for part in spec.format.parts}
        if set(shapes) != {"conv", "recurrent"} or None in shapes.values():
            raise ValueError(f"store: layer {name!r}: expected a state of conv and recurrent, got {sorted(shapes)}")
        self.kernel = shapes["conv"][0] + 1  # type: ignore[index]
        self._conv: torch.Tensor | None = None
        self._num_columns = 1  # of this pass, until `update_conv_state` says otherwise

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the blocks are there."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises: ValueError, a layer with a state has no K and V."""
        raise ValueError(
            f"store: layer {self.index} keeps a recurrent state in the plan, and K and V in the model: the plan is of "
            "another config, plan_model(model) makes its own"
        )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Nothing: the cache moves all layers at once."""

    def activate_past_recording(self) -> None:
        """Nothing: a state cannot go back, which `is_croppable` says."""

    def conv_state(self) -> torch.Tensor | None:
        """[rows, channels, kernel], a copy that the module may change; None before the first token."""
        inputs = self._read("conv")
        self._conv = None if inputs is None else functional.pad(inputs.transpose(1, 2), (1, 0))
        return self._conv

    def recurrent_state(self) -> torch.Tensor | None:
        """[rows, num_heads, key_dim, value_dim], a copy; None before the first token."""
        state = self._read("recurrent")
        return None if state is None else state.transpose(-1, -2).contiguous()

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """The inputs of the convolution [rows, channels, num_columns] with those before them, zeros at the start."""
        if self._conv is not None and len(self._conv) != len(conv_states):
            raise ValueError(
                f"rows_per_prompt: the state that was found is for {len(self._conv)} rows, the model's batch has "
                f"{len(conv_states)}: expected KVStoreCache(..., rows_per_prompt=num_beams or num_return_sequences)"
            )
        if self._conv is None:
            full = functional.pad(conv_states, (max(self.kernel - conv_states.shape[-1], 0), 0))
        else:
            full = torch.cat([self._conv, conv_states], dim=-1)
        self._conv, self._num_columns = full[..., -self.kernel :], conv_states.shape[-1]
        return full

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Writes the state, [rows, num_heads, key_dim, value_dim], and the inputs of the convolution with it."""
        assert self._conv is not None
        forward = self.cache.begin(self.index, len(recurrent_states), self._num_columns, None)
        tensors = forward.store.state_view(self.name)
        blocks = forward.store.state_blocks(self.name, forward.batch)[:, 1].long()
        new = {"conv": self._conv[..., 1:].transpose(1, 2), "recurrent": recurrent_states.transpose(-1, -2)}
        has_tokens = torch.from_numpy(forward.batch.num_new_tokens > 0).to(blocks.device)
        for name, tensor in tensors.items():
            state = forward.narrow(new[name])
            if state.dtype != tensor.dtype or state.shape[1:] != tensor.shape[1:]:
                raise ValueError(
                    f"store: layer {self.name!r} is planned for {name!r} of {list(tensor.shape[1:])} {tensor.dtype}, "
                    f"the model's is {list(state.shape[1:])} {state.dtype}: the plan is of another config, "
                    "plan_model(model) makes its own"
                )
            # Rows that are padding so far go to block 0, the null block, which nobody reads.
            tensor[torch.where(has_tokens, blocks, 0)] = state
        self._conv, self._num_columns = None, 1
        forward.written.add(self.name)
        return recurrent_states

    def _read(self, part: str) -> torch.Tensor | None:
        if not self.cache.start_of(self.index):
            return None
        blocks = self.cache.blocks_to_read(self.index, self.name)
        state = self.cache.store.state_view(self.name)[part][blocks]
        state[blocks == 0] = 0  # no token of the row yet
        return self.cache.widen(state)
