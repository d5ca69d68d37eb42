"""A line of progress: on terminals alone, and only for what takes long."""

import io
import threading

from shardwise.commands.progress import Progress


class Terminal(io.StringIO):
    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def isatty(self):
        return True

    def write(self, text):
        self.written.set()
        return super().write(text)


def test_a_terminal_shows_the_last_label_and_is_cleared():
    terminal = Terminal()
    with Progress("first", terminal, patience=0.0) as progress:
        progress("second")
        assert terminal.written.wait(60)
    assert "second" in terminal.getvalue() or "first" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K")


def test_quick_work_shows_nothing():
    terminal = Terminal()
    with Progress("work", terminal, patience=3600.0):
        pass
    assert terminal.getvalue() == ""


def test_nothing_is_written_to_a_file():
    stream = io.StringIO()
    with Progress("work", stream, patience=0.0):
        pass
    assert stream.getvalue() == ""
