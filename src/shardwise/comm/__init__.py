"""Communication: plans between layouts, and carrying them out.

Arithmetic, without tensors or process groups:

    cost          what communication costs on a mesh
    states        which axes shard each factor of a tensor, and which are Partial
    edges         the steps from one state to others
    planner       the cheapest path between two layouts
    plan          its steps, as data that prints
    estimate      about what a plan would cost, without making it
    boxes         which slices of local shards each pair of ranks exchanges

On tensors:

    groups        the process groups of a mesh
    redistribute  from one spec to another: plans, bound moves, and running them
    bind_move     which move carries out a step
    buckets       reductions that share a collective
    move          a move: start, wait, finish
    even_moves    one native collective between reshapes
    padded_moves  one native collective on uneven shards
    exchange      any layout to any other; from one source rank
    local_moves   steps without communication
    packing       boxes of tensors into vectors, and back
    transport     which dtypes backends move and reduce
    on_ranks      functions of a rank's coordinate, real or simulated
"""
