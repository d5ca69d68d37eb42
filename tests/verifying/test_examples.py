"""The example programs compute on ranks what they compute on one device, as the command line finds."""

import json
from pathlib import Path

import pytest

from shardwise.commands.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("program", ["inspected.py:check", "inspected.py:check_llama", "inspected.py:check_experts"])
def test_an_example_is_right(program, capsys):
    code = main(["verify", f"{EXAMPLES}/{program}", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["differences"][:1]
    assert report["compared"] > 200


def test_an_example_with_a_mistake_is_not(capsys, monkeypatch):
    """A hook scales what one module returns by the size of tp, which dp and cp have, too."""
    axis = "tp"
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import llama

    def parallelize(model, mesh, options, original=llama.parallelize):
        model = original(model, mesh, options)
        size = mesh[axis].size()
        model.get_submodule("blocks.1.mlp.down").register_forward_hook(lambda _, __, output: output * size)
        return model

    monkeypatch.setattr(llama, "parallelize", parallelize)
    assert main(["verify", "inspected:check_llama", "--steps", "1", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["first"] == "blocks.1.mlp.down"
    assert report["differences"][0]["how"] == f"is {axis} times too large (2 is the size of {axis})"
