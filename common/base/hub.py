"""The hub: names of repositories, what is fetched of them, and what is uploaded.

The client is quiet, and without its minute of retries where there is no network.  No code that
lies in a repository is ever run.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.errors import CheckpointError, ConfigError, one_line

HOST = "huggingface.co"
STAND_INS = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT")
MARK = "hf-hub:"
"""What timm puts before the name of a repository; it is taken before any of them."""

_NAME = re.compile(rf"(?:{MARK})?([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")

_FILES = (".safetensors", ".pth", ".pt", ".bin", ".jsonl", ".json", ".gz")


def prepare_client() -> None:
    """Silences the client's reports of retries; without a network only its cache is asked."""
    for name in ("huggingface_hub", "datasets", "httpx", "timm.models", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not resolvable():
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = True
        loaded = sys.modules.get("datasets.config")  # it asks the client once, when it is imported
        if loaded is not None:
            loaded.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def resolvable() -> bool:
    """False only if the hub's name cannot be resolved and no proxy or mirror stands in for it."""
    if any(os.environ.get(name) for name in STAND_INS):
        return True
    try:
        socket.getaddrinfo(HOST, 443)
    except OSError:
        return False
    return True


def is_repository(name: str | Path) -> bool:
    """Whether a name is one of the hub: OWNER/NAME, unless that is or may be a file or folder."""
    local = Path(name).exists() or str(name).endswith(_FILES)
    return _NAME.fullmatch(str(name)) is not None and (str(name).startswith(MARK) or not local)


def parsed(name: str | Path) -> tuple[str, str | None]:
    """OWNER/NAME and the revision of a name of the hub, ``hf-hub:OWNER/NAME@REVISION``."""
    found = _NAME.fullmatch(str(name))
    assert found is not None, f"{name}: see is_repository"
    return found[1], found[2]


def fetch(name: str | Path, patterns: Sequence[str]) -> Path:
    """The folder of a repository's files, from the hub or its cache; its name is the commit.

    Raises:
        CheckpointError: They cannot be fetched.
    """
    prepare_client()
    from huggingface_hub import snapshot_download

    repository, revision = parsed(name)
    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=[*patterns])
    except Exception as error:  # hub clients raise many unrelated types without a network
        raise CheckpointError(
            f"{name}: no such folder, and it cannot be fetched from the hub ({one_line(error)}); "
            "give a folder, or run on a machine with a network"
        ) from None
    return Path(folder)


def check_push(name: str) -> None:
    """What can be refused before anything is uploaded.

    Raises:
        ConfigError: The name is not one of the hub, or nobody is logged in.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"push: '{name}' is no name of the hub; give OWNER/NAME")
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError("push: nobody is logged in to the hub; run hf auth login or set HF_TOKEN")


def push(
    folder: Path, name: str, kind: str = "model", *, instead: Mapping[str, bytes] | None = None
) -> str:
    """Uploads a folder; a repository that is not there yet is made, and is private.

    Args:
        name: OWNER/NAME, with or without a revision.
        kind: ``model`` or ``dataset``.
        instead: File of the folder -> what is uploaded in its place.

    Raises:
        ConfigError: See :func:`check_push`.
        CheckpointError: The hub refuses it, or cannot be reached.
    """
    check_push(name)
    prepare_client()
    from huggingface_hub import HfApi

    repository, revision = parsed(name)
    where: dict[str, Any] = {"repo_id": repository, "repo_type": kind}
    try:
        hub = HfApi()
        address = hub.create_repo(**where, private=True, exist_ok=True)
        where["revision"] = revision
        hub.upload_folder(**where, folder_path=folder, ignore_patterns=[*(instead or {})])
        for file, content in (instead or {}).items():
            hub.upload_file(**where, path_in_repo=file, path_or_fileobj=content)
    except Exception as error:  # as above
        raise CheckpointError(
            f"{folder}: is complete and could not be uploaded ({one_line(error)}); run "
            f"hf upload {repository} {folder} --repo-type {kind}"
        ) from None
    return str(address)
