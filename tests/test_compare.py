"""Two plans side by side: `kvstore plan CONFIG --compare other.json`."""

import re

import pytest

from kvstore import cli
from kvstore.layers import full_attention, sliding_window
from kvstore.plan_tables import differences
from kvstore.planner import plan_cache
from kvstore.specs import Alias

GEMMA = "gemma-3-4b"


@pytest.fixture
def compare(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")

    def compare(other, *arguments):
        (tmp_path / "other.json").write_text(other if isinstance(other, str) else other.to_json())
        status = cli.main(["plan", GEMMA, *arguments, "--compare", str(tmp_path / "other.json")])
        output = capsys.readouterr()
        return status, [" ".join(line.split()) for line in output.out.splitlines()], output.err

    return compare


def test_a_plan_beside_itself(compare):
    options = {"memory": "8GiB", "grouping": "packed", "layout": "overlay"}
    arguments = ("--memory", "8GiB", "--grouping", "packed", "--layout", "overlay")
    status, lines, err = compare(plan_cache(GEMMA, **options), *arguments)
    assert (status, err) == (0, "")
    assert "layout overlay overlay" in lines
    assert "groups 7 7 1.000" in lines
    assert lines[-1] == "The same layers, in the same groups."


def test_layout_frames_bytes_capacity_and_their_ratios(compare):
    """Packed: 7 groups in blocks of 327,680 B. Uniform in an overlay: 2, of 1,900,544 B, in half the memory."""
    other = plan_cache(GEMMA, memory="8GiB", grouping="uniform", layout="overlay")
    status, lines, err = compare(
        other, "--memory", "16GiB", "--grouping", "packed", "--layout", "buckets", "--lengths", "512,8192"
    )
    assert (status, err) == (0, "")
    for row in (
        "this other this/other",
        "layout buckets overlay",
        "grouping packed uniform",
        "groups 7 2 3.500",
        "frame bytes 327,680 1,900,544 0.172",
        "frames 52,428 4,519 11.602",
        "arena bytes 17,179,607,040 8,588,558,336 2.000",
        "512 tokens: bytes 73,400,320 121,634,816 0.603",
        "sequences 234 70 3.343",
        "8,192 tokens: bytes 295,567,360 1,096,613,888 0.270",
        "sequences 58 7 8.286",
    ):
        assert row in lines
    text = " ".join(lines)
    assert "group differs: layers.0.attn ... layers.27.attn (29, with gaps): window1024_b16.0 ... " in text
    assert " ... window1024_b16.5 (6) here, " in text
    assert "window1024_b16 there" in text
    assert "spec differs" not in text


def test_layers_and_specs_that_differ():
    full, wide, window = full_attention(2, 64), full_attention(4, 64), sliding_window(2, 64, window=64)
    this = plan_cache({"a": full, "b": full, "c": window, "e": Alias("a")}, memory="1GiB", grouping="uniform")
    other = plan_cache({"a": wide, "b": wide, "d": window, "e": Alias("b")}, memory="1GiB", grouping="uniform")
    assert list(differences(this, other)) == [
        "only in this: c",
        "only in other: d",
        "spec differs: a, b: page_bytes 8192 / 16384",
        "alias differs: e",
    ]
    longer = plan_cache(
        {"a": full, "b": full, "c": sliding_window(2, 64, window=128)}, memory="1GiB", grouping="uniform"
    )
    assert list(differences(this, longer)) == [
        "spec differs: c: window 64 / 128",
        "group differs: c: window64_b16 here, window128_b16 there",
        "alias differs: e",
    ]


def test_a_plan_without_layers_has_no_ratios(compare):
    status, lines, _ = compare(plan_cache({}, memory=0), "--memory", "8GiB", "--grouping", "uniform")
    assert status == 0
    assert "groups 2 0 -" in lines
    assert "only in this: layers.0.attn ... layers.29.attn (34, with gaps)" in lines


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("", "plan: expected JSON text, got Expecting value: line 1 column 1"),
        ("[]", "plan: expected"),
        ("{}", "version: expected a plan of version 2, got None"),
        ("12", "plan: expected"),
    ],
)
def test_a_file_that_is_no_plan(compare, other, message):
    status, lines, err = compare(other, "--memory", "8GiB")
    assert (status, lines) == (2, [])
    assert re.fullmatch(r"kvstore plan: --compare: '.*other\.json': .*\n", err)
    assert message in err


def test_an_edited_plan_is_refused(compare):
    text = plan_cache(GEMMA, num_frames=10).to_json().replace('"num_frames":10', '"num_frames":11')
    status, lines, err = compare(text, "--memory", "8GiB")
    assert (status, lines) == (2, [])
    assert err.startswith("kvstore plan: --compare: ")
    assert err.count("\n") == 1


def test_a_file_that_is_no_text(capsys, tmp_path):
    (tmp_path / "other.json").write_bytes(b"\xff\xfe\x00")
    assert cli.main(["plan", GEMMA, "--memory", "8GiB", "--compare", str(tmp_path / "other.json")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "codec can't decode" in output.err
