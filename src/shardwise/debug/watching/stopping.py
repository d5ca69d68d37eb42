"""Raise an error in another thread, be it in Python, asleep, or inside a collective that will never end.

In the main thread a signal handler raises the error, also in calls that a signal interrupts. In other threads Python
raises it at the next bytecode. To end collectives, the groups are aborted; gloo has no abort, so its connections are
shut down, and the calls that wait for them raise.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Container, Iterator
from types import FrameType

from ..._torch.watching import abort_group, all_groups

_SIGNAL = signal.SIGURG
"""A signal that does nothing unless it is handled, and that other programs hardly use."""


class Stopper:
    """Raises an error in the thread that created it. `error` returns the error; it is called in that thread.

    Nothing is raised inside the modules named in `quiet`, which look for the error themselves.
    """

    def __init__(self, error: Callable[[], BaseException | None], quiet: Container[str]) -> None:
        self.thread = threading.get_ident()
        self._error, self._quiet = error, quiet
        self._handles = threading.current_thread() is threading.main_thread()
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        if self._handles:
            self._before = signal.signal(_SIGNAL, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_globals.get("__name__") in self._quiet:
                return
            frame = frame.f_back
        error = self._error()
        if error is not None:
            raise error

    def interrupt(self) -> None:
        """Raise the error in the thread as soon as it runs Python code or sleeps."""
        if self._handles:
            signal.pthread_kill(self.thread, _SIGNAL)
            return
        error = self._error()
        if error is not None:
            kind = type(type(error).__name__, (type(error),), {"__init__": lambda self: _fill(self, error)})
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(kind))

    def restore(self) -> None:
        """Put the handler of the signal back. In the main thread only."""
        if self._handles and signal.getsignal(_SIGNAL) == self._raise:
            signal.signal(_SIGNAL, self._before if self._before is not None else signal.SIG_DFL)
            self._handles = False


def _fill(error: BaseException, like: BaseException) -> None:
    error.args = like.args
    error.__dict__.update(like.__dict__)


def end_collectives(but_port: int | None) -> None:
    """Make all running and later collectives raise. Connections of the store, at `but_port`, stay open."""
    for group in all_groups():
        with contextlib.suppress(Exception):  # a backend without abort, or a group that has ended
            abort_group(group)
    for connection in gloo_connections(but_port):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def gloo_connections(but_port: int | None) -> Iterator[socket.socket]:
    """Yield duplicates of the sockets of gloo's connections. On systems other than Linux it finds none.

    Each gloo device has a thread that polls one listening socket and the connections to all peers. So has the server
    of the store, which is recognized by its port.
    """
    for polled in _polled():
        sockets = [found for found in map(_internet_socket, polled) if found is not None]
        listening = [s.getsockname()[1] for s in sockets if _is_listening(s)]
        for each in sockets:
            if listening and but_port not in listening and not _is_listening(each):
                yield each
            else:
                each.close()


def _polled() -> Iterator[list[int]]:
    """Yield, for each epoll instance of this process, the file descriptors that it polls."""
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "eventpoll" in os.readlink(f"/proc/self/fd/{fd}"):
                    with open(f"/proc/self/fdinfo/{fd}") as file:
                        yield [int(line.split()[1]) for line in file if line.startswith("tfd:")]


def _internet_socket(fd: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            found = socket.socket(fileno=os.dup(fd))
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                return found
            found.close()
    return None


def _is_listening(found: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False
