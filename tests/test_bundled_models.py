"""Configs that come with the package: planned by name from any folder, listed, and told from paths."""

import re
from pathlib import Path

import pytest

import kvstore
from kvstore import cli
from kvstore.errors import PlanError
from kvstore.model_list import caches_of
from kvstore.models.bundled import CONFIGS


@pytest.mark.parametrize("name", kvstore.bundled_models())
def test_a_bundled_name_is_its_config_in_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert kvstore.specs_from_config(name) == kvstore.specs_from_config(CONFIGS / f"{name}.json")


def test_names_are_sorted_and_those_of_the_files():
    names = kvstore.bundled_models()
    assert names == tuple(sorted(names))
    assert {f"{name}.json" for name in names} == {path.name for path in CONFIGS.iterdir()}
    assert "gemma-3-27b" in names


def test_a_name_plans_as_its_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan = kvstore.plan_cache("gemma-3-27b", memory="64GiB")
    assert plan == kvstore.plan_cache(CONFIGS / "gemma-3-27b.json", memory="64GiB")
    assert cli.main(["plan", "gemma-3-27b", "--memory", "64GiB", "--json"]) == 0
    assert kvstore.CachePlan.from_json(capsys.readouterr().out) == plan


def test_a_path_that_exists_comes_before_a_bundled_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gemma-3-27b").write_text((CONFIGS / "llama-3.1-8b.json").read_text())
    assert kvstore.specs_from_config("gemma-3-27b") == kvstore.specs_from_config("llama-3.1-8b")


def test_an_empty_folder_hides_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3.1-8b").mkdir()
    (tmp_path / "mine").mkdir()
    assert kvstore.plan_cache("llama-3.1-8b", num_frames=2).layers[0] == "layers.0.attn"
    with pytest.raises(PlanError, match=r"config\.json"):
        kvstore.plan_cache("mine", num_frames=2)


def test_a_path_object_is_never_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="config: cannot read 'gemma-3-27b': No such file"):
        kvstore.specs_from_config(Path("gemma-3-27b"))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", " such as 'llama-3.1-8b'"),
        ("gemma-3-27b.json", " such as 'gemma-3-27b'"),
        ("Qwen3-8B", " such as 'qwen3-8b'"),
        ("no/such/config.json", ""),
        ("x" * 5000, ""),
    ],
    ids=["a repository", "a file name", "capitals", "a path", "too long for a path"],
)
def test_text_that_is_neither_says_what_was_looked_for(text, hint):
    message = (
        "config: expected the path of a JSON file or of a folder with a config.json, or the name of a bundled "
        f"model{hint} (kvstore plan --list shows them; nothing is downloaded), got {text!r}, which is neither"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        kvstore.plan_cache(text, memory="1GiB")


def test_list_shows_every_name_with_its_caches(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["plan", "--list"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert max(map(len, output.out.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in output.out.splitlines()]
    assert [line.split()[0] for line in lines if line.startswith(kvstore.bundled_models())] == list(
        kvstore.bundled_models()
    )
    for line in (
        "name model_type layers caches",
        "gemma-3-27b gemma3 62 10 full, 52 sliding-window",
        "nemotron-h-8b nemotron_h 52 4 full, 24 state",
        "deepseek-v3 deepseek_v3 61 61 latent",
        "Plan one: kvstore plan gemma-3-27b --memory 64GiB",
    ):
        assert line in lines


def test_caches_beside_attention_have_the_names_of_their_layers():
    assert caches_of(kvstore.specs_from_config("deepseek-v4-flash")) == (
        "41 compressed, 21 indexer, 21 indexer-state, 41 state, 43 window"
    )
    alias = {"layers.1.attn": kvstore.Alias("layers.0.attn")}
    assert caches_of({"layers.0.attn": kvstore.full_attention(1, 64), **alias}) == "1 full, 1 alias"
