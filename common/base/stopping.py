"""Being asked to end, by Ctrl-C or by a scheduler: a training writes a checkpoint first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stable_forgetting.common.base import processes

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""


class _State:
    """What was asked of this process."""

    number: int | None = None
    deferring = False
    worker = False


def _handle(number: int, frame: FrameType | None) -> None:
    first, _State.number = _State.number is None, _State.number or number
    if _State.deferring and (first or _State.worker):
        return
    if _State.worker:
        os._exit(exit_code())
    raise Stopped


def _listen() -> dict[int, object]:
    """Handlers for the signals that nobody else handles or ignores; the old ones."""
    free = (signal.SIG_DFL, signal.default_int_handler)
    old: dict[int, object] = {}
    for name in _NAMES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) in free:
            old[number] = signal.signal(number, _handle)
    return old


@contextmanager
def listening() -> Iterator[None]:
    """A signal raises :class:`Stopped` inside, in a training once its checkpoint is written.

    Under a launcher of several processes everything stays as the launcher expects it.
    """
    _State.number = None
    if processes.count() > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    old = _listen()
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def obey_parent() -> None:
    """For a worker process: Ctrl-C is its parent's business, any other signal ends it."""
    _State.worker = True
    _listen()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def deferred() -> Iterator[None]:
    """Signals wait inside, until :func:`asked` is heard; at the latest until the end."""
    if processes.count() > 1:  # the others would wait for this one's part of a step
        yield
        return
    _State.number, _State.deferring = None, True
    try:
        yield
    finally:
        _State.deferring = False
    if asked():
        raise Stopped


def asked() -> bool:
    """Whether this process was asked to end."""
    return _State.number is not None


def exit_code() -> int:
    """What a shell makes of the signal that ended a process."""
    return 128 + (_State.number or signal.SIGINT)
