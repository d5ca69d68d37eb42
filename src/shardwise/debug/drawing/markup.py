"""HTML as text in which everything is escaped that is not an element.

>>> tag("b", "1 < 2", title='"')
'<b title="&quot;">1 &lt; 2</b>'
"""

from __future__ import annotations

_WITHOUT_END = frozenset(("br", "input", "meta", "col"))


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str | int, **attributes: str | int | bool | None) -> Markup:
    """Return an element. Children that are no Markup are escaped, attributes always.

    `class_` is the attribute class, `aria_sort` is aria-sort; None and False leave an attribute out.
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    shown = (
        f" {key}" if value is True else f' {key}="{_escaped(value)}"'
        for key, value in pairs
        if value is not None and value is not False
    )
    start = f"<{name}{''.join(shown)}>"
    return Markup(start if name in _WITHOUT_END else f"{start}{join(children)}</{name}>")


def join(children: object) -> Markup:
    """Return children one after the other, escaped where they are no Markup."""
    assert isinstance(children, (list, tuple))
    return Markup("".join(child if isinstance(child, Markup) else _escaped(child) for child in children))


def _escaped(value: object) -> str:
    from html import escape  # when something is drawn: programs that draw nothing do not wait for it

    return escape(str(value))
