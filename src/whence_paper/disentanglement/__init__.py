"""Disentanglement error: does one number follow noise in labels, and another one scarce data?"""
