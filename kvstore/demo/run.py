"""`kvstore demo`: several prompts served together through the store, and held against transformers' own generate."""

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore import KVStore, OutOfBlocks, PlanError, plan_cache
from kvstore.demo.engine import Completion, Engine, Request
from kvstore.demo.model import Llama
from kvstore.demo.prompts import PROMPTS
from kvstore.demo.weights import DemoError, LoadedModel, load, locate

BAD_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo. Returns 0 when every text equals transformers', 1 when one differs, 2 for a caller's mistake."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse leaves by exception, also after --help
        return stop.code if isinstance(stop.code, int) else 0
    try:
        return _demo(options)
    except (DemoError, PlanError, OutOfBlocks) as error:
        print(f"kvstore demo: {error}", file=sys.stderr)
        return BAD_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvstore demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", metavar="DIR", help="a Llama model's transformers folder (default: SmolLM2-135M)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--threads", type=parse_count, help="CPU threads (default: torch's)")
    parser.add_argument("--max-tokens", type=parse_count, default=48, help="new tokens for each prompt (default: 48)")
    parser.add_argument("--temperature", type=parse_temperature, default=0.0, help="0, the default, is greedy")
    parser.add_argument(
        "--memory", metavar="SIZE", default="128MiB", help="memory of the cache, with its unit (default: 128MiB)"
    )
    parser.add_argument("--chunk", type=parse_count, default=256, help="tokens of one step (default: 256)")
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
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device: expected cpu, since torch sees no CUDA device here, got cuda")
    if options.chunk < len(PROMPTS):
        raise DemoError(f"--chunk: expected at least {len(PROMPTS)}, one token for each prompt, got {options.chunk}")
    plan_cache({}, memory=options.memory)  # refuses a size it cannot read, before the model takes its time
    locate(options.model)
    progress.print("Reading the model (transformers takes the file apart, half a minute) ...")
    loaded = load(options.model, getattr(torch, options.dtype), options.device)
    requests = [
        Request(_tokens(loaded, prompt), options.max_tokens, options.temperature, seed)
        for seed, prompt in enumerate(PROMPTS)
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
        model = Llama(loaded.reference, max_length)
    except ValueError as error:
        raise DemoError(f"--model: {error}") from None
    plan = plan_cache(loaded.reference.config, memory=options.memory, kv_dtype=options.dtype)
    console.print(f"[bold]The plan for {loaded.name}, {options.dtype}, {options.memory}[/bold]\n")
    console.print(f"{plan.explain()}\n", markup=False, highlight=False, soft_wrap=True)

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

    console.print(_texts(loaded, requests, completions))
    stats = store.stats()
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    console.print(
        f"{num_tokens} new tokens in {seconds:.1f} s, {num_tokens / seconds:.0f} tokens per second "
        f"on {torch.get_num_threads()} threads; at the peak {stats.peak_in_use} of {stats.num_blocks} blocks in use "
        "(the null block not counted).",
        highlight=False,
        soft_wrap=True,
    )
    if options.temperature:
        console.print("Sampled texts are not compared with transformers'.")
        return 0
    progress.print("Generating the same texts with transformers, one after the other (longer than ours took) ...")
    different = _differences(loaded, requests, completions)
    for line in different:
        console.print(line, style="red", highlight=False, soft_wrap=True)
    if different and options.dtype == "bfloat16":
        console.print("bfloat16 has 8 significant bits: near ties between two tokens may fall either way.")
    if not different:
        console.print(f"All {len(requests)} texts equal transformers' greedy generate, token for token.", style="green")
    return 1 if different else 0


def _tokens(loaded: LoadedModel, prompt: str) -> list[int]:
    """The prompt as the model's chat template has it; the plain text where the model has none."""
    if loaded.tokenizer.chat_template is None:
        return list(loaded.tokenizer(prompt).input_ids)
    message = [{"role": "user", "content": prompt}]
    return list(loaded.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True).input_ids)


def _texts(loaded: LoadedModel, requests: Sequence[Request], completions: Sequence[Completion]) -> Table:
    table = Table(title="Texts", title_justify="left", title_style="bold", show_lines=True)
    for column in ("prompt tokens", "cached", "new"):
        table.add_column(column, justify="right")
    table.add_column("prompt", ratio=2)
    table.add_column("text", ratio=3)
    for prompt, request, completion in zip(PROMPTS, requests, completions, strict=True):
        counts = (len(request.prompt), completion.cached_tokens, len(completion.token_ids))
        text = loaded.tokenizer.decode(completion.token_ids, skip_special_tokens=True).strip()
        ended = completion.token_ids[-1] in loaded.eos_token_ids
        table.add_row(*map(str, counts), Text(_shortened(prompt)), Text(text if ended else f"{text} ..."))
    return table


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
