"""Differences between torch 2.11, 2.12 and 2.13, and what overlapc patches in torch.

Private names that all three versions share are used where they are needed.
"""
