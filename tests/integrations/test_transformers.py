"""What a Hugging Face trainer has trained can be traced; tiny models of random weights, nothing downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whence

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'whence[integrations]'"
)
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'whence[integrations]'")

from whence.integrations.transformers import fit_trainer, likelihood_of  # noqa: E402  after the check that it is there

LENGTHS = (3, 5, 4, 6, 2, 5, 3, 4)


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Token numbers of different lengths; the label says whether the token 7 is among them."""

    def __init__(self, labels: Any = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(2, 20, (size,), generator=generator).tolist() for size in LENGTHS]
        self.labels = labels if labels is not None else [int(index % 2) for index in range(len(LENGTHS))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.labels[index]}


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator: pads to the longest text of the batch."""
    texts = [torch.tensor(row["input_ids"]) for row in rows]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def trainer(folder: Path, data: Texts, decay: float = 0.01, **config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
            **config,
        )
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,
        learning_rate=1e-3,
        weight_decay=decay,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
    )
    made = transformers.Trainer(model=model, args=arguments, train_dataset=data, data_collator=pad)
    made.train()
    return made


def test_the_whole_network_is_traced_in_the_order_of_the_data(tmp_path: Path) -> None:
    data = Texts()
    made = trainer(tmp_path, data, num_labels=2)
    assert made.model.training
    tracer = fit_trainer(made, progress=False, structure="ekfac")
    assert not made.model.training
    assert (tracer.problem.n, tracer.problem.k) == (8, 2)
    assert tracer.problem.likelihood.name == "categorical"
    assert tracer.ridge == pytest.approx(8 * 0.01)
    with torch.no_grad():
        alone = [
            made.model(**{key: value for key, value in pad([data[at]]).items() if key != "labels"}) for at in range(8)
        ]
    chances = torch.cat([one.logits for one in alone]).softmax(1)
    expected = nn.functional.one_hot(torch.tensor(data.labels), 2) - chances
    assert torch.allclose(tracer.residuals.float(), expected, atol=1e-5), "row i is example i, though training shuffles"
    found = tracer.predict(made.get_eval_dataloader(data))
    assert torch.allclose(found.probabilities.float(), chances, atol=1e-5)


def test_the_head_alone_is_a_logistic_regression_on_the_pooled_text(tmp_path: Path) -> None:
    data = Texts()
    made = trainer(tmp_path, data, num_labels=2)
    tracer = fit_trainer(made, parameters="classifier.*", ridge=0.5, progress=False)
    with torch.no_grad():
        pooled = torch.cat([made.model.bert(**_inputs(data, at)).pooler_output for at in range(8)])
    head = nn.Linear(16, 2)
    head.load_state_dict(made.model.classifier.state_dict())
    by_hand = whence.fit(head, [(pooled, torch.tensor(data.labels))], "categorical", ridge=0.5, progress=False)
    assert torch.allclose(tracer.predict(_inputs(data, 3)).hec3, by_hand.predict(pooled[3:4]).hec3, rtol=1e-3)


def test_exact_over_all_weights_goes_example_by_example(tmp_path: Path) -> None:
    data = Texts([0.1 * index for index in range(8)])
    made = trainer(tmp_path, data, num_labels=1)
    tracer = fit_trainer(made, progress=False)
    assert tracer.problem.likelihood.name == "gaussian"
    assert tracer.ridge == pytest.approx(8 * 0.01 / 2)
    assert bool((tracer.leverage < 1).all())
    assert tracer.predict(_inputs(data, 0)).hec3.item() > 0


def tagged(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator: every token has its label, that of padding and of the first token is left out."""
    padded = {key: value[1:] for key, value in pad([{"input_ids": [1] * max(LENGTHS), "labels": 0}, *rows]).items()}
    labels = torch.where(padded["attention_mask"] == 1, padded["input_ids"] % 3, -100)
    labels[:, 0] = -100
    return {**padded, "labels": labels}


