"""The peers of the kernel benchmark, with stand-ins of their libraries that have the signatures of the real ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer_stubs import VLLM, install
from peer_stubs_other import FLASH_MLA, FLASHINFER, SGLANG

from benchmarks.kernel_cases import Contender
from benchmarks.kernel_data import World
from benchmarks.kernel_peers import Absent, Peer, contenders
from benchmarks.kernel_peers_gpu import GPU_PEERS
from benchmarks.kernel_shapes import LATENT, Shape
from benchmarks.kernels import _checked, check

MODULES: dict[str, dict[str, Any]] = {
    **VLLM,
    **SGLANG,
    **FLASHINFER,
    "flash_mla": FLASH_MLA,
    "vllm.v1.attention.ops.flashmla": FLASH_MLA,
}
CPU = torch.device("cpu")
SHAPES = [
    Shape("write_rows", "kv", 128, 2),
    Shape("write_rows", "kv", 128, 3, rows_per_block=16, stride=3, kv_heads=2, head_dim=64),
    Shape("write_rows", rows=128, num_seqs=2, **LATENT),
    Shape("write_rows", rows=128, stride=2, **LATENT),
    Shape("write_rows", "fp8_ds_mla", 128, 2),
    Shape("gather_rows", rows=128, num_seqs=2, stride=2, **LATENT),
    Shape("gather_rows", "fp8_ds_mla", 128, 3),
    Shape("mla_decode", rows=192, num_seqs=2, **LATENT),
    Shape("mla_decode", rows=64, rows_per_block=16, stride=2, **LATENT),
    Shape("mla_decode", "fp8_ds_mla", 192, 2),
    Shape("sparse_mla_decode", rows=192, num_seqs=2, **LATENT),
    Shape("sparse_mla_decode", "fp8_ds_mla", 192, 2, num_heads=64),
    Shape("gqa_decode", "kv", 128, 2, num_heads=32),
    Shape("gqa_decode", "kv", 48, 3, rows_per_block=16, stride=2, kv_heads=4, head_dim=64),
    Shape("decode_step", "kv", 128, 2, num_heads=32),
]


def peers_of(shape: Shape) -> list[Peer]:
    world = World(shape, CPU)
    return [peer for peer in GPU_PEERS if shape.op in peer.ops and peer.takes(world)]


CASES = [
    pytest.param(shape, peer, id=f"{shape.name} {peer.name}".replace(", ", "-").replace(" ", "_"))
    for shape in SHAPES
    for peer in peers_of(shape)
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, MODULES)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("shape", "peer"), CASES)
def test_a_peer_gives_the_expected_result(shape: Shape, peer: Peer) -> None:
    contender = peer.make(World(shape, CPU))
    assert check(contender) is None
    assert check(contender) is None, "the second call"
    assert contender.name == peer.name
    assert peer.needs_gpu


def test_every_peer_has_a_case_and_every_case_of_the_default_run_has_peers() -> None:
    tried = {(peer.name, op) for shape in SHAPES for peer in peers_of(shape) for op in [shape.op]}
    assert tried == {(peer.name, op) for peer in GPU_PEERS for op in peer.ops}


def names(shape: Shape) -> list[str]:
    return [peer.name for peer in peers_of(shape)]


def test_peers_that_do_not_take_a_shape_are_left_out() -> None:
    assert names(Shape("write_rows", "dsv4", 64)) == []
    assert names(Shape("mla_decode", "latent", 64, kv_heads=1, head_dim=320)) == [
        "vLLM decode_attention_fwd",
        "SGLang decode_attention_fwd",
    ]
    assert "FlashMLA dense" not in names(Shape("mla_decode", rows=64, rows_per_block=32, **LATENT))
    assert "FlashInfer decode" not in names(Shape("gqa_decode", "kv", 64, dtype="fp32"))
    assert "SGLang set_mla_kv_buffer_triton" not in names(Shape("write_rows", rows=64, stride=2, **LATENT))


def outcome(shape: Shape, name: str) -> Contender | Absent:
    """What the benchmark makes of one peer on a device that is said to be a GPU."""
    (peer,) = [peer for peer in peers_of(shape) if peer.name == name]
    on_cpu = Peer(peer.name, peer.package, peer.ops, peer.make, takes=peer.takes)
    (found,) = contenders(World(shape, CPU), (on_cpu,))
    return _checked(found)


@pytest.mark.parametrize("package", ["vllm", "sglang", "flashinfer", "flash_mla"])
def test_a_missing_package_is_a_row(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    present = {name: module for name, module in MODULES.items() if name.partition(".")[0] != package}
    install(monkeypatch, present)
    world = World(Shape("mla_decode", rows=64, **LATENT), CPU)
    why = {each.name: each.why for each in contenders(world, GPU_PEERS) if isinstance(each, Absent)}
    for peer in peers_of(world.shape):
        expected = f"{package} is not installed" if peer.package == package else "needs a GPU"
        assert why[peer.name] == expected


def other_signature(*, unknown: int) -> None: ...


WRONG = [
    (Shape("write_rows", "kv", 64), "vLLM reshape_and_cache_flash", "vllm._custom_ops", "reshape_and_cache_flash"),
    (
        Shape("mla_decode", rows=64, **LATENT),
        "vLLM decode_attention_fwd",
        "vllm.v1.attention.ops.triton_decode_attention",
        "decode_attention_fwd",
    ),
    (
        Shape("gqa_decode", "kv", 64, num_heads=16),
        "SGLang decode_attention_fwd",
        "sglang.kernels.ops.attention.decode_attention",
        "decode_attention_fwd",
    ),
    (Shape("write_rows", "kv", 64), "FlashInfer append", "flashinfer.page", "append_paged_kv_cache"),
    (Shape("mla_decode", rows=64, **LATENT), "FlashMLA dense", "flash_mla", "flash_mla_with_kvcache"),
    (Shape("mla_decode", rows=64, **LATENT), "FlashMLA dense", "flash_mla", "get_mla_metadata"),
]
WRONG_IDS = [f"{name}-{function}".replace(" ", "_") for _, name, _, function in WRONG]


def replaced(module: str, function: str, by: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    return {**MODULES, module: {**MODULES[module], function: by}}


@pytest.mark.parametrize(("shape", "name", "module", "function"), WRONG, ids=WRONG_IDS)
def test_another_signature_is_a_row(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, name: str, module: str, function: str
) -> None:
    install(monkeypatch, replaced(module, function, other_signature))
    found = outcome(shape, name)
    assert isinstance(found, Absent)
    assert found.why.startswith("failed: TypeError: other_signature() ")


@pytest.mark.parametrize(("shape", "name", "module", "function"), WRONG[:4], ids=WRONG_IDS[:4])
def test_a_call_that_does_nothing_is_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, name: str, module: str, function: str
) -> None:
    install(monkeypatch, replaced(module, function, lambda **given: None))
    found = outcome(shape, name)
    assert isinstance(found, Absent)
    assert found.why.startswith("wrong: differs by ")


def test_a_row_in_another_place_is_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_next(**given: Any) -> None:
        slots = given.pop("slot_mapping")
        VLLM["vllm._custom_ops"]["reshape_and_cache_flash"](slot_mapping=slots.roll(1), **given)

    install(monkeypatch, replaced("vllm._custom_ops", "reshape_and_cache_flash", write_next))
    found = outcome(Shape("write_rows", "kv", 64), "vLLM reshape_and_cache_flash")
    assert isinstance(found, Absent)
    assert found.why.startswith("wrong: differs by ")
    assert found.why.endswith(" B")


def test_a_step_without_its_write_is_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, replaced("flashinfer.page", "append_paged_kv_cache", lambda **given: None))
    found = outcome(Shape("decode_step", "kv", 64, 2, num_heads=16), "FlashInfer decode")
    assert isinstance(found, Absent)
    assert found.why.startswith("wrong: differs by ")


def test_a_module_that_has_moved_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"sglang": {}})
    found = outcome(Shape("gqa_decode", "kv", 64), "SGLang decode_attention_fwd")
    assert isinstance(found, Absent)
    assert found.why.startswith("failed: ModuleNotFoundError: ")
