"""Continues one prompt with the demo's engine: python examples/generate.py "The sea is" --temperature 0.7"""

import argparse
import sys

import torch

from kvstore import KVStore, plan_cache
from kvstore.demo.engine import Engine, Request
from kvstore.demo.model import Llama
from kvstore.demo.run import parse_count, parse_temperature
from kvstore.demo.weights import load

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt")
parser.add_argument("--max-tokens", type=parse_count, default=64)
parser.add_argument("--temperature", type=parse_temperature, default=0.0)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
if not options.prompt:
    parser.error("prompt: expected a text to continue, got an empty one")

print("Reading the model (half a minute) ...", file=sys.stderr)
loaded = load(None, torch.float32)
prompt = list(loaded.tokenizer(options.prompt).input_ids)
max_length = len(prompt) + options.max_tokens

plan = plan_cache(loaded.reference.config, memory="64MiB", kv_dtype="float32")
store = KVStore(plan, "cpu", max_sequences=1, max_length=max_length, max_tokens_per_step=128)
engine = Engine(
    Llama(loaded.reference, max_length), store, max_running=1, chunk=128, eos_token_ids=loaded.eos_token_ids
)
(completion,) = engine.generate([Request(prompt, options.max_tokens, options.temperature, options.seed)])
print(options.prompt + loaded.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
