"""`whence fit` for a folder with a language model and a JSONL file, and `whence explain` for new texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from command_line import call
from whence.cli.console import UNUSABLE

WORDS = [f"w{at}" for at in range(80)]
STRANGE = 5


def model_folder(folder: Path, texts: list[str]) -> Path:
    """A tiny model that has learned its texts a little."""
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = LlamaConfig(vocab_size=80, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, **sizes)
    model = LlamaForCausalLM(config)
    ids = torch.tensor([fast(text)["input_ids"] for text in texts])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def lines(path: Path, texts: list[dict[str, str]]) -> Path:
    path.write_text("\n".join(json.dumps(text) for text in texts) + "\n", encoding="utf-8")
    return path


def test_fit_and_explain_texts(tmp_path: Path) -> None:
    texts = [" ".join(WORDS[(start + 3 * step) % 40] for step in range(8)) for start in range(24)]
    texts[STRANGE] = " ".join(WORDS[at] for at in (70, 3, 55, 61, 12, 77, 44, 69))
    folder = model_folder(tmp_path / "model", [text for at, text in enumerate(texts) if at != STRANGE])
    data = lines(tmp_path / "train.jsonl", [{"text": text} for text in texts])
    saved = tmp_path / "saved"
    result = call("fit", folder, "--texts", data, "--ridge", "1", "--save", saved, "--no-trust", "--json", "-q")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["examples"] == 24
    assert content["suspects"][0]["text"] == STRANGE + 1
    assert content["suspects"][0]["begins"].startswith("w70 w3")
    assert content["diagnostics"]["structure"] == "core"

    new = lines(tmp_path / "new.jsonl", [{"prompt": texts[8][:11], "completion": texts[8][11:]}, {"text": texts[2]}])
    result = call("explain", saved, new, "--spec", folder, "--row", "2", "--top", "3", "--json", "-q")
    assert result.exit_code == 0, result.output
    (answer,) = json.loads(result.stdout)
    assert answer["begins"] == texts[2]
    assert answer["causes"][0]["training_text"] == 3  # the same text, by its share of Ho
    shares = [cause["share_of_ho"] for cause in answer["causes"]]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)
    assert all(texts[cause["training_text"] - 1].startswith(cause["begins"][:20]) for cause in answer["causes"])

    words = " ".join(call("explain", saved, new, "--spec", folder, "--row", "2", "--top", "3", "-q").stdout.split())
    assert f"text 2: {texts[2]}" in words
    assert "training text share of Ho begins residual without it" in words
    result = call("explain", saved, new, "-q")
    assert result.exit_code == UNUSABLE
    assert "expected --spec with the folder of the model" in " ".join(result.output.split())


def test_texts_to_check_are_listed(tmp_path: Path) -> None:
    texts = [" ".join(WORDS[(start + 3 * step) % 40] for step in range(8)) for start in range(12)]
    folder = model_folder(tmp_path / "model", texts)
    data = lines(tmp_path / "train.jsonl", [{"prompt": text[:5], "completion": text[5:]} for text in texts])
    result = call("fit", folder, "--texts", data, "--ridge", "1", "--structure", "sketch", "--no-trust", "-q")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "Texts to check first text suspicion begins" in words
    assert "structure sketch" in words


@pytest.mark.parametrize(
    ("content", "words"),
    [('{"text": 3}', "in line 1"), ('{"text": "a"}\n{"words": "b"}', "in line 2"), ("", "got none")],
)
def test_files_that_hold_no_texts(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    data = tmp_path / "train.jsonl"
    data.write_text(content)
    result = call("fit", tmp_path / "model", "--texts", data, "-q")
    assert result.exit_code == UNUSABLE
    assert words in " ".join(result.output.split())


def test_a_folder_without_texts_or_model(tmp_path: Path) -> None:
    assert "--texts" in call("fit", tmp_path, "-q").output
    data = lines(tmp_path / "train.jsonl", [{"text": "a b"}])
    assert "saved Hugging Face model" in " ".join(call("fit", tmp_path, "--texts", data, "-q").output.split())
