"""The list of PyTorch's tests that fail under take-over for a reason, and its page."""

from collections import Counter

import pytest

from tests.dropin.pytorch_tests import exemptions, page
from tests.dropin.pytorch_tests.exemptions import Reason


def test_every_exempt_test_is_on_the_page():
    text = page.PAGE.read_text()
    missing = [
        name
        for reason in exemptions.exemptions()
        for name in reason.tests
        if page.short_name(name.partition("::")[2]) not in text
    ]
    assert not missing, "run `python -m tests.dropin.pytorch_tests CHECKOUT FILE --write`"


def test_a_test_listed_twice_is_an_error(tmp_path, monkeypatch):
    file = tmp_path / "exempt.txt"
    file.write_text("[errors] Words.\na.py::A.test_b: x\na.py::A.test_b: y\n")
    monkeypatch.setattr(exemptions, "FILE", file)
    with pytest.raises(ValueError, match="line 3"):
        exemptions.exemptions()


def test_a_class_or_a_file_may_be_exempt():
    reasons = [
        Reason("private", "Parts.", {"a.py::A.*": "", "b.py::*": ""}),
        Reason("errors", "", {"a.py::B.test_c": ""}),
    ]
    found = [exemptions.reason_of(name, reasons) for name in ("a.py::A.test_b", "a.py::B.test_b", "b.py::B.test_b")]
    assert found == ["private", None, "private"]
    assert exemptions.reason_of("a.py::B.test_c", reasons) == "errors"
    assert [page.short_name(name) for name in ("A.test_b", "A.*", "*")] == ["`test_b`", "`A.*`", "`*`"]


def test_rows_of_files_that_were_not_run_stay_on_the_page(tmp_path, monkeypatch):
    file = tmp_path / "page.md"
    file.write_text(f"# Page\n{page.BEGIN}\n{page.END}\nThe end.\n")
    monkeypatch.setattr(page, "PAGE", file)
    reasons = [Reason("errors", "Words.", {"a.py::A.test_b": "other words"})]
    page.write_page({"a.py": Counter(ok=3, errors=1)}, reasons)
    page.write_page({"b.py": Counter(ok=2, skip=5)}, reasons)
    text = file.read_text()
    assert "| a.py | 4 | 3 |  | 1 |  |" in text
    assert "| total | 11 | 5 | 5 | 1 |  |" in text
    assert "- a.py: `test_b` (other words)" in text
    assert text.endswith("The end.\n")
