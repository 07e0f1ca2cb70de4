"""The calls of an engine, as its author types them: `mypy --strict` has nothing to say."""

import torch

import kvstore
import kvstore_kernels as kernels
from kvstore.integrations.metadata import VllmMetadata, export_check, vllm_metadata


def planned(model: str | dict[str, kvstore.LayerSpec]) -> kvstore.CachePlan:
    plan = kvstore.plan_cache(model, memory="4MiB", layout="overlay")
    length: int | None = plan.max_length()
    print(plan.layout, plan.capacity(512).num_sequences, length or 0, plan.blocks_needed([512]).shape)
    return kvstore.CachePlan.from_json(plan.to_json())


def serve(plan: kvstore.CachePlan, prompts: list[list[int]]) -> list[int]:
    store = kvstore.KVStore(plan, "cpu", max_sequences=len(prompts), max_length=512)
    opened = store.open(prompts, namespace=kvstore.Namespace(adapter="tuned"))
    batch = store.extend(opened.seq_ids, [len(prompt) for prompt in prompts])
    for layer in plan.layers:
        k = v = torch.randn(batch.num_tokens, 2, 64)
        store.write(layer, batch, k, v)
        keys, _ = store.gather(layer, batch)
        assert keys.shape == k.shape
        if not export_check(store, layer, "vllm"):
            tables: VllmMetadata = vllm_metadata(store, layer, batch)
            print(tables.block_table.shape)
    store.commit(batch, [token for prompt in prompts for token in prompt])
    step: kvstore.Batch = store.extend(opened.seq_ids, 1)
    for layer in plan.layers:
        out, lse = store.gqa_decode(layer, step, torch.randn(len(prompts), 8, 64))
        print(out.dtype, lse.shape)
    store.commit(step, [7] * len(prompts))
    in_use: int = store.stats().in_use
    store.release(opened.seq_ids)
    return [in_use, *opened.cached_tokens.tolist()]


def kernels_alone() -> torch.Tensor:
    row_format: kernels.RowFormat = kernels.fp8_ds_mla_format()
    page_bytes = row_format.page_bytes(64)
    view = kernels.PageView(torch.zeros(4 * page_bytes, dtype=torch.uint8), 0, page_bytes, 4, 64, row_format)
    kernels.write_rows(view, torch.arange(64, 128), torch.randn(64, 1, 576).bfloat16())
    (rows,) = kernels.read_rows(view, torch.tensor([64]))
    return rows


if __name__ == "__main__":
    layers = {f"layers.{i}.attn": kvstore.full_attention(2, 64, dtype=torch.float32) for i in range(2)}
    print(serve(planned(layers), [list(range(40)), list(range(100, 117))]))
    print(kernels_alone().shape)
