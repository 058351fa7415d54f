"""Experiments on MNIST and Fashion-MNIST: one class with random labels, another one missing."""
