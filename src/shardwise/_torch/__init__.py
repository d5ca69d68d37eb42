"""PyTorch's private names: each is imported here and nowhere else, behind a function or a name of our own.

`docs/internals.md` lists every module with its private names, what they are for, and the test that fails when PyTorch
changes them.
"""
