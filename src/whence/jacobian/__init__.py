"""Tangents: how the outputs move with the weights, example by example."""

from __future__ import annotations
