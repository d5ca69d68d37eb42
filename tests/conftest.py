import random

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# The first example may pay for a cold cache, so no deadline; the same examples on every run.
hypothesis.settings.register_profile("shardwise", deadline=None, derandomize=True)
hypothesis.settings.load_profile("shardwise")


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(0)
    torch.manual_seed(0)
