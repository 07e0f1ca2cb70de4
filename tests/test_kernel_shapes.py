"""Shapes of the kernel benchmark from a file: what is refused, and where it stands."""

import pytest

from benchmarks import __main__ as command
from benchmarks.kernel_shapes import read_shapes
from benchmarks.record import UsageError


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("write_rows", "line 1: expected a JSON object with op, format, rows"),
        ("[]", "line 1: expected a JSON object"),
        ("{}", "expected the fields op, format and rows, got none of format, op, rows"),
        ('{"op": "write_rows", "format": "kv", "rows": 64, "colour": 1}', "expected fields out of op, format, rows"),
        ('{"op": "paint", "format": "kv", "rows": 64}', "op: expected one of write_rows, gather_rows"),
        ('{"op": "mla_decode", "format": "kv", "rows": 64}', "format: expected one of latent, fp8_ds_mla, dsv4"),
        ('{"op": "write_rows", "format": "kv", "rows": 0}', "rows: expected a whole number of at least 1, got 0"),
        ('{"op": "write_rows", "format": "kv", "rows": true}', "rows: expected a whole number of at least 1, got True"),
        ('{"op": "write_rows", "format": "kv", "rows": 70}', "expected a multiple of rows_per_block = 64, got 70"),
        ('{"op": "write_rows", "format": "kv", "rows": 64, "dtype": "int"}', "dtype: expected one of bf16, fp16, fp32"),
        ('{"op": "gqa_decode", "format": "kv", "rows": 64, "num_heads": 9}', "expected a multiple of kv_heads = 8"),
        ('{"op": ["x"], "format": "kv", "rows": 64}', "op: expected one of write_rows"),
        ('{"op": "write_rows", "format": "latent", "rows": 64, "head_dim": 64}', "expected more than the 64 columns"),
        ('{"op": "decode_step", "format": "kv", "rows": 64, "num_heads": 9}', "expected a multiple of kv_heads = 8"),
        ('{"op": "mla_decode", "format": "dsv4", "rows": 64, "dtype": "fp32"}', "dtype: expected one of bf16, got"),
        ('{"op": "copy_blocks", "format": "latent", "rows": 64}', "expected at least two blocks of 64, got 64"),
    ],
)  # fmt: skip
def test_a_bad_shape_names_the_file_and_the_line(line, said, tmp_path, capsys):
    path = tmp_path / "shapes.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    assert command.main(["kernels", "--shapes", str(path)]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"python -m benchmarks kernels: --shapes: {str(path)!r}, line 1: ")
    assert said in message


def test_a_file_without_shapes(tmp_path):
    path = tmp_path / "shapes.jsonl"
    with pytest.raises(UsageError, match="cannot read"):
        read_shapes(str(path))
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(UsageError, match="got none"):
        read_shapes(str(path))
