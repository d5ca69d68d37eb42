"""Functions that are overridden on distributed tensors, above autograd or in Python.

linear, rms_norm    one op and one node of autograd each, instead of several
composites          functions in C++ that make plain tensors, or that read the memory of their tensors
out_arguments       functions in C++ that write into results they are given
recurrent           lstm, gru, rnn: step by step instead of in a fused kernel
derivatives         derivative formulas that make plain tensors
python_functions    functions in Python that make plain tensors
install             puts them in place when the first mesh is used
"""
