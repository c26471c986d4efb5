"""``submit(fn, *args) -> Future``: in this process, or in a pool of processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stable_forgetting.common.base import processes, stopping
from stable_forgetting.common.base.errors import system_line
from stable_forgetting.common.base.registry import load_plugins
from stable_forgetting.common.base.seeding import make_deterministic

GRACE = 60.0
"""Seconds that workers have to write a checkpoint when a run is interrupted."""
DEVICES = Path("/dev")


class InlineExecutor(Executor):
    """Runs each task at once, in this process, which is prepared for the first one."""

    def __init__(self, setup: tuple[Any, ...] | None = None):
        self._setup = setup

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs ``fn`` and returns a finished future."""
        if self._setup is not None:
            prepare_worker(*self._setup)
            self._setup = None
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class WorkerPool(Executor):
    """Runs tasks in processes of its own, which start with the first task.

    ``setup`` is what :func:`prepare_worker` takes.  Each process sees the next of the ``cards``
    alone, and the first again after the last.
    """

    def __init__(self, workers: int, setup: tuple[Any, ...], cards: Sequence[str] = ()):
        self._workers, self._setup, self._cards = workers, (*setup, os.getpid()), cards
        self._pool = self._fresh()

    def _fresh(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        places = context.SimpleQueue()
        for place in range(self._workers if self._cards else 0):
            places.put(self._cards[place % len(self._cards)])
        return ProcessPoolExecutor(
            self._workers,
            mp_context=context,
            initializer=_prepare_on,
            initargs=(places if self._cards else None, *self._setup),
        )

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs ``fn`` in the next free process."""
        return self._pool.submit(_until_stopped, fn, *args, **kwargs)

    def renew(self) -> None:
        """Replaces the processes after the death of one."""
        self._pool.shutdown()
        self._pool = self._fresh()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the processes."""
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def abandon(self) -> None:
        """Asks the processes to end: a training writes a checkpoint first.

        A second signal, which is raised while this one waits, ends them at once.
        """
        workers = list((self._pool._processes or {}).values())
        manager = getattr(self._pool, "_executor_manager_thread", None)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in workers:
            process.terminate()
        limit = time.monotonic() + GRACE
        try:
            for process in workers:
                process.join(max(0.0, limit - time.monotonic()))
        finally:
            for process in workers:
                if process.is_alive():
                    process.kill()
            if manager is not None:  # at its exit Python would write to a pipe that it closes
                manager.join(GRACE)


def _until_stopped(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A worker that was asked to end takes no further task."""
    try:
        return fn(*args, **kwargs)
    except stopping.Stopped:
        os._exit(stopping.exit_code())


def _prepare_on(places: Any, *setup: Any) -> None:
    """Takes a card before anything asks for one, and prepares the process."""
    if places is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = places.get()
    prepare_worker(*setup)


def cards_of(device: str) -> list[str]:
    """The NVIDIA cards over which workers are spread, found without torch; none for one device.

    CUDA numbers the cards that it sees from 0, also where a container has one with a higher number.
    """
    if device not in ("auto", "cuda"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(DEVICES.glob("nvidia[0-9]*"))]


def prepare_worker(threads: int, plugins: tuple[str, ...], parent: int | None = None) -> None:
    """Makes a fresh process like the ``parent``, without which it must not live.

    It gets registrations, plugins, threads and quiet signals.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if parent is not None:
        stopping.obey_parent()
        _die_with(parent)
    from stable_forgetting import benchmarks  # noqa: F401 - registers

    threading.excepthook = _end_of_thread
    load_plugins(plugins)
    make_deterministic(threads)
    _keep_freed_memory()


def _end_of_thread(ended: threading.ExceptHookArgs) -> None:
    """TensorBoard writes from a thread: a full disk is reported by whoever waits for it."""
    if ended.exc_value is None or system_line(ended.exc_value) is None:
        threading.__excepthook__(ended)


def _die_with(parent: int) -> None:
    """On Linux a worker does not outlive a killed parent, not even one that is gone already."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _keep_freed_memory() -> None:
    """Under glibc freed blocks up to 32 MB stay with the process, 256 MB at most.

    A small training frees and takes back megabytes at every operation; handing each to the kernel
    and back costs page faults, 4 to 12 % of all CPU time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_trim_threshold, 256 << 20)
        mallopt(m_mmap_threshold, 32 << 20)


@contextmanager
def executing(
    workers: int, threads: int, plugins: tuple[str, ...], cards: Sequence[str] = ()
) -> Iterator[Executor]:
    """One executor for all that is run: one worker works in this process, more in a pool.

    An interruption stops the workers.  Under a launcher of several processes all of them do one
    stage after the other.
    """
    executor: Executor
    if workers <= 1 or processes.count() > 1:
        executor = InlineExecutor((threads, plugins))
    else:
        executor = WorkerPool(workers, (threads, plugins), cards)
    try:
        yield executor
    except BaseException:
        if isinstance(executor, WorkerPool):
            executor.abandon()
        raise
    executor.shutdown()
