"""Optimizers of heavyball, without compilation, on the parameters of fully_shard and of tensor parallel."""

from functools import partial

import checks
import heavyball
from optimizers import KINDS, train

heavyball.utils.compile_mode = None


def new_optimizer(name, model):
    return getattr(heavyball, name)(model.parameters(), lr=1e-2)


if __name__ == "__main__":
    checks.run(
        {
            f"{name}, {kind}": partial(train, kind, partial(new_optimizer, name), 3e-3)
            for name in ("AdamW", "ADOPT", "LaProp", "Muon", "PSGDKron")
            for kind in KINDS
        }
    )
