"""Requests to replay: from a file of JSON lines, or drawn from a named mix. The same seed gives the same requests."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.options import read_objects
from benchmarks.record import UsageError

VOCABULARY = 50_000
HASH_TOKENS = 512
"""Tokens that an id of `hash_ids` stands for, as in Mooncake's traces."""
MAX_TOKENS = 1 << 20
MAX_SECONDS = 10**9

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: a line of a trace.

    Attributes:
        arrival_s: seconds after the first one.
        prompt_tokens, output_tokens: how many; the output includes every token that is generated.
        prefix, prefix_tokens: prompts with the same prefix name begin with the same tokens, as many as both have of it.
        conversation: behind the prefix, requests of one conversation have the same tokens, outputs included: a longer
            prompt repeats what earlier ones have said and heard. Without one they are the request's own.
        hash_ids: in the place of a prefix: ids of the prompt's blocks of 512 tokens; equal ids are equal tokens.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str | None = None
    prefix_tokens: int = 0
    conversation: str | None = None
    hash_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        is_number = isinstance(self.arrival_s, int | float) and not isinstance(self.arrival_s, bool)
        if not is_number or not 0 <= self.arrival_s <= MAX_SECONDS:
            raise ValueError(f"arrival_s: expected seconds from 0 to {MAX_SECONDS:,}, got {self.arrival_s!r:.40}")
        for name, least in (("prompt_tokens", 1), ("output_tokens", 1), ("prefix_tokens", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MAX_TOKENS:
                raise ValueError(f"{name}: expected a whole number of {least} to {MAX_TOKENS}, got {value!r}")
        for name in ("prefix", "conversation"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name}: expected a name, got {getattr(self, name)!r}")
        if self.prefix_tokens > self.prompt_tokens:
            raise ValueError(f"prefix_tokens: expected at most {self.prompt_tokens}, got {self.prefix_tokens}")
        if (self.prefix is None) != (self.prefix_tokens == 0):
            raise ValueError(f"prefix_tokens: expected them with a prefix, got {self.prefix_tokens} of {self.prefix!r}")
        if any(type(each) is not int for each in self.hash_ids) or (self.hash_ids and self.prefix is not None):
            raise ValueError(f"hash_ids: expected whole numbers and no prefix, got {self.hash_ids!r:.60}")

    def tokens(self, name: str) -> Tokens:
        """int32 [prompt + output] token ids; `name` is what the request's own tokens are drawn by."""
        total = self.prompt_tokens + self.output_tokens
        pieces = [_stream(f"block {each}", HASH_TOKENS) for each in self.hash_ids]
        if self.prefix is not None:
            pieces.append(_stream(f"prefix {self.prefix}", self.prefix_tokens))
        known = np.concatenate([np.empty(0, np.int32), *pieces])[: self.prompt_tokens]
        own = f"conversation {self.conversation}" if self.conversation else f"request {name}"
        return np.concatenate([known, _stream(own, total - len(known))])


def _stream(name: str, count: int) -> Tokens:
    """The first tokens of an endless text that a name stands for."""
    seed = int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8], "little")
    return (np.random.PCG64(seed).random_raw(count) % VOCABULARY).astype(np.int32)


