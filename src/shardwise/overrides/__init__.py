"""Functions that are overridden on distributed tensors, above autograd or in Python.

install             installs the overrides when the first mesh is used, and removes them
composites          functions in C++ that make plain tensors
out_arguments       functions in C++ with `out=`
derivatives         derivative formulas that make plain tensors
batch_rules         batching rules of vmap that make plain tensors
python_functions    functions in Python that make plain tensors; `replaced` holds the originals
flex_attention      flex_attention; one call of it: `flex_call`, on simulated ranks: `each_rank`
state_dicts         full state dicts of torch.distributed.checkpoint
safetensors_writer  the writer of safetensors files of torch.distributed.checkpoint
data_parallel       DistributedDataParallel

Which ops these are, and what runs in place of an op such as `linear`, is a field of their records in `ops`.
"""
