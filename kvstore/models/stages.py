"""Names of layers, draft layers, and the layers that one pipeline stage holds."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from kvstore.errors import PlanError
from kvstore.models.config import Fields
from kvstore.models.options import ModelOptions
from kvstore.specs import Alias, AnySpec

LayerCaches = Mapping[str, AnySpec]
"""The caches of one layer by what they are: {"attn": spec}; empty for a layer without any."""

Family = Callable[[Fields, ModelOptions], dict[str, AnySpec]]
"""From the fields of a config to {layer: spec}, in layer order."""


def name_layers(layers: Sequence[LayerCaches], draft: LayerCaches, options: ModelOptions) -> dict[str, AnySpec]:
    """{"layers.{i}.{cache}": spec} of the caller's stage; draft layers, "draft.{i}.{cache}", are on the last one.

    Raises: PlanError for draft layers of a model that has no model of them, for more stages than layers, for an alias
        of a cache on another stage, and for an option about caches that the model does not have.
    """
    _check_options(layers, draft, options)
    stages = stage_ranges(len(layers), options.pipeline_stages)
    _check_aliases(layers, stages)
    stage = options.pipeline_stage or 0
    names = {f"layers.{layer}.{cache}": spec for layer in stages[stage] for cache, spec in layers[layer].items()}
    if stage == options.pipeline_stages - 1:
        drafts = range(options.num_draft_layers)
        names |= {f"draft.{layer}.{cache}": spec for layer in drafts for cache, spec in draft.items()}
    return names


def stage_ranges(num_layers: int, num_stages: int) -> list[range]:
    """Contiguous layers per stage, as even as can be; the first stages take one more when they do not divide.

    Raises: PlanError when there are more stages than layers.
    """
    if num_stages > max(num_layers, 1):
        raise PlanError(f"pipeline_stages: expected at most the {num_layers} layers of the model, got {num_stages}")
    size, longer = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, longer) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _check_options(layers: Sequence[LayerCaches], draft: LayerCaches, options: ModelOptions) -> None:
    if options.num_draft_layers and not draft:
        raise PlanError(
            f"num_draft_layers: the model has no layer of full attention that a draft layer could be like, "
            f"got {options.num_draft_layers}"
        )
    caches = {(cache, spec.kind) for layer in layers for cache, spec in layer.items()}
    if options.state_dtype is not None and not any(kind == "state" for _, kind in caches):
        raise PlanError("state_dtype: the model has no recurrent states")
    if options.indexer_row_bytes is not None and not any(cache == "indexer" for cache, _ in caches):
        raise PlanError("indexer_row_bytes: the model has no indexers")
    if options.ring_states and not any(kind == "ring" for _, kind in caches):
        raise PlanError("ring_states: the model has no compressor states")


def _check_aliases(layers: Sequence[LayerCaches], stages: Sequence[range]) -> None:
    homes = {
        f"layers.{layer}.{cache}": stage
        for stage, held in enumerate(stages)
        for layer in held
        for cache in layers[layer]
    }
    for name, stage in homes.items():
        _, layer, cache = name.split(".")
        spec = layers[int(layer)][cache]
        if isinstance(spec, Alias) and homes[spec.of] != stage:
            raise PlanError(
                f"pipeline_stages: {name!r} on stage {stage} reads the cache of {spec.of!r} on stage "
                f"{homes[spec.of]}: expected both on one stage"
            )