def chat(rng: np.random.Generator, count: int) -> Iterator[Request]:
    """Conversations on one of twelve system prompts, three in four go on after each answer; all in turn.

    Chosen, not measured: system prompts of 100 to 2,000 tokens, the first ones much more frequent; messages log-normal
    with a median of 90 tokens, answers of 220.
    """
    system = rng.integers(100, 2001, 12).tolist()
    share = 1 / np.arange(1, 13)
    open_conversations: list[tuple[int, int, int]] = []  # number, system prompt, tokens said
    number = made = 0
    while made < count:
        starting = max(1, min(count - made, count // 8))
        which = rng.choice(12, starting, p=share / share.sum()).tolist()
        open_conversations += [(number + at, prompt, 0) for at, prompt in enumerate(which)]
        number += starting
        kept = []
        for name, prompt, said in open_conversations:
            said += _length(rng, 90, 1.1, 4000)
            answer = _length(rng, 220, 0.8, 2000)
            yield Request(0.0, system[prompt] + said, answer, f"system {prompt}", system[prompt], f"chat {name}")
            made += 1
            if made == count:
                return
            if rng.random() < 0.75:
                kept.append((name, prompt, said + answer))
        open_conversations = kept


def long_context(rng: np.random.Generator, count: int) -> Iterator[Request]:
    """One to six questions to a document each, one after the other; the documents are of 4k to 120k tokens.

    Chosen, not measured: documents log-normal with a median of 24,000 tokens, questions of 60, answers of 350.
    """
    number = made = 0
    while made < count:
        length = max(4000, _length(rng, 24_000, 0.8, 120_000))
        for _ in range(min(count - made, int(rng.integers(1, 7)))):
            question = _length(rng, 60, 0.7, 500)
            yield Request(0.0, length + question, _length(rng, 350, 0.7, 2000), f"document {number}", length)
            made += 1
        number += 1


def batch(rng: np.random.Generator, count: int) -> Iterator[Request]:
    """Jobs that share nothing. Chosen: prompts log-normal with a median of 800 tokens, outputs of 40."""
    for _ in range(count):
        yield Request(0.0, _length(rng, 800, 0.9, 16_000), _length(rng, 40, 1.0, 1000))


MIXES: Mapping[str, Callable[[np.random.Generator, int], Iterator[Request]]] = MappingProxyType(
    {"chat": chat, "long": long_context, "batch": batch}
)
"""Name -> what draws so many requests, all of them there at once."""


def draw(mix: str, count: int, seed: int, rate: float | None = None) -> list[Request]:
    """Requests of a mix. With a `rate`, requests per second, they arrive by a Poisson process."""
    rng = np.random.default_rng([seed, *mix.encode()])
    requests = list(MIXES[mix](rng, count))
    if rate is None:
        return requests
    arrivals = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    return [replace(each, arrival_s=round(at, 4)) for each, at in zip(requests, arrivals, strict=True)]


def _length(rng: np.random.Generator, median: float, sigma: float, most: int) -> int:
    return int(min(most, max(1, rng.lognormal(np.log(median), sigma))))


def read_trace(path: str) -> list[Request]:
    """The requests of a file: a JSON object with the fields of Request on each line, or one of Mooncake's.

    Raises: UsageError that names the file, the line and what is wrong in it.
    """
    requests = [_request(record, where) for record, where in read_objects(path, "--trace", "a JSON object")]
    return sorted(requests, key=lambda each: each.arrival_s)


def to_lines(requests: Sequence[Request]) -> str:
    """What `read_trace` reads; fields that say nothing are left out."""
    usual = {field.name: field.default for field in fields(Request)}
    records = [{name: value for name, value in asdict(each).items() if value != usual[name]} for each in requests]
    return "".join(json.dumps(record) + "\n" for record in records)


def _request(record: dict[str, Any], where: str) -> Request:
    known = [field.name for field in fields(Request)]
    if {"timestamp", "input_length", "output_length"} <= record.keys():
        record = _from_mooncake(record, where)
    if unknown := record.keys() - set(known):
        raise UsageError(f"{where}: expected fields out of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if missing := set(known[:3]) - record.keys():
        raise UsageError(f"{where}: expected {', '.join(known[:3])}, got no {', '.join(sorted(missing))}")
    if "hash_ids" in record:
        if not isinstance(record["hash_ids"], list | tuple):
            raise UsageError(f"{where}: hash_ids: expected a list, got {record['hash_ids']!r:.60}")
        record = {**record, "hash_ids": tuple(record["hash_ids"])}
    try:
        return Request(**record)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error


def _from_mooncake(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """timestamp in milliseconds, input_length, output_length, hash_ids."""
    if type(record["timestamp"]) is not int or abs(record["timestamp"]) > 1000 * MAX_SECONDS:
        raise UsageError(f"{where}: timestamp: expected whole milliseconds, got {record['timestamp']!r:.40}")
    return {
        "arrival_s": record["timestamp"] / 1000,
        "prompt_tokens": record["input_length"],
        "output_tokens": record["output_length"],
        "hash_ids": record.get("hash_ids", []),
    }
