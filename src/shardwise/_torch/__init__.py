"""PyTorch's private names: each is imported here and nowhere else, behind a function or name that says what it is for.

    ops             op overloads and their schemas
    pytree          nested containers of tensors
    modes           dispatch modes
    wrapper         tensor classes without memory of their own
    symint          symbolic integers with nodes of ours
    c10d            the tables of process groups, and the fake backend
    bindings        the quickest Python binding of an op
    autograd_graph  nodes of the autograd graph, and the one that runs now
    async_tensors   results of functional collectives whose data is under way
    script_objects  process groups boxed in script objects
    above_autograd  kernels that see a call before autograd records or decomposes it
    below_autograd  ops that skip autograd
    backward_pass   the node that autograd evaluates, and the hooks for tensors that it saves
    tls             values of a thread that its backward passes inherit
    transforms      function transforms, forward derivatives, autocast
    schemas         the table of all ops
    python_functions  functions in Python that make plain tensors
    collectives     functional collectives, and process groups by name
    device_mesh     submeshes, parallel instances and groups of a DeviceMesh
    testing         PyTorch's operator database, and a store between processes, for `shardwise.testing`

`docs/internals.md` lists every name, what relies on it, and the test that fails when PyTorch changes it.
"""
