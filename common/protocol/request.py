"""What is asked of ``unlearn apply``, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.base.errors import ConfigError

Modality = Literal["images", "text"]

TEXT_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
IMAGE_OPTIONS = ("arch", "num_classes")
TEXT_OPTIONS = ("template", "max_length")


@dataclass(frozen=True)
class ApplyRequest:
    """What to unlearn from what, and how.

    Attributes:
        model: Images: folder with ``model.safetensors`` and ``config.json`` as timm writes them
            for the hub, or a ``.safetensors`` file together with ``arch`` and ``num_classes``.
            Text: folder of a Hugging Face causal language model (``config.json``, safetensors,
            tokenizer), or a hub id.
        forget: What to forget: images in class subfolders; or a JSON-lines file of rows with
            ``question`` and ``answer``, or with ``text``.
        method: Registered method.
        out: Folder to make; must not exist or be empty.
        retain: What to keep, in the form of ``forget``; needed by methods that read it.
        test: What the model never saw, in the form of ``forget``; for the audit only.
        preset: Named overrides of the method.
        params: ``key.sub=value`` overrides of the method's config.
        seed: Of the run.
        arch: Images: timm's name, for a bare file.
        num_classes: Images: number of classes, for a bare file.
        template: Text: how a question becomes a prompt; question_answer when absent.
        max_length: Text: longest row in tokens; the model's context, at most 1024, when absent.
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
    arch: str | None = None
    num_classes: int | None = None
    template: str | None = None
    max_length: int | None = None
    device: str = "auto"
    threads: int = 1

    @property
    def modality(self) -> Modality:
        """``text`` where ``forget`` is a JSON-lines file, ``images`` where it is a folder.

        Raises:
            ConfigError: It is neither, or an option of the other one is given.
        """
        text = not self.forget.is_dir() and self.forget.name.lower().endswith(TEXT_SUFFIXES)
        if not text and self.forget.is_file():
            raise ConfigError(
                f"forget: {self.forget}: give a folder of images (CLASS/x.png) or a .jsonl file "
                "of texts"
            )
        for option in IMAGE_OPTIONS if text else TEXT_OPTIONS:
            if getattr(self, option) is not None:
                kind, other = ("texts", "images") if text else ("images", "texts")
                raise ConfigError(f"{option} is for {other}, and forget holds {kind}; leave it out")
        return "text" if text else "images"

    @property
    def given(self) -> dict[str, Path]:
        """Role (``forget``, ``retain``, ``test``) -> path, of the roles that are given."""
        paths = {"forget": self.forget, "retain": self.retain, "test": self.test}
        return {role: path for role, path in paths.items() if path is not None}


@dataclass(frozen=True)
class AppliedResult:
    """What became of a request.

    Attributes:
        status: ``ok``; or ``diverged``: then ``out`` holds the audit and no model.
        out: The folder that was written.
        audit: The content of ``audit.json``.
        message: One line for people.
    """

    status: str
    out: Path
    audit: Mapping[str, Any]
    message: str
