"""What is asked of ``unlearn apply``, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Application:
    """What to unlearn from what, and how.

    What ``model`` and the folders or files of samples may be is up to the kinds of
    :class:`common.protocol.subject.Subject`.

    Attributes:
        model: The trained model.
        forget: What to forget.
        method: Registered method.
        out: Folder to make; must not exist or be empty.
        retain: What to keep, in the form of ``forget``; needed by methods that read it.
        test: What the model never saw, in the form of ``forget``; for the statement only.
        preset: Named overrides of the method.
        params: ``key.sub=value`` overrides of the method's config.
        seed: Of the run.
        options: Settings of one kind of subject, named in its ``options``.
        device: Torch device name; ``auto`` takes the first accelerator.
        threads: Torch threads.
    """

    model: Path
    forget: Path
    method: str
    out: Path
    retain: Path | None = None
    test: Path | None = None
    preset: str | None = None
    params: tuple[str, ...] = ()
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    threads: int = 1

    @property
    def given(self) -> dict[str, Path]:
        """Role (``forget``, ``retain``, ``test``) -> path, of the roles that are given."""
        paths = {"forget": self.forget, "retain": self.retain, "test": self.test}
        return {role: path for role, path in paths.items() if path is not None}


@dataclass(frozen=True)
class AppliedResult:
    """What became of an application.

    Attributes:
        status: ``ok``; or ``diverged``: then ``out`` holds the statement and no model.
        out: The folder that was written.
        statement: The content of ``statement.json``.
        message: One line for people.
    """

    status: str
    out: Path
    statement: Mapping[str, Any]
    message: str
