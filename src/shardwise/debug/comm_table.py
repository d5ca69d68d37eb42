"""The records of a CommDebugMode as a drawn table, as a list, and as a tree for JSON."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import Tensor

from ..comm.plan import bytes_text
from ..tensor.dtensor import DTensor
from .comm_record import Collective, ModuleRecord, Operation, counts
from .module_calls import ROOT
from .table import boxed

PASSES = ("forward", "backward")
Record = Operation | Collective


def draw_table(modules: Sequence[ModuleRecord], collectives: Sequence[Collective]) -> str:
    """Return a table of the collectives of each module that has any, and the bytes that a rank receives in them."""
    parents = parents_of(modules)
    width = max([len(str(collective)) for collective in collectives], default=0)
    rows: list[list[str]] = []
    for name in (ROOT, *parents):
        own = [collective for collective in collectives if name in collective.moment.modules]
        if own or name == ROOT:
            label = "  " * len(_ancestors(name, parents)) + _label(name, parents)
            columns = [_totals([c for c in own if _pass(c) == which], width) for which in PASSES]
            rows += map(list, itertools.zip_longest([label], *columns, fillvalue=""))
    return boxed(["module", *PASSES], rows)


def _totals(collectives: Sequence[Collective], width: int) -> list[str]:
    number = Counter(map(str, collectives))
    received: Counter[str] = Counter()
    for collective in collectives:
        received[str(collective)] += collective.received
    return [f"{n:>3} {what:<{width}} {bytes_text(received[what]):>9}" for what, n in number.items()]


def parents_of(modules: Sequence[ModuleRecord]) -> dict[str, str]:
    """Return the name of the innermost called module around each called module, in the order of definition."""
    names = {module.name for module in modules}
    parents = {}
    for module in modules:
        parent = module.name.rpartition(".")[0]
        while parent and parent not in names:  # a list of modules is not called itself
            parent = parent.rpartition(".")[0]
        parents[module.name] = parent or ROOT
    return parents


def _ancestors(name: str, parents: dict[str, str]) -> list[str]:
    found = []
    while name != ROOT:
        name = parents[name]
        found.append(name)
    return found


def _label(name: str, parents: dict[str, str]) -> str:
    parent = parents.get(name, ROOT)
    return name if parent == ROOT else name.removeprefix(parent + ".")


def list_modules(modules: Sequence[ModuleRecord], records: Sequence[Record], noise_level: int) -> list[str]:
    """Return a text for each module: its class, its parameters, and the ops that ran in none of its submodules."""
    texts = []
    for module in (ModuleRecord(ROOT, "", {}), *modules):
        lines = [f"{module.name}  {module.kind}".rstrip()]
        lines += [f"  {name}: {_parameter_text(parameter)}" for name, parameter in module.parameters.items()]
        for name in PASSES:
            own = [r for r in records if r.moment.modules[-1] == module.name and _pass(r) == name]
            shown = [_line(record) for record in own if shows(record, noise_level)]
            lines += [f"  {name}", *shown] if shown else []
        texts.append("\n".join(lines))
    return texts


def _pass(record: Record) -> str:
    return PASSES[record.moment.backward]


def shows(record: Record, noise_level: int) -> bool:
    """Return whether a record is shown at this noise level."""
    if isinstance(record, Collective):
        return True
    if noise_level < 3 and record.trivial:
        return False
    return record.distributed if noise_level < 2 else noise_level >= 2


def _line(record: Record) -> str:
    again = "  (again)" if record.moment.recomputing else ""
    if isinstance(record, Collective):
        return f"    * {record}, {bytes_text(record.received)}{again}"
    return f"    {record}{again}"


def _parameter_text(parameter: Tensor) -> str:
    return repr(parameter._spec if isinstance(parameter, DTensor) else list(parameter.shape))


def json_tree(modules: Sequence[ModuleRecord], records: Sequence[Record], noise_level: int) -> dict[str, object]:
    """Return the tree of modules, each with its parameters, collectives and operations."""
    children: defaultdict[str, list[object]] = defaultdict(list)
    everything = (ModuleRecord(ROOT, "", {}), *modules)
    nodes = {module.name: _json_node(module, children[module.name], records, noise_level) for module in everything}
    for name, parent in parents_of(modules).items():
        children[parent].append(nodes[name])
    return nodes[ROOT]


def _json_node(
    module: ModuleRecord, children: list[object], records: Sequence[Record], noise_level: int
) -> dict[str, object]:
    inside = [r for r in records if isinstance(r, Collective) and module.name in r.moment.modules]
    own = [r for r in records if isinstance(r, Operation) and r.moment.modules[-1] == module.name]
    shown = [record for record in own if noise_level > 0 and shows(record, noise_level)]
    placements = module.placements()
    node: dict[str, object] = {
        "fqn": module.name,
        "module_type": f"class '{module.kind}'" if module.kind else "",
        "parameters": [[name, str(placements[name])] for name in module.parameters if name in placements],
        "children": children,
    }
    for name in PASSES:
        collectives = [c for c in inside if _pass(c) == name]
        node[f"collectives_{name}"] = [[str(op), number] for op, number in counts(collectives).items()]
        node[f"bytes_{name}"] = sum(collective.received for collective in collectives)
        node[f"operations_{name}"] = [_json_op(r) for r in shown if _pass(r) == name and not r.moment.recomputing]
    node["operations_checkpointing"] = [_json_op(record) for record in shown if record.moment.recomputing]
    return node


def _json_op(record: Operation) -> dict[str, object]:
    specs = [spec for _, spec in record.inputs if spec is not None]
    return {
        "name": str(record.op),
        "input_shape": [str(spec.shape) for spec in specs],
        "input_sharding": [str(spec.placements) for spec in specs],
        "device_mesh": str(specs[0].mesh) if specs else "",
        "is_bw": record.moment.backward,
        "is_activation_checkpointing": record.moment.recomputing,
    }
