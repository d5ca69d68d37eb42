"""Coverage: every entry of PyTorch's operator database on distributed inputs, compared with one device.

    python -m shardwise.testing.coverage [--quick] [--only NAME] [--gloo] [--dtypes int64,bool] [--variants out,inplace]

    samples    the functions of the database with small sample inputs, chosen by a seed
    trial      one sample with one choice of placements, forward and backward, compared with the plain call
    sides      where the ranks are: simulated in this process, or one process each
    entry      all trials of one entry, and how its ops were dispatched
    processes  entries on four gloo processes
    table      docs/coverage.md

>>> cover("addmm", Effort(), Simulated()).status
'ok'
"""
