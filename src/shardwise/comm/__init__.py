"""Communication: plans between layouts, and carrying them out.

Arithmetic, without tensors or process groups:

    cost          what communication costs on a mesh
    states        which axes shard each factor of a tensor, and which axes are Partial
    edges         the steps from one state to others
    planner       the cheapest path between two layouts
    plan          its steps, as data that prints
    estimate      about what a plan would cost, without making it
    boxes         which slices of local shards each pair of ranks exchanges
    mesh_change   plans for a tensor that changes its mesh
    mesh_routes   the routes between two meshes, cached
    routes        which ranks send which elements to which

On tensors:

    groups        the process groups of a mesh
    rank_group    process groups of the ranks of two meshes
    redistribute  from one spec to another: plans, bound moves, and running them
    bind_move     which move carries out a step
    buckets       reductions that share a collective
    move          a move: start, wait, finish
    even_moves    one native collective between reshapes
    padded_moves  one native collective on uneven shards
    exchange      any layout to any other; from one source rank
    local_moves   steps without communication
    mesh_move     changes of mesh on local tensors
    streaming     routes on local tensors, in rounds of bounded size
    token_route   rows of tokens to the ranks of their experts, and back
    packing       boxes of tensors into vectors, and back
    transport     which dtypes backends move and reduce
    on_ranks      functions of a rank's coordinate, real or simulated
"""
