"""Hugging Face models with dict batches, as they are, against plain autograd loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import loss_oracles
import whence
from classification import ESTIMATORS

WORDS, LENGTH, EXAMPLES, CLASSES = 20, 5, 8, 3
RIDGE = 0.5


def tokens(n: int = EXAMPLES, seed: int = 0) -> dict[str, Tensor]:
    """Sentences of up to five words; from the third on the last ones are padding."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(n, LENGTH, dtype=torch.long)
    mask[2:, -2:] = 0
    return {"input_ids": torch.randint(0, WORDS, (n, LENGTH), generator=generator), "attention_mask": mask}


def batches(inputs: dict[str, Tensor], labels: Tensor, size: int = 3) -> list[dict[str, Tensor]]:
    whole = {**inputs, "labels": labels}
    return [{key: value[low : low + size] for key, value in whole.items()} for low in range(0, len(labels), size)]


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=CLASSES, **sizes)
    return BertForSequenceClassification(config).double().eval()


def jacobian(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Logits (n, K) and their gradients (n, K, d), one example and one output after the other."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    logits, rows = [], []
    for at in range(len(inputs["input_ids"])):
        out = model(**{key: value[at : at + 1] for key, value in inputs.items()}).logits.reshape(-1)
        grads = [
            torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
            for one in out
        ]
        rows.append(torch.stack([torch.cat([g.reshape(-1) for g in grad]) for grad in grads]))
        logits.append(out.detach())
    return torch.stack(logits).numpy(), torch.stack(rows).numpy()


@pytest.fixture(scope="module")
def wanted() -> dict[str, np.ndarray]:
    labels = torch.arange(EXAMPLES) % CLASSES
    outputs, tangents = jacobian(bert(), tokens())
    _, test_tangents = jacobian(bert(), tokens(4, seed=1))
    onehot = nn.functional.one_hot(labels, CLASSES).double().numpy()
    residuals, hessians = loss_oracles.softmax_terms(onehot)(outputs)
    numbers = EXAMPLES * (CLASSES - 1)
    return loss_oracles.covariances(
        test_tangents, tangents, residuals, hessians, RIDGE, noise=hessians, numbers=numbers
    )


@pytest.mark.parametrize(
    "structure", [whence.Exact(road="dual"), whence.Exact(road="matrix_free"), whence.Core(size=10_000, tolerance=0)]
)
def test_bert_for_sentences(structure: Any, wanted: dict[str, np.ndarray]) -> None:
    model, labels = bert(), torch.arange(EXAMPLES) % CLASSES
    tracer = whence.fit(model, batches(tokens(), labels), "categorical", structure, ridge=RIDGE, progress=False)
    found = tracer.predict(tokens(4, seed=1))
    for name in ESTIMATORS:
        value = wanted[name]
        np.testing.assert_allclose(found.covariance(name), value, rtol=1e-7, atol=1e-9 * abs(value).max(), err_msg=name)


def test_whole_batches_where_the_mask_decides_on_the_path() -> None:
    """Masks that are looked at inside the model would stop torch.vmap; layers are captured, not single examples."""
    tracer = whence.fit(
        bert(), batches(tokens(), torch.arange(EXAMPLES) % 3), "categorical", ridge=RIDGE, progress=False
    )
    notes = [str(finding.value) for finding in tracer.diagnostics if finding.name == "note"]
    assert not any("one example at a time" in note for note in notes)


@pytest.mark.parametrize("structure", ["ekfac", "kfac", "diagonal", "sketch"])
def test_batch_encodings_and_model_outputs(structure: str) -> None:
    """A tokenizer's BatchEncoding is a mapping that is no dict; a model's output holds more than logits."""
    model, labels = bert(), torch.arange(EXAMPLES) % CLASSES
    plain = batches(tokens(), labels)
    tracer = whence.fit(model, [BatchEncoding(b) for b in plain], "categorical", structure, ridge=1.0, progress=False)
    again = whence.fit(model, plain, "categorical", structure, ridge=1.0, progress=False)
    test = tokens(4, seed=1)
    torch.testing.assert_close(tracer.predict(BatchEncoding(test)).hec3, again.predict(test).hec3)
    assert (tracer.predict(test).hec3 > 0).all()


def gpt2(words: int = 7) -> nn.Module:
    torch.manual_seed(0)
    return (
        GPT2LMHeadModel(GPT2Config(vocab_size=words, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2)).double().eval()
    )


def llama(words: int = 7) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=words, max_position_embeddings=LENGTH, **sizes)).double().eval()


def tagger() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = BertConfig(vocab_size=7, max_position_embeddings=LENGTH, num_labels=7, **sizes)
    return BertForTokenClassification(config).double().eval()


