"""A decode step of DeepSeek V3.2 with the kernels alone: index, choose, attend.

    new tokens -> write_rows -> indexer_scores -> top-k -> slots -> sparse_mla_decode

The indexer's cache has 132-byte rows, the latent cache 656-byte rows (`fp8_ds_mla`). On a GPU the step below can be
captured into a CUDA graph: warm_up has compiled what it launches, and all tensors it fills are made beforehand.
"""

import torch

from kvstore_kernels import (
    PageView,
    RowFormat,
    compute_slot_mapping,
    fp8_ds_mla_format,
    index_checks,
    indexer_format,
    indexer_scores,
    mla_decode,
    sparse_mla_decode,
    warm_up,
    workspace_numel,
    write_rows,
)

BLOCK, NUM_BLOCKS, HEADS, INDEX_HEADS, TOP_K, SPLITS = 64, 16, 16, 64, 128, 4
LENS = (300, 70)  # rows of two sequences, those of this step included
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pages(row_format: RowFormat) -> PageView:
    """NUM_BLOCKS pages that touch each other."""
    page_bytes = row_format.page_bytes(BLOCK)
    memory = torch.zeros(NUM_BLOCKS * page_bytes, dtype=torch.uint8, device=DEVICE)
    return PageView(memory, 0, page_bytes, NUM_BLOCKS, BLOCK, row_format)


keys, latents = pages(indexer_format(132)), pages(fp8_ds_mla_format())
table = torch.tensor([[1, 2, 3, 4, 5], [6, 7, -1, -1, -1]], dtype=torch.int32, device=DEVICE)
row_lens = torch.tensor(LENS, dtype=torch.int32, device=DEVICE)
out = torch.empty(len(LENS), HEADS, 512, dtype=torch.bfloat16, device=DEVICE)
lse = torch.empty(len(LENS), HEADS, device=DEVICE)
workspace = torch.empty(workspace_numel(len(LENS), HEADS, 512, SPLITS), device=DEVICE)


def step(
    positions: torch.Tensor,
    seq_idx: torch.Tensor,
    key: torch.Tensor,
    latent: torch.Tensor,
    index_q: torch.Tensor,
    weights: torch.Tensor,
    q: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """One layer's step; `out` and `lse` hold the result. Returns how many rows each query has seen."""
    slots = compute_slot_mapping(table, positions, seq_idx, BLOCK)
    write_rows(keys, slots, key)
    write_rows(latents, slots, latent)
    scores = indexer_scores(keys, table, row_lens, index_q, weights)  # [num_seqs, rows], -inf where there is no row
    best, columns = scores.topk(min(top_k, scores.shape[1]))
    blocks = table.gather(1, columns // BLOCK).long()
    listed = torch.where(best > -torch.inf, blocks * BLOCK + columns % BLOCK, -1)
    sparse_mla_decode(
        latents, listed, q, softmax_scale=192**-0.5, out=out, lse=lse, num_splits=SPLITS, workspace=workspace
    )
    return (listed >= 0).sum(1)


def rows(num_tokens: int, *axes: int) -> torch.Tensor:
    """Random bf16."""
    return torch.randn(num_tokens, *axes, dtype=torch.bfloat16, device=DEVICE)


def inputs(positions: list[int], seq_idx: list[int], top_k: int) -> tuple[torch.Tensor | int, ...]:
    """The arguments of a step that writes these tokens."""
    tokens = torch.tensor(positions, device=DEVICE), torch.tensor(seq_idx, dtype=torch.int32, device=DEVICE)
    new = rows(len(positions), 1, 128), rows(len(positions), 1, 576)
    queries = rows(len(LENS), INDEX_HEADS, 128), torch.rand(len(LENS), INDEX_HEADS, device=DEVICE)
    return *tokens, *new, *queries, rows(len(LENS), HEADS, 576), top_k


def main() -> None:
    """Fills the caches, compares a step that lists every row with dense attention, and compiles the step."""
    print("calls of warm_up:", warm_up([keys], num_heads=[INDEX_HEADS]) + warm_up([latents], num_heads=[HEADS]))
    prompt = [position for length in LENS for position in range(length)]
    owners = [seq for seq, length in enumerate(LENS) for _ in range(length)]
    last = [length - 1 for length in LENS]
    with index_checks():  # every index is looked at, at the price of a synchronisation
        seen = step(*inputs(prompt, owners, max(LENS)))
    print("rows seen:", seen.tolist())
    arguments = inputs(last, [0, 1], max(LENS))
    step(*arguments)
    dense, _ = mla_decode(latents, table, row_lens, arguments[6], softmax_scale=192**-0.5)
    print("equals dense attention:", torch.allclose(out, dense, atol=2e-2))
    print("rows seen of the best:", step(*arguments[:-1], TOP_K).tolist())
    chosen = out.clone()
    torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments[:-1], TOP_K)
    print("the same when compiled:", torch.equal(out, chosen))


if __name__ == "__main__":
    main()
