"""PyTorch's private names: each is imported here and nowhere else, behind a function or name that says what it is for.

    ops             op overloads and their schemas
    pytree          nested containers of tensors
    modes           dispatch modes
    bindings        the quickest Python binding of an op
    above_autograd  kernels that run before autograd takes a function apart
    testing         PyTorch's operator database, and a store between processes, for `shardwise.testing`

`docs/internals.md` lists every name, what relies on it, and the test that fails when PyTorch changes it.
"""
