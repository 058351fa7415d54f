"""Attention and recurrent layers, run as the linear maps they consist of, each read by its own rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.rules.base import Arguments, Function, Keywords, Reader, Recorder, bind

# --- Attention --------------------------------------------------------------------------------------------------------

ATTENTION = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights"),
    *("attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k"),
    *("static_v", "average_attn_weights", "is_causal"),
)
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
WEIGHTS = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias", *SEPARATE)


def attention(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Multi-head attention; extra keys and values (`bias_k`, `add_zero_attn`) are left to the functional fallback."""
    given = bind(ATTENTION, args, kwargs)
    unusual = any(given.get(name) is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    dropped = given.get("training", True) and given.get("dropout_p", 0.0) > 0
    plain = given["query"].dim() == 3 and recorder.tracks(*(given.get(name) for name in WEIGHTS))
    if not plain or unusual or given.get("add_zero_attn") or dropped:
        return function(*args, **kwargs)
    with recorder:
        return _attention(given)


def _attention(given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The same as PyTorch's own, on (t, n, d)."""
    heads = given["num_heads"]
    # (n, h, t, d / h)
    q, k, v = (one.reshape(*one.shape[:2], heads, -1).permute(1, 2, 0, 3) for one in _projected(given))
    mask, weights = _mask(given, q, k), None
    if given.get("need_weights", True):
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)  # (n, h, t, s)
        mixed = weights @ v
        weights = weights.mean(1) if given.get("average_attn_weights", True) else weights
    else:
        causal = bool(given.get("is_causal")) and mask is None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal)
    joined = mixed.permute(2, 0, 1, 3).flatten(2)  # (t, n, d)
    return F.linear(joined, given["out_proj_weight"], given.get("out_proj_bias")), weights


def _projected(given: Mapping[str, Any]) -> Sequence[Tensor]:
    """Queries, keys and values (t, n, d)."""
    inputs = [given[name] for name in ("query", "key", "value")]
    weight, bias = given["in_proj_weight"], given.get("in_proj_bias")
    separate = given.get("use_separate_proj_weight")
    if not separate and inputs[0] is inputs[1] is inputs[2]:
        return F.linear(inputs[0], weight, bias).chunk(3, dim=-1)
    weights = [given[name] for name in SEPARATE] if separate else weight.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(*each) for each in zip(inputs, weights, biases, strict=True)]


def _mask(given: Mapping[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
    """Both masks as one to be added to the scores (n, h, t, s)."""
    among, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if among is not None and among.dim() == 3:
        among = among.reshape(*q.shape[:3], k.shape[2])
    if padding is not None:
        padding = padding.reshape(len(q), 1, 1, k.shape[2])
    masks = [
        torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask
        for mask in (among, padding)
        if mask is not None
    ]
    return sum(masks[1:], masks[0]) if masks else None


# --- LSTM, GRU and plain recurrent networks ---------------------------------------------------------------------------

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]  # (from the inputs, from the hidden state, state) to a new state


def _lstm(inputs: Tensor, hidden: Tensor, state: State) -> State:
    i, f, g, o = (inputs + hidden).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(inputs: Tensor, hidden: Tensor, state: State) -> State:
    (r, z, m), (hr, hz, hm) = inputs.chunk(3, -1), hidden.chunk(3, -1)
    reset, update = (r + hr).sigmoid(), (z + hz).sigmoid()
    candidate = (m + reset * hm).tanh()
    return ((1 - update) * candidate + update * state[0],)


def _scan(step: Step, inputs: Tensor, state: State, weights: Sequence[Tensor], biased: bool) -> tuple[Tensor, State]:
    """One layer in one direction over inputs (t, n, i)."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = (rest[0], rest[1]) if biased else (None, None)
    project = rest[2 * biased] if len(rest) > 2 * biased else None
    fed = F.linear(inputs, w_ih, b_ih)
    outputs = []
    for now in fed.unbind(0):
        state = step(now, F.linear(state[0], w_hh, b_hh), state)
        if project is not None:
            state = (F.linear(state[0], project), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs), state


def _run(step: Step, given: dict[str, Any], states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """All layers and directions; the final states come back stacked as they came in."""
    inputs = given["input"].transpose(0, 1) if given["batch_first"] else given["input"]
    directions = 2 if given["bidirectional"] else 1
    biased, params = bool(given["has_biases"]), list(given["params"])
    each = len(params) // (given["num_layers"] * directions)
    finals: list[State] = []
    for layer in range(given["num_layers"]):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            sequence = inputs.flip(0) if direction else inputs
            state = tuple(tensor[at] for tensor in states)
            out, final = _scan(step, sequence, state, params[at * each : (at + 1) * each], biased)
            outputs.append(out.flip(0) if direction else out)
            finals.append(final)
        inputs = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    last = [torch.stack(tensors) for tensors in zip(*finals, strict=True)]
    return (inputs.transpose(0, 1) if given["batch_first"] else inputs), last


RECURRENT = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")


def _network(step: Step) -> Reader:
    def read(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
        given = bind(RECURRENT, args, kwargs)
        params = given["params"]
        packed = not isinstance(params, (list, tuple)) or not isinstance(given["has_biases"], bool)
        if packed or not recorder.tracks(*params) or (given["train"] and given["dropout"] > 0):
            return function(*args, **kwargs)
        states = given["hx"] if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
        with recorder:
            outputs, last = _run(step, given, states)
        return (outputs, *last)

    return read


def _cell(step: Step) -> Reader:
    def read(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
        given = bind(("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh"), args, kwargs)
        if not recorder.tracks(*(given.get(name) for name in ("w_ih", "w_hh", "b_ih", "b_hh"))):
            return function(*args, **kwargs)
        state = tuple(given["hx"]) if isinstance(given["hx"], (list, tuple)) else (given["hx"],)
        with recorder:
            fed = F.linear(given["input"], given["w_ih"], given.get("b_ih"))
            new = step(fed, F.linear(state[0], given["w_hh"], given.get("b_hh")), state)
        return new if len(new) > 1 else new[0]

    return read


STEPS: dict[str, Step] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda inputs, hidden, state: ((inputs + hidden).tanh(),),
    "rnn_relu": lambda inputs, hidden, state: ((inputs + hidden).relu(),),
}
READERS: dict[Function, Reader] = {
    F.multi_head_attention_forward: attention,
    **{getattr(torch, name): _network(step) for name, step in STEPS.items()},
    **{getattr(torch, f"{name}_cell"): _cell(step) for name, step in STEPS.items()},
}
