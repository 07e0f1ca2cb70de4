"""The ahead-of-time check: its gates hold for five chips, and each of them can fail."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import aot
from benchmarks.aot_cases import Case
from benchmarks.aot_compile import CHIPS, Figures, read_amdgcn, read_ptx
from benchmarks.aot_peers import show_peers
from benchmarks.aot_registry import CASES
from benchmarks.aot_report import Result, measure, show_kernels
from kvstore_kernels.casts import CAST_CANDIDATES

ROOT = Path(__file__).parent.parent


def run_compiling(*arguments):
    """Runs Python in the checkout, without the interpreter that this test process has switched on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def report():
    done = run_compiling("-m", "benchmarks", "aot", "--quick", "--json", "--jobs", "2")
    assert done.returncode in (0, 1), done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [line for line in lines if line["case"] != "machine"], done.returncode


def test_every_gate_holds(report):
    lines, exit_code = report
    assert [line for line in lines if line.get("ok") is False] == []
    assert exit_code == 0


def test_every_case_is_measured_for_every_chip(report):
    lines, _ = report
    names = names_of({case.kernel for case in CASES})
    for metric in (
        "registers",
        "spill_bytes",
        "shared_bytes",
        "widest_access",
        "narrowest_access",
        "matrix_instruction",
    ):
        assert sorted(line["case"] for line in lines if line["metric"] == metric) == sorted(names)
    moves = {"write", "write_layers", "gather", "copy_blocks", "pack_blocks", "unpack_blocks"}
    width_gates = [line["case"] for line in lines if line["metric"] == "narrowest_row_access"]
    assert sorted(width_gates) == sorted(names_of(moves))


def test_only_tiles_of_many_heads_may_spill(report):
    limits = {line["case"]: line["target"] for line in report[0] if line["metric"] == "spill_bytes"}
    many = {case: limit for case, limit in limits.items() if limit}
    assert set(many.values()) == {272, 512}
    assert all(re.search(r"(32|64|128) heads| 64/1 of 128", case) for case in many), many
    assert len(limits) == len(names_of(aot.KERNELS))


def test_tiles_of_64_heads_use_wgmma_on_sm_90(report):
    gates = [line for line in report[0] if line["metric"] == "matrix_instruction" and "ok" in line]
    many = [case for case in CASES if case.wgmma and case.is_quick]
    assert sorted(line["case"] for line in gates) == sorted(f"{case.kernel} {case.name} on sm_90" for case in many)
    assert {case.kernel for case in many} == {"mla_decode", "gqa_decode", "sparse_mla_decode"}


def names_of(kernels):
    cases = [case for case in CASES if case.kernel in kernels and case.is_quick]
    return [f"{case.kernel} {case.name} on {chip}" for case in cases for chip in CHIPS if case.is_for(chip)]


def test_the_quick_run_leaves_out_no_kernel_and_no_kind_of_gate():
    left_out = [case for case in CASES if not case.is_quick]
    kept = [case for case in CASES if case.is_quick]
    assert {case.kernel for case in left_out} < {case.kernel for case in kept} == set(aot.KERNELS)
    assert {(case.kernel, case.wgmma) for case in left_out} <= {(case.kernel, case.wgmma) for case in kept}


def test_only_the_chips_cast_is_not_for_every_chip():
    narrow = {(case.kernel, case.chips) for case in CASES if case.chips is not None}
    candidates = tuple(chip for chip, target in CHIPS.items() if target.arch in CAST_CANDIDATES)
    assert narrow == {("cast_check", candidates), ("quant_write", candidates)}
    assert all("cast" in case.name for case in CASES if case.chips is not None)


def test_lines_have_the_fields_of_every_benchmark(report):
    for line in report[0]:
        assert line["bench"] == "aot"
        assert {"case", "metric", "value", "unit"} < line.keys()
        assert ("target" in line) == ("ok" in line)
    assert {line["metric"] for line in report[0] if "ok" in line} == {
        "spill_bytes",
        "shared_bytes",
        "narrowest_row_access",
        "matrix_instruction",
        "narrow_stores",
        "variants",
    }


NARROW = """
import json, sys
sys.path[:0] = ["kernels"]
from benchmarks.aot_cases import LATENT, Case, build_write, meta_view
from benchmarks.aot_compile import CHIPS, compile_launch
from benchmarks.aot_report import Result, measure
for chip in ("sm_90", "gfx942"):
    for gap in (1, 8):
        figures = compile_launch(build_write(meta_view(LATENT, 64), CHIPS[chip], gap=gap), CHIPS[chip])
        measures = measure(Result(Case("write", "narrow", None, {8: 1}), chip, figures))
        print(json.dumps([chip, gap, *((m.value, m.ok) for m in measures if m.metric == "narrowest_row_access")]))
"""


