"""Experiments on CIFAR-10: which predictions of a ResNet-18 and of a vision transformer are wrong?"""
