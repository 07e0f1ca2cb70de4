"""Layer specs as JSON: a list of objects, one per layer, for models without a config file.

    [{"name": "layers.0.attn", "kind": "full", "block_size": 16, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"},
     {"name": "layers.0.indexer", "kind": "latent", "block_size": 64, "kv_heads": 1, "row_bytes": 132, ...}]

Rows are given by shape (kv_heads, head_dim, head_dim_v, dtype), or as packed bytes per head (row_bytes), or by the
name of a row format ("format": "fp8_ds_mla"); states by their tensors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import lcm
from pathlib import Path
from typing import Any

import torch

from kvstore.errors import PlanError, plan_int
from kvstore.specs import KINDS, Alias, AnySpec, LayerSpec, NoCache
from kvstore_kernels import FORMATS
from kvstore_kernels.formats import ALIGNMENT_BYTES, RowFormat, RowPart, dtype_from_name
from kvstore_kernels.quantised import bytes_format, state_format

LATENT_KINDS = ("latent", "latent_window", "ring")

NAMED_FORMATS = tuple(name for name in FORMATS if name not in ("bytes", "state"))
"""Names that the field `format` takes."""

FIXED_FORMATS = tuple(name for name in NAMED_FORMATS if not name.startswith(("kv", "latent", "int8_", "fp8_token")))
"""Those of them whose rows have one shape only."""

KNOWN_KINDS = (*KINDS, Alias.kind, NoCache.kind)

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short names beside torch's."""

FIELDS = (
    "name",
    "kind",
    "block_size",
    "kv_heads",
    "head_dim",
    "head_dim_v",
    "value_dim",
    "dtype",
    "row_bytes",
    "format",
    "tokens_per_row",
    "alignment",
    "stride_alignment",
    "padded_page_bytes",
    "window",
    "chunk",
    "state",
    "speculative_blocks",
    "checkpoint_blocks",
    "tp_shards",
    "page_bytes",
    "payload_bytes",
    "of",
)
"""Fields of a layer. `page_bytes` and `payload_bytes` are compared with what the others give; `of` is an alias's."""


def specs_from_json(source: str | Path | Sequence[Mapping[str, Any]]) -> dict[str, AnySpec]:
    """{layer: spec} from a list of objects, or the path of a JSON file that holds one.

        [{"name": "layers.0.attn", "kind": "full", "block_size": 16, "kv_heads": 8, "head_dim": 128, "dtype": "bf16"},
         {"name": "layers.1.attn", "kind": "sliding_window", "block_size": 16, "kv_heads": 8, "head_dim": 128,
          "dtype": "bf16", "window": 1024},
         {"name": "layers.2.state", "kind": "state", "block_size": 16,
          "state": [{"name": "conv", "shape": [3, 8192], "dtype": "bf16"},
                    {"name": "ssm", "shape": [32, 128, 128], "dtype": "fp32"}]},
         {"name": "layers.3.attn", "kind": "latent", "block_size": 64, "format": "fp8_ds_mla"},
         {"name": "layers.4.attn", "kind": "alias", "of": "layers.0.attn"}]

    `FIELDS` lists every field; a dtype is torch's name, or bf16, fp16, fp32.

    Raises: PlanError that names the layer and the field: no list of objects, an unknown or missing field, a number out
        of range, page or payload bytes that the other fields do not give, two layers of one name.
    """
    layers = _read(Path(source)) if isinstance(source, str | Path) else source
    if not isinstance(layers, Sequence):
        raise PlanError(f"specs: expected a list of objects, got {type(layers).__name__}")
    specs: dict[str, AnySpec] = {}
    for index, fields in enumerate(layers):
        if not isinstance(fields, Mapping):
            raise PlanError(f"specs: layer {index}: expected an object with fields, got {fields!r}")
        name = fields.get("name")
        if not isinstance(name, str) or not name:
            raise PlanError(f"specs: layer {index}: name: expected a non-empty string, got {name!r}")
        if name in specs:
            raise PlanError(
                f"specs: layer {index}: name: expected another than that of a layer before it, got {name!r}"
            )
        specs[name] = spec_from_fields(name, fields)
    return specs


