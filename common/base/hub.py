"""Preparing the hub client: quiet, and without its minute of retries where there is no network."""

from __future__ import annotations

import importlib
import logging
import os
import socket

HOST = "huggingface.co"
STAND_INS = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT")


def prepare_client() -> None:
    """Silences the client's reports of retries; without a network only its cache is asked."""
    for name in ("huggingface_hub", "datasets", "httpx", "timm.models", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not resolvable():
        for module in ("huggingface_hub.constants", "datasets.config"):
            importlib.import_module(module).HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def resolvable() -> bool:
    """False only if the hub's name cannot be resolved and no proxy or mirror stands in for it."""
    if any(os.environ.get(name) for name in STAND_INS):
        return True
    try:
        socket.getaddrinfo(HOST, 443)
    except OSError:
        return False
    return True
