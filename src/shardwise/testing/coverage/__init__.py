"""Coverage: every op of PyTorch's operator database, with placed inputs, against one device.

    python -m shardwise.testing.coverage [--quick] [--only NAME] [--gloo] [--dtypes int64,bool] [--variants out,inplace]

    samples    what the database gives: the functions, their sample inputs, small and chosen by a seed
    trial      one sample with one choice of placements, forward and backward, against the plain call
    sides      who holds the distributed tensors: ranks in this process, or processes
    entry      all trials of one entry, and what served it
    children   entries in child processes, since some ops crash or hang
    table      docs/coverage.md

>>> cover("addmm", Effort(), Simulated()).status
'ok'
"""
