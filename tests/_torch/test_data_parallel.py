"""The names that DistributedDataParallel skips."""

from torch import nn

from shardwise._torch.data_parallel import ignored_names


def test_ignored_names() -> None:
    module = nn.Linear(2, 2)
    assert list(ignored_names(module)) == []
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    assert list(ignored_names(module)) == ["bias"]
