"""A headless Chromium for tests of pages; tests that want one skip where it is missing."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--new-window",
    "about:blank",
)


@contextmanager
def browser(width: int = 1280, height: int = 1000) -> Iterator[Any]:
    """A driver of Chromium, with a new profile."""
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.common.exceptions import WebDriverException

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium and chromium-driver are not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = program
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        try:
            found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        except WebDriverException as error:
            pytest.skip(f"chromium does not start on this machine: {error.msg}")
        try:
            found.get("about:blank")
            requested(found)  # what the browser itself has loaded
            yield found
        finally:
            found.quit()


def use_scheme(driver: Any, scheme: str) -> None:
    """Prefer a light or a dark page."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def problems(driver: Any) -> list[str]:
    """What the console says since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requested(driver: Any) -> list[str]:
    """The addresses that were requested since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [message["params"]["request"]["url"] for message in sent]


def screenshot(driver: Any, path: Path, *, whole: bool = False) -> None:
    """Write a picture of the window, or of the whole page."""
    if whole:
        height = driver.execute_script("return document.documentElement.scrollHeight")
        driver.set_window_size(driver.get_window_size()["width"], height + 150)
    driver.save_screenshot(str(path))
