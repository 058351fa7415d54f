"""Jacobians of a network in its parameters: per-example gradients, layer by layer, verified against autograd."""
