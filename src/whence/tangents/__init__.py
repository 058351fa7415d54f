"""Tangents: how the outputs move with the weights, example by example."""
