"""The ops by which autograd accumulates the gradient of a leaf."""

from __future__ import annotations

import torch

SET_GRAD = torch.ops.aten.detach.default
"""`detach(gradient)`: an alias of the first gradient of a leaf becomes its `.grad`."""
ADD_TO_GRAD = torch.ops.aten.add_.Tensor
"""`add_(leaf.grad, gradient)`: a further gradient is added in place."""
