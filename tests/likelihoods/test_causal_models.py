"""Causal models of Hugging Face as they come: gradients of every sequence against autograd, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import whence

WORDS, LENGTH = 70, 6
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "max_position_embeddings": 8,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 6,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
Batch = dict[str, Tensor]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).double().eval()


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **options)).double().eval()


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # the fused one has no double precision
    return MixtralForCausalLM(config).double().eval()


def texts(side: str = "right", n: int = 6) -> list[Batch]:
    """Batches of sequences of several lengths, padded on one side; or packed, two in each row."""
    words = torch.randint(0, WORDS, (n, LENGTH), generator=torch.Generator().manual_seed(1))
    if side == "packed":
        labels = words.clone()
        labels[:, LENGTH // 2] = -100  # the first word of the second one follows nothing
        places = torch.arange(LENGTH // 2).repeat(n, 2)
        whole = {"input_ids": words, "position_ids": places, "labels": labels}
    else:
        mask = torch.ones_like(words)
        for at in range(n):
            mask[at, LENGTH - at % 3 :] = 0
        mask = mask.flip(1) if side == "left" else mask
        whole = {"input_ids": words, "attention_mask": mask, "labels": torch.where(mask == 1, words, -100)}
    return [{key: value[low : low + 3] for key, value in whole.items()} for low in range(0, n, 3)]


def fit(model: Any, data: list[Batch], structure: Any = None, **options: Any) -> whence.Tracer:
    structure = structure or whence.Sketch(size=10**6)  # of all weights: the gradients themselves
    return whence.fit(model, data, "categorical", structure, ridge=1.0, hessian_columns=2, progress=False, **options)


def one_by_one(tracer: whence.Tracer, model: Callable[..., Any]) -> Tensor:
    """(n, 3, d) gradients of the two columns and of the loss's residual, by autograd on single sequences."""
    parameters = list(tracer.problem.selection.parameters.values())
    rows = []
    for batch in tracer.problem.batches:
        view = batch.inputs
        for at in range(batch.size):
            some = slice(at, at + 1)
            logits = model(**{name: value[some] for name, value in view.inputs.items()}).logits
            p = logits.detach().softmax(2)
            classes = view.classes[some].long()
            h = view.weights[some] * torch.maximum(p.gather(2, classes), view.floors[some]).sqrt()
            seen = (h * (logits.gather(2, classes) - (p * logits).sum(2, keepdim=True))).sum((0, 1))
            grads = [
                torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
                for one in seen
            ]
            rows.append(torch.stack([torch.cat([part.flatten() for part in grad]) for grad in grads]))
    return torch.stack(rows)


def assert_gradients(tracer: whence.Tracer, model: Callable[..., Any], data: list[Batch]) -> None:
    features = tracer.bread.features  # type: ignore[attr-defined]
    rows = torch.cat([rows for _, rows in tracer.bread.rows.read("rows")])  # type: ignore[attr-defined]
    wanted = one_by_one(tracer, model)
    torch.testing.assert_close(features.lift(rows), wanted, rtol=1e-8, atol=1e-10 * float(wanted.abs().max()))
    residual = -sum(
        nn.functional.cross_entropy(
            model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1].flatten(0, 1),
            batch["labels"][:, 1:].flatten(),
            reduction="sum",
        )
        for batch in data
    )
    score = torch.autograd.grad(residual, list(tracer.problem.selection.parameters.values()), materialize_grads=True)
    torch.testing.assert_close(wanted[:, -1].sum(0), torch.cat([part.flatten() for part in score]))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2, tied embeddings": (gpt2, "right"),
    "gpt2, padded left": (gpt2, "left"),
    "llama": (llama, "right"),
    "llama, padded left": (llama, "left"),
    "llama, tied embeddings": (lambda: llama(tie_word_embeddings=True), "right"),
    "llama, shared keys": (lambda: llama(num_key_value_heads=1), "left"),
    "llama, packed": (llama, "packed"),
    "mixture of experts": (mixtral, "right"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_sequences(kind: str) -> None:
    """The residual's gradients add up to that of the loss of all labels that count, each of the word before it."""
    make, side = MODELS[kind]
    model, data = make(), texts(side)
    tracer = fit(model, data)
    assert_gradients(tracer, model, data)
    notes = [str(note) for note in tracer.problem.batches.notes + tracer.bread.notes]
    assert any("experts" in note for note in notes) == (kind == "mixture of experts")


def test_checkpointing_of_hugging_face_models() -> None:
    """It is for training, and off in eval mode."""
    model, data = llama(), texts()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    tracer = fit(model, data)
    assert_gradients(tracer, model, data)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_the_forward_are_refused_by_name(reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def forward(self, **inputs: Tensor) -> Any:
            return checkpoint(lambda *given: self.model(*given).logits, *inputs.values(), use_reentrant=reentrant)

    with pytest.raises(whence.errors.UncapturedParameterError, match="checkpoint"):
        fit(Recomputed(), texts())


def test_compiled_models() -> None:
    model, data = llama(), texts()
    compiled = fit(torch.compile(model, backend="eager"), data)
    assert_gradients(compiled, model, data)
    inside = llama()
    inside.model.layers[0].compile(backend="eager")  # type: ignore[union-attr,index,operator]
    torch.testing.assert_close(fit(inside, data).bread.leverage_blocks, compiled.bread.leverage_blocks)


def test_low_rank_factors_of_peft() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False)
    model, data = peft.get_peft_model(llama(), config).double().eval(), texts("left")
    tracer = fit(model, data)
    assert all("lora" in name for name in tracer.problem.selection.parameters)
    assert_gradients(tracer, model, data)


@pytest.mark.parametrize("structure", ["sketch", "core", "ekfac"])
def test_half_precision(structure: str) -> None:
    """Variances of a model in bfloat16 are those of the same model in double precision, to its digits."""
    data = texts()
    test = {name: value for name, value in data[0].items() if name != "labels"}
    wide, half = (fit(one, data, structure) for one in (llama(), llama().bfloat16()))
    for name in ("ho", "hec3"):
        found, wanted = (one.predict(test, outputs=[3]).variance(name) for one in (half, wide))
        there = ~wanted.isnan()
        assert float((found / wanted)[there].log().abs().median()) < 0.1
