"""The page in a browser: no errors, no requests, sorting and filtering, by mouse and by keyboard, light and dark."""

import itertools
import struct

import pytest
import torch
from torch import nn

from shardwise import P, distribute_tensor
from shardwise.debug import report
from tests.debug.browser import browser, problems, requested, screenshot, use_scheme
from tests.debug.test_report import AXES, sharded
from tests.worlds import mesh_of

ATTACK = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page in a browser, and its driver."""
    path = tmp_path_factory.mktemp("report") / "page.html"
    with browser() as driver:
        with mesh_of(2, 2, names=AXES) as mesh:
            model = sharded(mesh)
            model.register_buffer(ATTACK, torch.zeros(5))
            x = distribute_tensor(torch.randn(8, 16), mesh, P("dp"))

            def step():
                model(x).square().mean().backward()
                return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

            report(step, path, title=ATTACK)
        driver.get(path.as_uri())
        yield driver


@pytest.fixture
def fresh(page):
    page.refresh()
    return page


def run(driver, script, *arguments):
    return driver.execute_script(script, *arguments)


def column(driver, table, number):
    script = """return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].filter((row) => !row.hidden)
                .map((row) => row.cells[arguments[1]].dataset.value ?? row.cells[arguments[1]].textContent)"""
    return run(driver, script, table, number)


def head(driver, table, number):
    return driver.find_elements("css selector", f"#{table} thead th")[number]


def test_it_loads_without_errors_and_requests(fresh):
    requested(fresh)
    fresh.refresh()
    assert problems(fresh) == []
    assert [address.partition("?")[0].rpartition("/")[2] for address in requested(fresh)] in (
        ["page.html"],
        ["page.html", ","],  # the empty icon
    )
    assert fresh.find_elements("css selector", "img") == []  # names are text
    assert ATTACK in fresh.title


def test_columns_sort_in_both_directions(fresh):
    button = head(fresh, "parameter-table", 4).find_element("css selector", "button")
    before = column(fresh, "parameter-table", 4)
    button.click()
    sizes = [float(value) for value in column(fresh, "parameter-table", 4)]
    assert sizes == sorted(map(float, before), reverse=True) != list(map(float, before))
    assert head(fresh, "parameter-table", 4).get_attribute("aria-sort") == "descending"
    button.click()
    assert [float(value) for value in column(fresh, "parameter-table", 4)] == sorted(sizes)
    assert head(fresh, "parameter-table", 4).get_attribute("aria-sort") == "ascending"


def test_the_keyboard_sorts_too(fresh):
    button = head(fresh, "parameter-table", 0).find_element("css selector", "button")
    button.send_keys("\ue007")  # Enter
    names = column(fresh, "parameter-table", 0)
    assert names == sorted(names)
    assert head(fresh, "parameter-table", 0).get_attribute("aria-sort") == "ascending"
    assert head(fresh, "parameter-table", 4).get_attribute("aria-sort") == "none"
    assert run(fresh, "return document.activeElement.textContent") == "name"
    assert run(fresh, "return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_rows_are_filtered_by_all_words(fresh):
    everything = column(fresh, "parameter-table", 0)
    box = fresh.find_element("id", "parameters-filter")
    box.send_keys("LAYERS.0 bias")
    assert column(fresh, "parameter-table", 0) == ["layers.0.0.bias", "layers.0.1.bias"]
    count = fresh.find_element("css selector", "#parameters output").text
    assert count == f"2 of {len(everything)}"
    box.send_keys("\ue00c")  # Escape
    assert column(fresh, "parameter-table", 0) == everything


def test_totals_change_by_the_arrow_keys(fresh):
    def visible():
        return [t.get_attribute("id") for t in fresh.find_elements("css selector", "[data-group]:not([hidden]) table")]

    assert visible() == ["by-line-table"]
    fresh.find_element("css selector", "input[value=line]").send_keys("\ue014")  # right
    assert visible() == ["by-module-table"]
    assert "MLP" in column(fresh, "by-module-table", 0)
    fresh.find_element("css selector", "input[value=module]").send_keys("\ue014")
    assert visible() == ["by-axis-table"]
    assert "tp" in column(fresh, "by-axis-table", 0)
    assert "dp" in column(fresh, "by-axis-table", 0)
    fresh.find_element("id", "communication-filter").send_keys("tp")
    assert {"tp" in name for name in column(fresh, "by-axis-table", 0)} == {True}


def test_a_link_opens_its_explanation(fresh):
    link = fresh.find_element("css selector", "#collective-table a")
    target = link.get_attribute("href").rpartition("#")[2]
    run(fresh, "arguments[0].click()", link)
    run(fresh, "return new Promise((done) => setTimeout(done, 0))")
    assert run(fresh, "return document.getElementById(arguments[0]).open", target)
    assert run(fresh, "return document.activeElement.tagName") == "SUMMARY"


def test_the_timeline_is_drawn_and_moved_by_keys(fresh):
    def drawn():
        return len(fresh.find_elements("css selector", "#timeline-drawing rect.span"))

    ranks = [element.text for element in fresh.find_elements("css selector", "#timeline-drawing text.rank")]
    assert ranks == ["rank 0", "rank 1", "rank 2", "rank 3"]
    everything = drawn()
    svg = fresh.find_element("css selector", "#timeline-drawing svg")
    svg.send_keys("++++")
    assert drawn() != everything
    svg.send_keys("0")
    assert drawn() == everything
    svg.send_keys("\ue015\ue015")  # down, twice
    assert " over " in fresh.find_element("id", "timeline-text").text
    assert len(fresh.find_elements("css selector", "rect.selected")) == 1
    first = fresh.find_element("css selector", "rect.selected").get_attribute("data-span")
    svg.send_keys("\ue013")  # up
    assert fresh.find_element("css selector", "rect.selected").get_attribute("data-span") != first
    span = "document.querySelector('#timeline-drawing rect.span')"
    run(fresh, f"{span}.dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}}))")
    assert fresh.find_element("id", "timeline-text").text.startswith("Rank 0: ")
    assert problems(fresh) == []


CONTRAST = """
const light = (text) => {
  const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const ground = light(getComputedStyle(document.querySelector("section")).backgroundColor);
return ["h2", "dt", "p.lead", "table.data td", "thead button", ".count"].map((name) => {
  const text = light(getComputedStyle(document.querySelector(name)).color);
  return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
});
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_pages_can_be_read(fresh, scheme, tmp_path):
    use_scheme(fresh, scheme)
    ground = run(fresh, "return getComputedStyle(document.body).backgroundColor")
    assert (int(ground.split("(")[1].split(",")[0]) > 128) == (scheme == "light")
    assert min(run(fresh, CONTRAST)) >= 4.5  # the least that WCAG asks for
    screenshot(fresh, tmp_path / "page.png")
    width, height = struct.unpack(">II", (tmp_path / "page.png").read_bytes()[16:24])
    assert width >= 1000
    assert height >= 500


def test_a_narrow_window_does_not_scroll_sideways(fresh):
    size = fresh.get_window_size()
    fresh.set_window_size(500, 800)
    try:
        assert run(fresh, "return document.documentElement.scrollWidth <= innerWidth")
    finally:
        fresh.set_window_size(size["width"], size["height"])


def test_everything_has_a_name_for_screen_readers(fresh):
    script = """return [...document.querySelectorAll("button, input, [role=region], svg, table")].filter((element) =>
        !(element.textContent.trim() || element.getAttribute("aria-label") || element.labels?.length)).length"""
    assert run(fresh, script) == 0
    assert run(fresh, "return document.documentElement.lang") == "en"
    levels = run(fresh, "return [...document.querySelectorAll('h1, h2, h3')].map((head) => Number(head.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