def text(n: int = 4, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Sentences whose labels are their words; what is padded is no label."""
    words = tokens(n, seed)
    words["input_ids"] = words["input_ids"] % 7
    return words, torch.where(words["attention_mask"] == 1, words["input_ids"], -100)


DENSE = {"gpt2": (gpt2, True), "llama": (llama, True), "tagger": (tagger, False)}


def dense_oracle(model: nn.Module, shifted: bool, test: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Covariances (m t, k, k) with every position an example, those of one sentence left out together."""
    inputs, labels = text()
    n, t = labels.shape
    if shifted:  # the output at a position is about the next word
        labels = torch.cat([labels[:, 1:], torch.full((n, 1), -100)], dim=1)
    outputs, rows = jacobian(model, inputs)
    kept = np.flatnonzero(labels.reshape(-1).numpy() >= 0)
    onehot = nn.functional.one_hot(labels.clamp_min(0).reshape(-1), 7).double().numpy()[kept]
    residuals, hessians = loss_oracles.softmax_terms(onehot)(outputs.reshape(n * t, 7)[kept])
    tangents = rows.reshape(n * t, 7, -1)[kept]
    test_tangents = jacobian(model, test)[1].reshape(-1, 7, tangents.shape[2])
    groups = np.repeat(np.arange(n), t)[kept]
    return loss_oracles.covariances(
        test_tangents, tangents, residuals, hessians, RIDGE, noise=hessians, numbers=len(kept) * 6, groups=groups
    )


@pytest.mark.parametrize("kind", DENSE)
def test_models_of_tokens(kind: str) -> None:
    """Next-token models are found by their own loss; others keep their labels where they are."""
    make, shifted = DENSE[kind]
    inputs, labels = text()
    tracer = whence.fit(make(), batches(inputs, labels), "categorical", ridge=RIDGE, progress=False)
    test, _ = text(2, seed=1)
    found = tracer.predict(test)
    assert found.mean.shape == (2, LENGTH, 7)
    wanted = dense_oracle(make(), shifted, test)
    for name in ("ho", "hec0", "hec2", "hec3", "jackknife", "laplace"):
        value = wanted[name].reshape(2, LENGTH, 7, 7)
        np.testing.assert_allclose(found.covariance(name), value, rtol=1e-6, atol=1e-8 * abs(value).max(), err_msg=name)
    notes = [str(finding.value) for finding in tracer.diagnostics if finding.name == "note"]
    assert any("predicts the next token" in note for note in notes) is shifted


@pytest.mark.parametrize("structure", ["ekfac", "core", "diagonal"])
def test_words_that_are_not_there_have_no_variance(structure: str) -> None:
    inputs, labels = text()
    tracer = whence.fit(llama(), batches(inputs, labels), "categorical", structure, ridge=RIDGE, progress=False)
    found = tracer.predict(inputs, outputs="predicted")
    padded = inputs["attention_mask"] == 0
    assert padded.any()
    for values in (found.mean, found.hec3, found.ho, found.probabilities):
        assert values[padded].isnan().all()
        assert (~values[~padded].isnan()).all()
    assert found.chosen is not None
    assert found.chosen.index is not None
    assert (found.chosen.index[padded] == -1).all()
    assert (found.hec3[~padded] > 0).all()
    assert "nan" not in repr(found)


def test_a_loss_that_is_neither_is_told() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tagger()

        def forward(self, labels: Tensor | None = None, **inputs: Tensor) -> Any:
            found = self.net(**inputs, labels=labels)
            return found if labels is None else {"logits": found.logits, "loss": 2 * found.loss}

    inputs, labels = text()
    tracer = whence.fit(Doubled(), batches(inputs, labels), "categorical", "diagonal", ridge=RIDGE, progress=False)
    notes = [str(finding.value) for finding in tracer.diagnostics if finding.name == "note"]
    assert any("is neither the cross-entropy of the labels as they stand" in note for note in notes)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("structure", ["ekfac", "core"])
def test_a_vocabulary(make: Any, structure: str) -> None:
    """More words than all could be looked at: next words are predicted with their variance by default."""
    inputs, labels = text()
    tracer = whence.fit(make(300), batches(inputs, labels), "categorical", structure, ridge=RIDGE, progress=False)
    test, _ = text(2, seed=1)
    found = tracer.predict(test)
    assert tracer.problem.k == 17
    assert found.hec3.shape == (2, LENGTH, 1)
    assert (found.hec3 > 0).all()
    assert found.chosen is not None
    logits = make(300)(**test).logits.detach()
    torch.testing.assert_close(found.mean, logits.amax(-1, keepdim=True))
    torch.testing.assert_close(found.chosen.index, logits.argmax(-1, keepdim=True))
    shares = tracer.attribute(test, top=2).hec3
    assert shares.index.shape == (2, 2)
    if structure == "core":
        torch.testing.assert_close(shares.total, found.trace("hec3").sum(1))


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits


def test_losses_of_answers_are_those_of_the_next_tokens() -> None:
    """Labels of a language model are shifted as in training: the same as a plain module with shifted targets."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12
    )
    model = LlamaForCausalLM(config).double().eval()
    ids, asked = tokens()["input_ids"], tokens(2, seed=1)["input_ids"]
    answer = asked.clone()
    answer[:, :-1] = -100  # the last token alone
    options: dict[str, Any] = {"ridge": RIDGE, "progress": False, "hessian_columns": 2, "parameters": "*proj.weight"}
    own = whence.fit(model, [{"input_ids": ids, "labels": ids}], "categorical", "sketch", **options)
    found = own.attribute({"input_ids": asked, "labels": answer}, top=EXAMPLES, loss=True)
    shifted = [torch.cat([one[:, 1:], torch.full((len(one), 1), -100)], 1) for one in (ids, answer)]
    plain = whence.fit(Logits(model), [(ids, shifted[0])], "categorical", "sketch", **options)
    wanted = plain.attribute((asked, shifted[1]), top=EXAMPLES, loss=True)
    torch.testing.assert_close(found.hec3.index, wanted.hec3.index)
    torch.testing.assert_close(found.hec3.pull, wanted.hec3.pull, rtol=1e-6, atol=1e-12)
