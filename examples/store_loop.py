"""The calls of a decode loop, with random numbers in place of a model: python examples/store_loop.py"""

import numpy as np
import torch

from kvstore import KVStore, full_attention, plan_cache

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 8, 2, 64
layers = {f"layers.{i}.attn": full_attention(NUM_KV_HEADS, HEAD_DIM, dtype=torch.float32) for i in range(NUM_LAYERS)}
plan = plan_cache(layers, memory="8MiB")
store = KVStore(plan, "cpu", max_sequences=4, max_length=256, max_tokens_per_step=256)

system = np.arange(40)  # the prompts share their first 40 tokens
first = store.open([np.append(system, [101, 102])])
prompt = store.extend(first.seq_ids, [42])
for layer in layers:
    store.write(layer, prompt, *torch.randn(2, prompt.num_tokens, NUM_KV_HEADS, HEAD_DIM))
store.commit(prompt, np.append(system, [101, 102]))

second = store.open([np.append(system, [201])])
print(f"cached tokens of the second prompt: {second.cached_tokens[0]}")  # its whole blocks of 16
rest = store.extend(second.seq_ids, 41 - second.cached_tokens)
for layer in layers:
    store.write(layer, rest, *torch.randn(2, rest.num_tokens, NUM_KV_HEADS, HEAD_DIM))
    keys, values = store.gather(layer, rest)
    print(f"{layer}: rows of the second sequence gathered for prefill attention: {list(keys.shape)}")
store.commit(rest, np.append(system, [201])[second.cached_tokens[0] :])

seq_ids = np.concatenate([first.seq_ids, second.seq_ids])
for token in range(3):
    step = store.extend(seq_ids, 1)
    for layer in layers:
        store.write(layer, step, *torch.randn(2, step.num_tokens, NUM_KV_HEADS, HEAD_DIM))
        out, _ = store.gqa_decode(layer, step, torch.randn(len(seq_ids), NUM_HEADS, HEAD_DIM))
    store.commit(step, [token, token])
    print(f"step {token}: lengths {step.seq_lens.tolist()}, attention output {list(out.shape)}")

store.release(seq_ids)
store.check()
print(store.stats())
