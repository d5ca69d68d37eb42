"""Functions that are overridden on distributed tensors, above autograd or in Python.

install             puts the overrides in place when the first mesh is used, and removes them
composites          functions in C++ that make plain tensors
out_arguments       functions in C++ that write into results they are given
derivatives         derivative formulas that make plain tensors
python_functions    functions in Python that make plain tensors

Which ops these are, and what runs in place of an op such as `linear`, is a field of their records in `ops`.
"""
