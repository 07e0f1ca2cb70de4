"""Requests to replay: files of them, and the named mixes."""

import json
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.record import UsageError
from benchmarks.traces import MIXES, Request, draw, read_trace, to_lines


def test_a_trace_survives_its_file(tmp_path):
    requests = [
        Request(0.0, 100, 5),
        Request(0.5, 900, 1, "system", 512, "talk"),
        Request(2.0, 1100, 7, hash_ids=(3, 4, 5)),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n" + to_lines(requests), encoding="utf-8")
    assert read_trace(str(path)) == requests
    assert json.loads(to_lines(requests).splitlines()[0]) == {
        "arrival_s": 0.0,
        "prompt_tokens": 100,
        "output_tokens": 5,
    }


def test_requests_are_sorted_by_their_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(to_lines([Request(3.0, 1, 1), Request(1.0, 2, 1)]), encoding="utf-8")
    assert [each.prompt_tokens for each in read_trace(str(path))] == [2, 1]


def test_a_line_of_mooncake_is_a_request(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 500, "input_length": 600, "output_length": 2, "hash_ids": [0, 9]}\n',
        encoding="utf-8",
    )
    first, second = read_trace(str(path))
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.5, 600, 2)
    ours, theirs = first.tokens("0"), second.tokens("1")
    assert (len(ours), len(theirs)) == (602, 1037)
    assert (ours[:512] == theirs[:512]).all()
    assert (ours[512:600] != theirs[512:600]).any()


def test_prefixes_and_conversations_share_tokens():
    short = Request(0.0, 700, 10, "system", 512, "talk")
    longer = Request(0.0, 900, 10, "system", 512, "talk")
    other = Request(0.0, 900, 10, "system", 512)
    assert (short.tokens("0") == longer.tokens("1")[:710]).all()  # the answer is repeated in the next prompt
    assert (longer.tokens("1")[:512] == other.tokens("2")[:512]).all()
    assert (longer.tokens("1")[512:] != other.tokens("2")[512:]).any()
    assert (other.tokens("2")[512:] != other.tokens("3")[512:]).any()
    assert (other.tokens("2") == other.tokens("2")).all()


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_a_mix_is_the_same_for_the_same_seed(mix):
    requests = draw(mix, 50, 1)
    assert len(requests) == 50
    assert draw(mix, 50, 1) == requests
    assert draw(mix, 50, 2) != requests
    assert {each.arrival_s for each in requests} == {0.0}


def test_requests_arrive_at_their_rate():
    arrivals = np.array([each.arrival_s for each in draw("batch", 2000, 0, rate=4.0)])
    assert (np.diff(arrivals) >= 0).all()
    assert arrivals[-1] == pytest.approx(500, rel=0.1)


def test_later_turns_of_a_conversation_are_longer():
    turns: dict[str, list[Request]] = {}
    for each in draw("chat", 300, 0):
        turns.setdefault(each.conversation, []).append(each)
    assert max(map(len, turns.values())) > 3
    for conversation in turns.values():
        for earlier, later in pairwise(conversation):
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens
            assert later.prefix == earlier.prefix


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hello", "expected a JSON object, got 'hello'"),
        ("3", "expected a JSON object, got '3'"),
        ('{"arrival_s": 0}', "got no output_tokens, prompt_tokens"),
        ('{%s, "user": 3}', "expected fields out of arrival_s, "),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "to 1,000,000,000, got -1"),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "to 1,000,000,000, got nan"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens: expected a whole number of 1 to"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1.5}', "output_tokens: expected a whole number"),
        ('{%s, "prefix": "a", "prefix_tokens": 5}', "at most 4, got 5"),
        ('{%s, "prefix": "a"}', "expected them with a prefix"),
        ('{%s, "prefix": 7, "prefix_tokens": 1}', "prefix: expected"),
        ('{%s, "hash_ids": 7}', "hash_ids: expected a list, got 7"),
        ('{%s, "hash_ids": ["a"]}', "hash_ids: expected whole numb"),
        ('{"arrival_s": Infinity, "prompt_tokens": 1, "output_tokens": 1}', "expected seconds from 0 to"),
        ("[" * 100_000, "expected a JSON object, got"),
        ('{"timestamp": 1.5, "input_length": 4, "output_length": 1}', "timestamp: expected whole milliseconds"),
    ],
)  # fmt: skip
def test_a_bad_line_names_the_file_and_the_line(line, said, tmp_path):
    path = tmp_path / "trace.jsonl"
    line = line.replace("%s", '"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1')
    path.write_text(to_lines([Request(0.0, 1, 1)]) + line + "\n", encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_trace(str(path))
    assert str(caught.value).startswith(f"--trace: {str(path)!r}, line 2: ")
    assert said in str(caught.value)


def test_a_file_without_requests(tmp_path):
    path = tmp_path / "trace.jsonl"
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(str(path))
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(UsageError, match="got none"):
        read_trace(str(path))