def spec_from_fields(layer: str, fields: Mapping[str, Any]) -> AnySpec:
    """The spec that one object describes; see `specs_from_json` for the errors."""
    unknown = sorted(str(name) for name in fields if name not in FIELDS)
    if unknown:
        close = get_close_matches(unknown[0], FIELDS, 1)
        known = f"{close[0]!r}" if close else f"one of {', '.join(FIELDS)}"
        raise PlanError(f"layer {layer!r}: unknown field {unknown[0]!r}: expected {known}")
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KNOWN_KINDS:
        raise PlanError(f"layer {layer!r}: kind: expected one of {', '.join(KNOWN_KINDS)}, got {kind!r}")
    if kind in (Alias.kind, NoCache.kind):
        foreign = sorted(fields.keys() - ({"name", "kind", "of"} if kind == Alias.kind else {"name", "kind"}))
        if foreign:
            raise PlanError(f"layer {layer!r}: field {foreign[0]!r}: kind {kind!r} has none")
    try:
        if kind == "alias":
            return Alias(fields.get("of"))  # type: ignore[arg-type]
        if kind == "none":
            return NoCache()
        spec = LayerSpec(
            kind,
            fields.get("block_size"),  # type: ignore[arg-type]
            _row_format(fields),
            tokens_per_row=fields.get("tokens_per_row", 1),
            window=fields.get("window"),
            padded_page_bytes=fields.get("padded_page_bytes"),
            chunk=fields.get("chunk"),
            block_stride_multiple=fields.get("stride_alignment", ALIGNMENT_BYTES),
            speculative_blocks=fields.get("speculative_blocks", 0),
            checkpoint_blocks=fields.get("checkpoint_blocks", 0),
            num_shards=fields.get("tp_shards"),
        )
    except (TypeError, ValueError) as error:  # PlanError is a ValueError
        raise PlanError(f"layer {layer!r}: {error}") from None
    for name in ("page_bytes", "payload_bytes"):
        if name in fields and fields[name] != getattr(spec, name):
            raise PlanError(
                f"layer {layer!r}: {name}: expected the {getattr(spec, name)} that its other fields give, "
                f"got {fields[name]!r}"
            )
    return spec


def _row_format(fields: Mapping[str, Any]) -> RowFormat:
    made = _made_format(fields)
    if "alignment" in fields:
        alignment = plan_int("alignment", fields["alignment"], 1)
        made = replace(made, page_alignment=lcm(ALIGNMENT_BYTES, alignment))
    return made


def _made_format(fields: Mapping[str, Any]) -> RowFormat:
    kind, name = fields.get("kind"), fields.get("format")
    if kind == "state":
        return state_format(_tensors(fields.get("state")))
    if name is not None and name not in NAMED_FORMATS:
        raise PlanError(f"format: expected one of {', '.join(NAMED_FORMATS)}, got {name!r}")
    if name in FIXED_FORMATS:
        return FORMATS[name]()
    heads = plan_int("kv_heads", fields.get("kv_heads", 1), 1)
    if "row_bytes" in fields:
        return bytes_format(heads * plan_int("row_bytes", fields["row_bytes"], 1), heads)
    head_dim = plan_int("head_dim", fields.get("head_dim"), 1)
    width_v = plan_int("head_dim_v", fields.get("head_dim_v", 0 if kind in LATENT_KINDS else head_dim), 0)
    if name in ("int8_token_head", "fp8_token_head"):
        return FORMATS[name](heads, head_dim, width_v)
    dtype = _dtype(fields.get("dtype"))
    if name == "latent":
        return FORMATS[name](head_dim, plan_int("value_dim", fields.get("value_dim"), 1), dtype)
    if width_v:
        return FORMATS[name or "kv"](heads, head_dim, width_v, dtype)
    row = RowPart("row", dtype, heads, head_dim)
    return RowFormat("row", (row,), (row.num_bytes,))


def _dtype(name: Any) -> torch.dtype:
    return dtype_from_name(DTYPES.get(name, name) if isinstance(name, str) else name)


def _tensors(state: Any) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    if not isinstance(state, Sequence) or isinstance(state, str) or not state:
        raise PlanError(f"state: expected a list of objects with shape and dtype, got {state!r}")
    tensors = []
    for index, tensor in enumerate(state):
        if not isinstance(tensor, Mapping) or not isinstance(tensor.get("shape"), Sequence):
            raise PlanError(f"state: tensor {index}: expected an object with shape and dtype, got {tensor!r}")
        shape = tuple(plan_int(f"state: tensor {index}: shape", size, 1) for size in tensor["shape"])
        tensors.append((tensor.get("name", f"state{index}"), shape, _dtype(tensor.get("dtype"))))
    return tensors


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"specs: cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"specs: expected JSON in {str(path)!r}: {error}") from error


def specs_to_dicts(specs: Mapping[str, AnySpec]) -> list[dict[str, Any]]:
    """Plain values in layer order, for JSON or another process; `specs_from_dicts` reads them back.

    Raises: PlanError for an entry that is no spec.
    """
    if not isinstance(specs, Mapping):
        raise PlanError(f"specs: expected a mapping of layer names to specs, got {type(specs).__name__}")
    rows: list[dict[str, Any]] = []
    for layer, spec in specs.items():
        if isinstance(spec, LayerSpec):
            rows.append({"name": layer, **spec.to_dict()})
        elif isinstance(spec, Alias):
            rows.append({"name": layer, "kind": spec.kind, "of": spec.of})
        elif isinstance(spec, NoCache):
            rows.append({"name": layer, "kind": spec.kind})
        else:
            raise PlanError(f"layer {layer!r}: expected a LayerSpec, Alias or NoCache, got {spec!r}")
    return rows


def specs_from_dicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, AnySpec]:
    """The specs that `specs_to_dicts` wrote. Raises: PlanError when the values are not theirs."""
    specs: dict[str, AnySpec] = {}
    for row in rows:
        values = {name: value for name, value in row.items() if name != "name"}
        if row["kind"] == Alias.kind:
            specs[row["name"]] = Alias(row["of"])
        elif row["kind"] == NoCache.kind:
            specs[row["name"]] = NoCache()
        else:
            specs[row["name"]] = LayerSpec.from_dict(values)
    return specs
