"""Three mistakes that a type checker finds, each where a comment names its kind."""

import torch

import kvstore

layers = {"layers.0.attn": kvstore.full_attention(2, 64, dtype=torch.float32)}
plan = kvstore.plan_cache(layers, memory=1.5)  # arg-type
store = kvstore.KVStore(plan, "cpu")
opened = store.open([[1, 2, 3]])
batch = store.extend(opened.seq_ids)  # call-arg
print(batch.block_tables)  # attr-defined
