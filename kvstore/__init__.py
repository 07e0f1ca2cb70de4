"""A paged KV-cache store to embed in an inference engine: planner, arena, books and kernels.

    plan = kvstore.plan_cache(model, memory="8GiB")    what is stored where: a frozen value, no device is touched
    store = kvstore.KVStore(plan, "cuda")              the bytes, and which sequence holds which block
    opened = store.open(prompts)                       sequences, with what others have computed
    batch = store.extend(opened.seq_ids, counts)       rows for the new tokens of a step, all or nothing
    store.write(layer, batch, k, v)                    layer by layer; then a read: gqa_decode, mla_decode, gather
    store.commit(batch, token_ids)                     the rows are there

`kvstore.integrations` has what models of transformers and kernels of other libraries take, the package
`kvstore_kernels` the kernels alone.
"""

from kvstore.batch import Batch, GraphBuffers
from kvstore.capacity import Capacity
from kvstore.choose import group_layers
from kvstore.errors import NeverFits, OutOfBlocks, PlanError, SequenceError
from kvstore.events import BlocksRemoved, BlocksStored, EventsLost, PrefixesCleared
from kvstore.export import CsrTable
from kvstore.groups import CacheGroup
from kvstore.hits import Stop
from kvstore.layers import chunked_attention, full_attention, latent, recurrent_state, sliding_window
from kvstore.models import specs_from_config
from kvstore.models.bundled import bundled_models
from kvstore.namespaces import Item, Namespace
from kvstore.placement import LayerSlot, Placement, bucket_layers_by_page_size, pool_bytes_per_block
from kvstore.plan import CachePlan
from kvstore.planner import plan_cache
from kvstore.prefixes import HitReport
from kvstore.retain import KeepTokens
from kvstore.spec_json import specs_from_json
from kvstore.specs import Alias, LayerSpec, NoCache, Retention
from kvstore.stats import GroupStats, StoreStats
from kvstore.store import KVStore, Opened
from kvstore.unify import promote_windows
from kvstore.workers import count_replicas, plan_distributed, plan_workers

__version__ = "0.1.0"
"""The version of both packages, kvstore and kvstore_kernels."""

__all__ = [
    "Alias",
    "Batch",
    "BlocksRemoved",
    "BlocksStored",
    "CacheGroup",
    "CachePlan",
    "Capacity",
    "CsrTable",
    "EventsLost",
    "GraphBuffers",
    "GroupStats",
    "HitReport",
    "Item",
    "KVStore",
    "KeepTokens",
    "LayerSlot",
    "LayerSpec",
    "Namespace",
    "NeverFits",
    "NoCache",
    "Opened",
    "OutOfBlocks",
    "Placement",
    "PlanError",
    "PrefixesCleared",
    "Retention",
    "SequenceError",
    "Stop",
    "StoreStats",
    "__version__",
    "bucket_layers_by_page_size",
    "bundled_models",
    "chunked_attention",
    "count_replicas",
    "full_attention",
    "group_layers",
    "latent",
    "plan_cache",
    "plan_distributed",
    "plan_workers",
    "pool_bytes_per_block",
    "promote_windows",
    "recurrent_state",
    "sliding_window",
    "specs_from_config",
    "specs_from_json",
]
