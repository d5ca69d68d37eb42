"""PyTorch 2.11 keeps no objects of ours as constants of a graph, so that graphs end at them: docs/compile.md."""

import torch

collect_ignore_glob = ["test_*.py"] if torch.__version__ < (2, 13) else []
