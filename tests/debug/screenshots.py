"""The pictures of the report in docs/: `python -m tests.debug.screenshots` makes them again."""

import sys
import tempfile
from pathlib import Path

from shardwise import init_device_mesh, simulate
from shardwise.debug import report
from tests.debug.browser import browser, problems, screenshot, use_scheme

ROOT = Path(__file__).parents[2]


def write_page(path: Path) -> None:
    """The report of one training step of the GPT of the examples."""
    sys.path.insert(0, str(ROOT / "examples"))
    import inspected

    with simulate(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        report(inspected.one_step(mesh), path, title="GPT: one training step")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser(1280, 1240) as driver:
        page = Path(folder) / "page.html"
        write_page(page)
        driver.get(page.as_uri())
        for scheme, section, name in (
            ("light", "overview", "report.png"),
            ("dark", "communication", "report_dark.png"),
        ):
            use_scheme(driver, scheme)
            driver.execute_script("document.getElementById(arguments[0]).scrollIntoView()", section)
            screenshot(driver, ROOT / "docs" / name)
        assert not problems(driver)


if __name__ == "__main__":
    main()
