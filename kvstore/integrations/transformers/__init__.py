"""A KVStore under transformers 5: its models and `generate`, on our pages.

    plan = plan_model(model, memory="4GiB")
    store = KVStore(plan, "cpu", max_sequences=8, max_length=4096)
    with KVStoreCache(store, input_ids, attention_mask) as cache:
        output_ids = model.generate(input_ids, attention_mask=attention_mask, cache=cache)
        cache.commit(output_ids)  # the next call finds these tokens

`register_attention()` adds the attention function "kvstore", which reads pages in decode steps where others gather.
"""

from kvstore.integrations.transformers.attention import register_attention
from kvstore.integrations.transformers.cache import KVStoreCache
from kvstore.integrations.transformers.planning import FAMILIES, model_specs, plan_model

__all__ = ["FAMILIES", "KVStoreCache", "model_specs", "plan_model", "register_attention"]
