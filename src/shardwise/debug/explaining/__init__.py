"""Why a program communicates: what `explain` records, and how it is printed.

explain     the public `explain`: a context manager, or a function that runs another one
records     the result, as frozen values that convert to dicts and JSON; `text` prints them
recorder    the dispatch mode that sees ops and collectives, and what they belong to
purposes    why functions of shardwise communicate: styles, leaf gradients, buckets, fully_shard, ...
calls       the reason of an op's communication: what the propagator chose, and what it rejected, with prices
reasons     the sentences and edits of a reason; `names` finds the user's names of tensors
lines       the user's line of an op; in a backward pass that of the forward pass
timeline    when ops and collectives run on each rank; `trace_file` writes it for trace viewers
"""
