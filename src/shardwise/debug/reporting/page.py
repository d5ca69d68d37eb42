"""The page: sections put into page.html, with page.css and page.js, so that it is one file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from ..drawing.markup import Markup, tag


def page_html(title: str, subtitle: str, sections: Mapping[str, Markup]) -> str:
    """Return the page with these sections, by their titles."""
    identifiers = {name: name.lower().replace(" ", "-") for name in sections}
    links = [tag("li", tag("a", name, href=f"#{identifiers[name]}")) for name in sections]
    bodies = [
        tag("section", tag("h2", name, id=f"{key}-title"), sections[name], id=key, aria_labelledby=f"{key}-title")
        for name, key in identifiers.items()
    ]
    parts = {
        "title": tag("span", title),
        "subtitle": tag("span", subtitle),
        "style": _file("page.css"),
        "links": "".join(links),
        "sections": "".join(bodies),
        "script": _file("page.js"),
    }
    page = _file("page.html")
    before, *rest = page.split("{{")
    pieces = [before]
    for piece in rest:  # one pass, so that inserted text is not searched for {{names}}
        name, _, after = piece.partition("}}")
        pieces += [_plain(title) if name == "name" else parts[name], after]
    return "".join(pieces)


def _plain(text: str) -> str:
    return tag("title", text).removeprefix("<title>").removesuffix("</title>")


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