def test_a_kernel_with_narrow_accesses_is_rejected():
    # Source rows an odd number of elements apart: the same kernel, correct, but with loads of 2 bytes.
    done = run_compiling("-c", NARROW)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["sm_90", 1, [2, False]],
        ["sm_90", 8, [16, True]],
        ["gfx942", 1, [2, False]],
        ["gfx942", 8, [16, True]],
    ], done.stderr


ALIGNMENT = """
import json, sys
sys.path[:0] = ["kernels"]
from benchmarks.aot_compile import CHIPS
from benchmarks.aot_registry import CASES
launches = [case.build(CHIPS["sm_90"]) for case in CASES if case.is_quick]
params = {(launch.kernel.__name__, param.name): param for launch in launches for param in launch.kernel.params}
print(json.dumps([[*key, bool(param.do_not_specialize_on_alignment)] for key, param in params.items()]))
"""
INDICES = {
    *("slot_mapping_ptr", "slots_ptr", "block_ids_ptr", "src_ptr", "dst_ptr", "positions_ptr", "seq_idx_ptr"),
    *("block_table_ptr", "table_ptr", "row_lens_ptr", "cu_row_lens_ptr", "start_ptr"),
    *("first_scale_ptr", "second_scale_ptr", "key_scale_ptr", "value_scale_ptr", "row_scale_ptr"),
    *("sinks_ptr", "lse_ptr", "partial_lse_ptr", "weights_ptr"),
}


def test_indices_and_scales_at_any_address_make_no_variant():
    done = run_compiling("-c", ALIGNMENT)
    ours = [param for param in json.loads(done.stdout) if param[1] in INDICES]
    assert {name for _, name, _ in ours} == INDICES, done.stderr
    assert [param for param in ours if not param[2]] == []


GOOD = Figures(registers=20, spill_bytes=0, shared_bytes=0, loads={8: 1, 16: 2}, stores={16: 1}, matrix="")


def verdicts(wgmma=False, narrow_stores=None, **changes):
    """The metrics that miss their gate when a good write's figures are doctored."""
    figures = Figures(**{**{name: getattr(GOOD, name) for name in Figures.__slots__}, **changes})
    index_loads = {8: 1} if narrow_stores is None else None
    case = Case("write", "doctored", None, index_loads, narrow_stores=narrow_stores, wgmma=wgmma)
    return [each.metric for each in measure(Result(case, "sm_90", figures)) if each.ok is False]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"spill_bytes": 4}, ["spill_bytes"]),
        ({"shared_bytes": 232_448}, []),
        ({"shared_bytes": 232_449}, ["shared_bytes"]),
        ({"stores": {16: 1, 8: 1}}, ["narrowest_row_access"]),
        ({"stores": {2: 8}}, ["narrowest_row_access"]),
        ({"stores": {}}, ["narrowest_row_access"]),
        ({"loads": {8: 2, 16: 1}}, ["narrowest_row_access"]),
        ({"loads": {8: 1, 4: 1, 16: 1}}, ["narrowest_row_access"]),
        ({"loads": {8: 1}}, ["narrowest_row_access"]),
        ({"narrow_stores": {4: 1}, "stores": {16: 5, 4: 1}}, []),
        ({"narrow_stores": {4: 1}, "stores": {16: 4, 4: 2}}, ["narrow_stores"]),
        ({"narrow_stores": {}, "stores": {8: 2}}, ["narrow_stores"]),
        ({"wgmma": True, "matrix": "mma m16n8k16"}, ["matrix_instruction"]),
        ({"wgmma": True, "matrix": "wgmma m64n64k16"}, []),
    ],
    ids=str,
)
def test_doctored_figures_are_rejected(changes, missed):
    assert verdicts(**changes) == missed


def test_a_case_that_does_not_compile_is_rejected(monkeypatch):
    def refuse(target):
        raise ValueError("view: does not fit")

    monkeypatch.setattr(aot, "CASES", (Case("mla_decode", "wide", refuse),))
    figures, error = aot.compile_case(0, "sm_90")
    assert error == "ValueError: view: does not fit"
    line, what = measure(Result(aot.CASES[0], "sm_90", figures, error))
    assert (line.metric, line.value, line.target, line.ok) == ("compile_errors", 1, 0, False)
    assert (what.metric, what.value) == ("error", error)


