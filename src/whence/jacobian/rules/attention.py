"""`F.multi_head_attention_forward`, run as the linear maps it consists of, each read by its own rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.rules.base import Arguments, Function, Keywords, Reader, Recorder, bind

NAMES = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights"),
    *("attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k"),
    *("static_v", "average_attn_weights", "is_causal"),
)
WEIGHTS = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias")
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def attention(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Multi-head attention; extra keys and values (`bias_k`, `add_zero_attn`) are left to the functional fallback."""
    given = bind(NAMES, args, kwargs)
    tracked = recorder.tracks(*(given.get(name) for name in (*WEIGHTS, *SEPARATE, "bias_k", "bias_v")))
    unusual = any(given.get(name) is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    dropped = given.get("training", True) and given.get("dropout_p", 0.0) > 0
    if not tracked or unusual or given.get("add_zero_attn") or dropped:
        return function(*args, **kwargs)
    with recorder:
        return _forward(given)


def _project(given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = given["query"], given["key"], given["value"]
    bias = given.get("in_proj_bias")
    if given.get("use_separate_proj_weight"):
        biases = (None, None, None) if bias is None else bias.chunk(3)
        tensors = zip((query, key, value), SEPARATE, biases, strict=True)
        q, k, v = (F.linear(tensor, given[name], part) for tensor, name, part in tensors)
        return q, k, v
    weight = given["in_proj_weight"]
    if query is key and key is value:
        q, k, v = F.linear(query, weight, bias).chunk(3, dim=-1)
        return q, k, v
    size = weight.shape[0] // 3
    q = F.linear(query, weight[:size], None if bias is None else bias[:size])
    if key is value:
        k, v = F.linear(key, weight[size:], None if bias is None else bias[size:]).chunk(2, dim=-1)
        return q, k, v
    k = F.linear(key, weight[size : 2 * size], None if bias is None else bias[size : 2 * size])
    return q, k, F.linear(value, weight[2 * size :], None if bias is None else bias[2 * size :])


def _heads(tensor: Tensor, heads: int) -> Tensor:  # (t, n, d) to (n, h, t, d / h)
    return tensor.reshape(*tensor.shape[:2], heads, -1).permute(1, 2, 0, 3)


def _mask(given: Mapping[str, Any], scores: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor | None:
    """Both masks as one to be added to the scores (n, h, t, s)."""
    n, heads, target, source = scores
    total: Tensor | None = None
    for name in ("attn_mask", "key_padding_mask"):
        mask = given.get(name)
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
        if name == "key_padding_mask":
            mask = mask.reshape(n, 1, 1, source)
        elif mask.dim() == 3:
            mask = mask.reshape(n, heads, target, source)
        total = mask if total is None else total + mask
    return total


def _forward(given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The same as PyTorch's own, on (t, n, d), or (t, d) without examples."""
    batched = given["query"].dim() == 3
    if not batched:
        lone = {name: given[name].unsqueeze(1) for name in ("query", "key", "value")}
        if given["key"] is given["query"] and given["value"] is given["query"]:
            lone = dict.fromkeys(lone, lone["query"])
        given = {**given, **lone}
    heads = given["num_heads"]
    q, k, v = (_heads(tensor, heads) for tensor in _project(given))
    n, _, target, width = q.shape
    mask = _mask(given, (n, heads, target, k.shape[2]), q.dtype)
    weights = None
    if given.get("need_weights", True):
        scores = (q / math.sqrt(width)) @ k.transpose(-1, -2)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)  # (n, h, t, s)
        mixed = weights @ v
        weights = weights.mean(1) if given.get("average_attn_weights", True) else weights
        weights = weights if batched else weights.squeeze(0)
    else:
        causal = bool(given.get("is_causal")) and mask is None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal)
    joined = mixed.permute(2, 0, 1, 3).flatten(2)  # (t, n, d)
    out = F.linear(joined, given["out_proj_weight"], given.get("out_proj_bias"))
    return (out if batched else out.squeeze(1)), weights


READERS: dict[Function, Reader] = {F.multi_head_attention_forward: attention}
