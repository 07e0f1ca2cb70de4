"""A paged KV-cache store to embed in an inference engine: planner, arena, books and kernels."""

from kvstore.batch import Batch
from kvstore.errors import OutOfBlocks, PlanError, SequenceError
from kvstore.groups import CacheGroup, group_layers
from kvstore.models import specs_from_config
from kvstore.placement import LayerSlot, Placement, bucket_layers_by_page_size, pool_bytes_per_block
from kvstore.planner import CachePlan, plan_cache
from kvstore.specs import LayerSpec, Retention, full_attention, latent, sliding_window
from kvstore.store import KVStore, Opened, StoreStats

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CacheGroup",
    "CachePlan",
    "KVStore",
    "LayerSlot",
    "LayerSpec",
    "Opened",
    "OutOfBlocks",
    "Placement",
    "PlanError",
    "Retention",
    "SequenceError",
    "StoreStats",
    "__version__",
    "bucket_layers_by_page_size",
    "full_attention",
    "group_layers",
    "latent",
    "plan_cache",
    "pool_bytes_per_block",
    "sliding_window",
    "specs_from_config",
]
