"""Two groups with equal pages but other block sizes, dtypes and rows, in one slot tensor.

Run it with: python examples/shared_slots.py
"""

import torch

from kvstore import KVStore, full_attention, latent, plan_cache

specs = {
    "layers.0.attn": full_attention(2, 36, dtype=torch.float16, block_size=16),  # 16 tokens of K and V: 4,608 B
    "layers.1.attn": full_attention(2, 36, dtype=torch.float16, block_size=16),
    "layers.2.attn": latent(72, 64, block_size=32),  # 32 rows of an MLA latent in bf16: 4,608 B
    "layers.3.attn": full_attention(1, 8, dtype=torch.float32, block_size=16),  # another page size: 1,024 B
}
plan = plan_cache(specs, memory="128KiB", grouping="uniform", layout="buckets")
print(plan.explain())

store = KVStore(plan, "cpu", max_sequences=2, max_length=64, max_tokens_per_step=64)
batch = store.extend(store.open([range(40)]).seq_ids, 40)
written = {}
for layer, spec in specs.items():
    shapes = [(40, part.num_heads, part.head_dim) for part in spec.format.parts]
    written[layer] = [torch.randn(shape).to(spec.format.parts[0].dtype) for shape in shapes]
    store.write(layer, batch, *written[layer])
for layer, rows in written.items():
    same = all(map(torch.equal, store.gather(layer, batch), rows))
    view = store.page_view(layer)
    print(f"{layer}: slot tensor at {view.memory.data_ptr():#x}, stride {view.block_stride_bytes}, rows intact: {same}")
