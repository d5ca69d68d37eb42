"""The section of docs/differences.md about PyTorch's own tests."""

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from .exemptions import Reason

PAGE = Path(__file__).parents[3] / "docs" / "differences.md"
BEGIN, END = "<!-- pytorch tests: begin -->", "<!-- pytorch tests: end -->"


def write_page(counts: Mapping[str, Counter[str]], reasons: list[Reason]) -> None:
    """Update the rows of the files that were run, and the list of exemptions."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    columns = ["ok", "skip", *(reason.key for reason in reasons), "fail"]
    rows = {**_rows(old, columns), **counts}
    body = "\n".join([_summary(rows), "", *_table(rows, columns), "", *_list(reasons)])
    PAGE.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")


def _summary(rows: Mapping[str, Counter[str]]) -> str:
    total = sum(rows.values(), Counter())
    public = total["ok"] + total["fail"]
    strict = public + total["collectives"] + total["contract"]
    return (
        f"{total['ok']} of {public} tests of public behaviour pass ({total['ok'] / public:.1%}), or of {strict} with "
        f"those of the columns collectives and contract ({total['ok'] / strict:.1%})."
    )


def _rows(text: str, columns: list[str]) -> dict[str, Counter[str]]:
    """The rows of the table on the page, for the files that are not run now."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    if not lines:
        return {}
    keys = [_KEYS.get(name, name) for name in lines[0]]
    found = {}
    for cells in lines[2:]:
        if cells[0].endswith(".py"):
            values = dict(zip(keys[2:], cells[2:], strict=True))
            found[cells[0]] = Counter({key: int(values[key] or 0) for key in columns if values.get(key)})
    return found


_NAMES = {"ok": "pass", "skip": "skipped", "fail": "fail"}
_KEYS = {name: key for key, name in _NAMES.items()}


def _table(rows: Mapping[str, Counter[str]], columns: list[str]) -> list[str]:
    names = [_NAMES.get(column, column) for column in columns]
    lines = [f"| file | tests | {' | '.join(names)} |", "|---|" + "--:|" * (len(names) + 1)]
    for file in sorted(rows):
        lines.append(_line(file, rows[file], columns))
    lines.append(_line("total", sum(rows.values(), Counter()), columns))
    return lines


def _line(name: str, row: Counter[str], columns: list[str]) -> str:
    return f"| {name} | {sum(row.values())} | {' | '.join(str(row[c] or '') for c in columns)} |"


def _list(reasons: list[Reason]) -> list[str]:
    lines: list[str] = []
    for reason in reasons:
        lines += [f"**{reason.key}**: {reason.text}", ""]
        for file, names in groupby(sorted(reason.tests), lambda name: name.partition("::")[0]):
            by_note: dict[str, list[str]] = {}
            for name in names:
                by_note.setdefault(reason.tests[name], []).append(name.partition("::")[2])
            groups = [
                ", ".join([*(_test(name, "") for name in tests[:-1]), _test(tests[-1], note)])
                for note, tests in by_note.items()
            ]
            lines.append(f"- {file}: {'; '.join(groups)}")
        lines.append("")
    return lines


def short_name(name: str) -> str:
    """A test without its class; a class without what is in it: `test_mm`, `TestStrategies.*`."""
    return f"`{name if name.endswith('*') else name.rpartition('.')[2]}`"


def _test(name: str, note: str) -> str:
    short = short_name(name)
    return f"{short} ({note})" if note else short
