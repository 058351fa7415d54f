"""Attention and recurrent layers, run as the linear maps they consist of, each read by its own rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.rules.base import Arguments, Function, Keywords, Reader, Recorder, bind

# --- Attention --------------------------------------------------------------------------------------------------------


def _projected(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """Queries, keys and values, as parts of products with the whole weight, whose gradients are joined, not added."""
    if query is key is value:
        return [part.contiguous() for part in F.linear(query, weight, bias).chunk(3, -1)]
    return [F.linear(one, weight, bias).chunk(3, -1)[at].contiguous() for at, one in enumerate((query, key, value))]


# torch's own function, written in Python, without the line that passes the whole call to the recorder.
OWN_ATTENTION = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False, "_in_projection_packed": _projected},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def attention(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Multi-head attention, as the linear maps that torch calls for it."""
    with recorder:
        return OWN_ATTENTION(*args, **kwargs)


# --- LSTM, GRU and plain recurrent networks ---------------------------------------------------------------------------

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]  # (from the inputs, from the hidden state, state) -> new state


def _lstm(inputs: Tensor, hidden: Tensor, state: State) -> State:
    i, f, g, o = (inputs + hidden).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(inputs: Tensor, hidden: Tensor, state: State) -> State:
    (r, z, m), (hr, hz, hm) = inputs.chunk(3, -1), hidden.chunk(3, -1)
    reset, update = (r + hr).sigmoid(), (z + hz).sigmoid()
    candidate = (m + reset * hm).tanh()
    return ((1 - update) * candidate + update * state[0],)


def _scan(step: Step, inputs: Tensor, state: State, weights: Sequence[Any], biased: bool) -> tuple[list[Tensor], State]:
    """One layer in one direction over inputs (t, n, i): hidden states at all steps, and the last state."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh, *project = rest if biased else (None, None, *rest)
    outputs = []
    for now in F.linear(inputs, w_ih, b_ih).unbind(0):
        state = step(now, F.linear(state[0], w_hh, b_hh), state)
        if project:
            state = (F.linear(state[0], project[0]), *state[1:])
        outputs.append(state[0])
    return outputs, state


RECURRENT = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")


def _network(step: Step) -> Reader:
    def read(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
        given = bind(RECURRENT, args, kwargs)
        params, biased = given["params"], given["has_biases"]
        packed = not isinstance(params, (list, tuple)) or not isinstance(biased, bool)
        if packed or not recorder.tracks(*params) or (given["train"] and given["dropout"] > 0):
            return function(*args, **kwargs)
        states = given["hx"] if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
        count = len(states[0])  # layers times directions
        weights = [params[at : at + len(params) // count] for at in range(0, len(params), len(params) // count)]
        directions = count // given["num_layers"]
        finals: list[State] = []
        with recorder:
            inputs = given["input"].transpose(0, 1) if given["batch_first"] else given["input"]
            for layer in range(given["num_layers"]):
                outputs = []
                for direction in range(directions):
                    at = layer * directions + direction
                    sequence = inputs.flip(0) if direction else inputs
                    out, final = _scan(step, sequence, tuple(one[at] for one in states), weights[at], biased)
                    outputs.append(torch.stack(out[::-1] if direction else out))
                    finals.append(final)
                inputs = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            last = [torch.stack(each) for each in zip(*finals, strict=True)]
            return (inputs.transpose(0, 1) if given["batch_first"] else inputs), *last

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
}