def test_accesses_in_ptx():
    figures = read_ptx(
        """
        ld.param.b64 %rd1, [_k_param_0];
        ld.global.b64 { %rd7 }, [ %rd8 + 0 ];
        @%p1 ld.global.L1::evict_first.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd1 + 0 ];
        @%p1 ld.global.v2.b16 { %rs1, %rs2 }, [ %rd1 + 0 ];
        cp.async.cg.shared.global [ %r10 + 0 ], [ %rd9 + 0 ], 0x10, %r11;
        cp.async.ca.shared.global [ %r10 + 0 ], [ %rd9 + 0 ], 0x4;
        @%p1 st.global.v4.b32 [ %rd2 + 0 ], { %r2, %r3, %r4, %r5 };
        st.global.b8 [ %rd2 + 0 ], { %rs1 };
        st.shared.b16 [ %r2 ], %rs1;
        wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 { %f1 }, %rd1, %rd2, 0, 1, 1, 0, 0;
        """,
        "Function k: REG:255 STACK:272 SHARED:0 LOCAL:0",
        4096,
    )
    assert figures == Figures(255, 272, 4096, {8: 1, 16: 2, 4: 2}, {16: 1, 1: 1}, "wgmma m64n64k16")


@pytest.mark.parametrize(
    ("text", "spilled"),
    [
        (".local .align 1 .b8 \t__local_depot0[16];", 16),
        (".local .align 1 .b8 \t__local_depot0[16];\nmov.b64 %SPL, __local_depot0;", 32),
        ("", 32),
    ],
)
def test_a_frame_that_no_instruction_uses_is_no_spill(text, spilled):
    assert read_ptx(text, "Function k: REG:64 STACK:32 SHARED:0", 0).spill_bytes == spilled


def test_accesses_in_amd_assembly():
    figures = read_amdgcn(
        """
        s_load_dwordx2 s[0:1], s[2:3], 0x8
        buffer_load_dwordx4 v[0:3], v4, s[4:7], 0 offen
        global_load_dwordx2 v[8:9], v[0:1], off
        global_load_ushort v9, v[0:1], off
        buffer_load_dword v4, s[4:7], 0 offen lds
        global_load_lds_dwordx4 v[0:1], off
        v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
        ds_write_b128 v0, v[1:4]
        buffer_store_dwordx4 v[0:3], v4, s[4:7], 0 offen
        global_store_short_d16_hi v[0:1], v2, off
        .private_segment_fixed_size: 8
        .sgpr_spill_count: 5
        .vgpr_count:     129
        .vgpr_spill_count: 3
        """,
        512,
    )
    assert figures == Figures(129, 12, 512, {16: 2, 8: 1, 2: 1, 4: 1}, {16: 1, 2: 1}, "v_mfma_f32_16x16x16_bf16")


def test_the_tables_have_a_line_for_each_program_and_name_what_misses_its_gate():
    good = Result(Case("write", "kv 8x128 x 16", None, {8: 1}), "sm_90", GOOD)
    wide = Result(Case("merge", "64 parts of 128", None), "gfx942", replace(GOOD, spill_bytes=4))
    broken = Result(Case("merge", "wide", None), "sm_90", error="ValueError: view: does not fit [1]")
    text = StringIO()
    console = Console(file=text, width=150)
    show_kernels(console, [each for result in (good, wide, broken) for each in measure(result)])
    show_peers(console, [good, wide, broken])
    shown = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    for line in (
        "write kv 8x128 x 16 on sm_90 20 0 0 16 8 16 ok",
        "merge 64 parts of 128 on gfx942 20 4 0 16 8 missed",
        "merge wide on sm_90 1 ValueError: view: does not fit [1] missed",
        "3 programs, 6 gates: 2 missed",
        "vLLM reshape_and_cache_flash, 8 x 128 write kv 8x128 x 16 14 / 20 0 / 0 4 / 16 4 / 16",
    ):
        assert line in shown


def test_it_refuses_to_run_interpreted(capsys):
    assert command.main(["aot", "--kernels", "write"]) == 2
    assert "aot: expected a process without TRITON_INTERPRET" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernels", "write,scatter"], "expected names out of write, gather"),
        (["--targets", "sm_75"], "expected names out of sm_80, sm_90, sm_100, gfx942, gfx950, got 'sm_75'"),
        (["--jobs", "0"], "--jobs: expected a whole number of at least 1, got '0'"),
    ],
)
def test_unknown_names_list_the_known_ones(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        aot.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_benchmark_lists_the_known_ones(capsys):
    assert command.main(["sparkle"]) == 2
    message = capsys.readouterr().err
    assert "expected one of these names, got 'sparkle'" in message
    assert all(name in message for name in command.BENCHMARKS)


def test_help_lists_the_benchmarks(capsys):
    assert command.main([]) == 0
    assert "usage: python -m benchmarks NAME" in capsys.readouterr().out
