"""The networks that the benchmarks measure: those of the paper's experiments."""

from __future__ import annotations

from whence_paper.networks import ViT, cnn, mlp, resnet9, resnet18, size, tabular

__all__ = ["ViT", "cnn", "mlp", "resnet9", "resnet18", "size", "tabular"]
