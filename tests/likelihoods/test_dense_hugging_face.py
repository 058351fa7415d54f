"""Hugging Face models with dict batches, as they are, against plain autograd loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

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
    """Masks that are looked at inside the model stop torch.vmap; layers are captured instead, not single examples."""
    tracer = whence.fit(
        bert(), batches(tokens(), torch.arange(EXAMPLES) % 3), "categorical", ridge=RIDGE, progress=False
    )
    notes = [str(finding.value) for finding in tracer.diagnostics if finding.name == "note"]
    assert any("tangents by the capture of layers" in note for note in notes)
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
