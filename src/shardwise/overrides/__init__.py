"""Functions that PyTorch takes apart, kept whole on distributed tensors: fewer dispatches, and fewer nodes of autograd.

A kernel stands above autograd (`above_autograd`). It makes one call of the function, and a few of its backward, to ops
that have rules. Transforms and autocast, which have their own idea of such a function, get it as it was.
"""
