"""``submit(fn, *args) -> Future`` for existing engines: in-process, process pool, Ray."""

from __future__ import annotations

import ctypes
import functools
import logging
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

from stable_forgetting.benchmarks.suite.suite import Resources
from stable_forgetting.common.base import processes, stopping
from stable_forgetting.common.base.errors import ConfigError, system_line
from stable_forgetting.common.base.registry import load_plugins

logger = logging.getLogger(__name__)
GB = 10**9
GRACE = 60.0
"""Seconds that workers have to write a checkpoint when a run is interrupted."""
DEVICES = Path("/dev")
NAMES = ("auto", "inline", "processes", "ray")


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


class RayExecutor(Executor):
    """Runs each task as a Ray task; Ray decides where, and starts a killed one again."""

    def __init__(self, workers: int, setup: tuple[Any, ...], resources: Resources | None = None):
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "executor ray: Ray is not installed; pip install 'stable-forgetting[ray]'"
            ) from None
        self._ray: Any = ray
        self._setup = setup
        self._resources = resources or Resources()
        if not ray.is_initialized():
            _join(ray, workers)

    def placing(self, resources: Resources) -> RayExecutor:
        """The same cluster, for tasks that need something else."""
        return RayExecutor(0, self._setup, resources)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submits ``fn``; the future has its error as it was raised."""
        setup, future = self._setup, Future[Any]()
        future.set_running_or_notify_cancel()

        def call() -> Any:
            prepare_worker(*setup)
            return fn(*args, **kwargs)

        def finish(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                future.set_result(done.result())
            else:  # Ray's own has a traceback for its text
                future.set_exception(getattr(error, "cause", None) or error)

        needs = _whole(self._ray, self._resources)
        _warn_of_waiting(self._ray, needs)
        options = {"num_cpus": needs.cpus, "num_gpus": needs.gpus, "memory": int(needs.memory * GB)}
        self._ray.remote(**options)(call).remote().future().add_done_callback(finish)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leaves the cluster."""
        self._ray.shutdown()


def _join(ray: Any, workers: int) -> None:
    """Joins the cluster that ``RAY_ADDRESS`` names, or starts one of this machine alone."""
    address = os.environ.get("RAY_ADDRESS")
    where = {} if address else {"address": "local", "num_cpus": workers, "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **where)
    except Exception as error:  # Ray raises that itself
        cluster = f"RAY_ADDRESS={address}" if address else "a cluster of this machine"
        raise ConfigError(f"executor ray: {cluster}: {error}; is it there and not busy?") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's own ends the process without a checkpoint


def _whole(ray: Any, needs: Resources) -> Resources:
    """Where nothing is said of GPUs, a task takes one if the cluster has any."""
    if needs.gpus is not None:
        return needs
    has = any(node["Resources"].get("GPU") for node in ray.nodes() if node["Alive"])
    return needs.model_copy(update={"gpus": float(has)})


@functools.cache
def _warn_of_waiting(ray: Any, needs: Resources) -> None:
    """One line where no machine of the cluster has what tasks need: Ray waits for one."""
    wanted = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": needs.memory * GB}
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(has.get(name, 0) >= much for name, much in wanted.items()) for has in machines):
        logger.warning(
            "Ray has no machine with %g CPUs, %g GPUs and %g GB; it waits for one",
            *(needs.cpus, needs.gpus, needs.memory),
        )


def placed(executor: Executor, resources: Resources) -> Executor:
    """An executor for tasks with needs: Ray goes by them, other executors have one machine."""
    return executor.placing(resources) if isinstance(executor, RayExecutor) else executor


class WorkerPool(Executor):
    """Runs tasks in processes of its own, which start with the first task.

    Args:
        workers: How many processes.
        setup: What :func:`prepare_worker` takes.
        cards: Each process sees the next of these alone, and the first again after the last.
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
        """Asks the processes to end: a training writes a checkpoint first."""
        workers = list((self._pool._processes or {}).values())
        manager = getattr(self._pool, "_executor_manager_thread", None)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in workers:
            process.terminate()
        limit = time.monotonic() + GRACE
        for process in workers:
            process.join(max(0.0, limit - time.monotonic()))
            if process.is_alive():
                process.kill()
        if manager is not None:  # at its exit Python would write to a pipe that this thread closes
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
    """The NVIDIA cards over which workers are spread, found without torch; none for one device."""
    if device not in ("auto", "cuda"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return sorted(path.name.removeprefix("nvidia") for path in DEVICES.glob("nvidia[0-9]*"))


def prepare_worker(threads: int, plugins: tuple[str, ...], parent: int | None = None) -> None:
    """Makes a fresh process like the parent: registrations, plugins, threads, quiet signals.

    Args:
        threads: Of torch.
        plugins: Files to import.
        parent: Process without which this one must not live; absent for the parent itself.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if parent is not None:
        stopping.obey_parent()
        _die_with(parent)
    from stable_forgetting import benchmarks  # noqa: F401 - registers
    from stable_forgetting.common.base.seeding import make_deterministic

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
    name: str, workers: int, threads: int, plugins: tuple[str, ...], cards: Sequence[str] = ()
) -> Iterator[Executor]:
    """One executor for all that is run; an interruption stops its workers."""
    executor = make_executor(name, workers, threads, plugins, cards)
    try:
        yield executor
    except BaseException:
        if isinstance(executor, WorkerPool):
            executor.abandon()
        else:
            executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def make_executor(
    name: str, workers: int, threads: int, plugins: tuple[str, ...], cards: Sequence[str] = ()
) -> Executor:
    """An executor by name; ``auto`` is inline for one worker and a process pool for more.

    Under a launcher of several processes all of them do one stage after the other.
    """
    if name not in NAMES:
        raise ConfigError(f"unknown executor '{name}'; known: {', '.join(NAMES)}")
    if processes.count() > 1:
        if name not in ("auto", "inline"):
            raise ConfigError(
                f"executor {name}: {processes.count()} launched processes share every stage; "
                "leave --executor out"
            )
        name = "inline"
    if name == "auto":
        name = "inline" if workers <= 1 else "processes"
    if name == "ray":
        return RayExecutor(workers, (threads, plugins))
    if name == "inline":
        return InlineExecutor((threads, plugins))
    return WorkerPool(workers, (threads, plugins), cards)
