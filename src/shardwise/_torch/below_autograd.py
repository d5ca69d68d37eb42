"""Run ops below autograd, which takes half the time."""

import torch

below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context manager: ops inside skip autograd's kernels, while under `no_grad` these still run, and take time."""
