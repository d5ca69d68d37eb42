"""Why a program communicates: what `explain` records, and how it is printed.

records     what is sent: frozen values, as text, as a dict, as JSON
explain     the public `explain`: a context manager, or a function that runs another one
recorder    the dispatch mode that sees ops and collectives, and the causes that they have
lines       the user's line of an op; in a backward pass that of the forward pass
purposes    what the functions of shardwise communicate for
choices     what the propagator chose for a call, and what it rejected, with prices
reasons     reasons and edits in words
"""