def following(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator: labels are the tokens themselves, for a model that compares them with the position before."""
    padded = pad([{**row, "labels": 0} for row in rows])
    return {**padded, "labels": torch.where(padded["attention_mask"] == 1, padded["input_ids"], -100)}


@pytest.mark.parametrize("kind", ["tags", "next tokens"])
def test_a_mean_over_tokens_is_counted_in_tokens(tmp_path: Path, kind: str) -> None:
    data = Texts()
    made = trainer(tmp_path, data, num_labels=3)
    torch.manual_seed(0)
    if kind == "tags":
        small = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = transformers.BertConfig(**small, intermediate_size=8, max_position_embeddings=8, num_labels=3)
        made.model, made.data_collator = transformers.BertForTokenClassification(config), tagged
    else:
        config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, n_positions=8)
        made.model, made.data_collator = transformers.GPT2LMHeadModel(config), following
    tracer = fit_trainer(made, "categorical", structure="ekfac", progress=False)
    tokens = sum(LENGTHS) - len(LENGTHS)  # either way each text has one token less
    assert tracer.problem.counted_units == tokens
    assert tracer.ridge == pytest.approx(tokens * 0.01)


def translator(kind: str) -> Any:
    torch.manual_seed(0)
    small = {"vocab_size": 20, "d_model": 8, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    if kind == "T5":
        config = transformers.T5Config(**small, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        return transformers.T5ForConditionalGeneration(config).eval()
    layers = {
        f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")
    }
    config = transformers.BartConfig(**small, **layers, max_position_embeddings=8)
    return transformers.BartForConditionalGeneration(config).eval()


def translated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator: labels are the text itself, and the end of it behind the padding."""
    batch = following(rows)
    return {**batch, "labels": nn.functional.pad(batch["labels"], (0, 1), value=1)}


@pytest.mark.parametrize("kind", ["BART", "T5"])
def test_translators_need_the_words_of_their_decoder(tmp_path: Path, kind: str) -> None:
    """Labels are no inputs: without them BART would take the words of the source."""
    data = Texts()
    made = trainer(tmp_path, data)
    made.model, made.data_collator = translator(kind), translated
    rows = [data[at] for at in range(8)]
    source = {key: value for key, value in translated(rows).items() if key != "labels"}
    message = "expected decoder_input_ids .* got input_ids, attention_mask in .* DataCollatorForSeq2Seq"
    with pytest.raises(whence.InputError, match=message):
        fit_trainer(made, "categorical", structure="ekfac", progress=False)

    def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = translated(rows)
        return {**batch, "decoder_input_ids": made.model.prepare_decoder_input_ids_from_labels(batch["labels"])}

    loader = [collated(rows)]
    for call in (whence.fit, whence.estimate):
        with pytest.raises(whence.InputError, match="expected decoder_input_ids"):
            call(made.model, [translated(rows)], "categorical", "ekfac")
    tracer = whence.fit(made.model, loader, "categorical", "ekfac", progress=False)
    assert "own loss" not in str(tracer.diagnostics), "the model's own loss is that of the labels as they stand"
    with torch.no_grad():
        logits = made.model(**loader[0]).logits
    torch.testing.assert_close(tracer.predict(loader[0]).mean.float().flatten(), logits.amax(2).flatten())
    with pytest.raises(whence.InputError, match="expected decoder_input_ids"):
        tracer.predict(source)
    made.data_collator = collated
    again = fit_trainer(made, "categorical", structure="ekfac", progress=False, hessian_columns=2)
    assert again.ridge == pytest.approx((sum(LENGTHS) + len(LENGTHS)) * 0.01)


def test_padding_of_predictions_is_that_of_the_decoder() -> None:
    """Source and answer happen to have as many positions: the source's padding says nothing about the answer's."""
    model, texts = translator("BART"), Texts()
    batch = following([texts[at] for at in range(8)])
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    tracer = whence.fit(model, [batch], "categorical", "ekfac", progress=False)
    assert not bool(tracer.predict(batch).hec3.isnan().any())
    mask = torch.ones_like(batch["decoder_input_ids"])
    mask[0, 4:] = 0
    padded = tracer.predict({**batch, "decoder_attention_mask": mask}).hec3.isnan()
    assert torch.equal(padded.reshape(mask.shape), mask == 0)


def test_classes_of_a_text_by_an_encoder_and_a_decoder_need_no_words() -> None:
    """Such a model takes the source for its decoder in training, too."""
    config = translator("BART").config
    config.num_labels = 3
    model = transformers.BartForSequenceClassification(config).eval()
    ids = torch.randint(2, 20, (8, 4))
    ids[:, -1] = 1
    data = {"input_ids": ids, "labels": torch.arange(8) % 3}
    assert len(whence.fit(model, [data], "categorical", "ekfac", progress=False).predict({"input_ids": ids})) == 8


def test_what_is_missing_is_asked_for(tmp_path: Path) -> None:
    made = trainer(tmp_path, Texts(), decay=0.0, num_labels=2)
    made.train_dataset = None
    with pytest.raises(whence.InputError, match="expected a trainer with a model and a training data set"):
        fit_trainer(made)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_labels": 1}, "gaussian"),
        ({"num_labels": 3}, "categorical"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "bernoulli"),
    ],
)
def test_the_configuration_tells_the_loss(config: dict[str, Any], expected: str) -> None:
    assert likelihood_of(transformers.BertConfig(**config)) == expected


def test_a_configuration_that_does_not_tell() -> None:
    with pytest.raises(whence.InputError, match="expected a configuration with num_labels or problem_type"):
        likelihood_of(object())


def _inputs(data: Texts, at: int) -> dict[str, torch.Tensor]:
    return {key: value for key, value in pad([data[at]]).items() if key != "labels"}
