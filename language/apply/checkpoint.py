"""A user's Hugging Face causal language model: found, checked, loaded, written back.

Nothing pickled is ever read and no code of a checkpoint is run.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from stable_forgetting.common.base.errors import CheckpointError
from stable_forgetting.common.base.files import file_digest
from stable_forgetting.common.base.hub import fetch, is_repository, parsed
from stable_forgetting.common.store.adapters import (
    ADAPTER_WEIGHTS,
    is_adapter,
    read_base,
    with_adapter,
)
from stable_forgetting.common.store.weights import (
    CONFIG,
    WEIGHTS,
    keep_metadata,
    refuse_pickles,
    refuse_wrapped,
    stored,
)
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.tokenizers import load_tokenizer

INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
SHARD = "5GB"
"""Size above which weights are written as several files."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
WORDS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "chat_template*",
)
"""Files of a tokenizer."""
KEPT = (CONFIG, GENERATION, "LICENSE*")
"""Files that are copied beside the new weights as they are, and those of the tokenizer."""

_FETCHED = ("*.safetensors", INDEX, *KEPT, *WORDS)
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class CausalCheckpoint:
    """A causal language model on disk, not yet read.

    Attributes:
        name: Last part of the folder, or the hub id.
        folder: Where config, weights and tokenizer lie.
        config: What ``config.json`` says.
        files: The safetensors files, sorted.
        revision: Commit of a model from the hub.
        adapter: Folder of a PEFT adapter that is merged into the model.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    revision: str | None = None
    adapter: Path | None = None
    dtypes: ClassVar[Mapping[str, Any]] = {}

    @cached_property
    def digests(self) -> dict[str, str]:
        """File name -> SHA-256 of each file of weights, an adapter's among them."""
        files = (
            self.files if self.adapter is None else (*self.files, self.adapter / ADAPTER_WEIGHTS)
        )
        return {file.name: file_digest(file) for file in files}

    @cached_property
    def dtype(self) -> str:
        """Torch's name of the weights' type: what the config says, else what is stored.

        Raises:
            CheckpointError: It is neither float32 nor bfloat16 nor float16.
        """
        dtype = self.config.get("dtype") or self.config.get("torch_dtype")
        if dtype is None:
            kinds = {_DTYPES.get(kind, kind) for _, kind in stored(self.files[0]).values()}
            dtype = "/".join(sorted(kinds)) or "float32"
        if dtype not in _DTYPES.values():
            raise CheckpointError(
                f"{self.folder}: its weights are {dtype}; give them as float32, bfloat16 or float16"
            )
        return dtype

    @property
    def weights(self) -> Path:
        """The first file of weights, or an adapter's."""
        return self.files[0] if self.adapter is None else self.adapter / ADAPTER_WEIGHTS

    @property
    def words(self) -> Path:
        """Where the tokenizer lies: an adapter's folder may have one of its own."""
        own = self.adapter
        return own if own and (own / "tokenizer_config.json").is_file() else self.folder

    def load(self) -> tuple[Any, Any]:
        """The model with its weights, on the CPU, in its own dtype, and its tokenizer.

        Raises:
            UserError: Its architecture is not supported, or its weights do not fit, cannot be read
                or are not finite.
        """
        from transformers.utils.logging import disable_progress_bar

        from stable_forgetting.language.models.build import build_model, check_causal

        disable_progress_bar()
        tokenizer = load_tokenizer(CausalModelConfig(name=str(self.words)))
        config = CausalModelConfig(name=str(self.folder), dtype=self.dtype)  # type: ignore[arg-type]
        self._check_types()
        model = build_model(config, len(tokenizer), 0)
        for name, tensor in model.state_dict().items():
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(
                    f"{self.folder}: '{name}' holds NaN or infinite numbers; give sound weights"
                )
        check_causal(model, self.name)
        return (model if self.adapter is None else with_adapter(model, self.adapter)), tokenizer

    def _check_types(self) -> None:
        """Integers or bytes where weights belong are a quantised model without its scales."""
        for path in self.files:
            held = stored(path)
            refuse_wrapped(path, held)
            for key, (_, kind) in held.items():
                if key.endswith(".weight") and kind not in (*_DTYPES, "F64"):
                    raise CheckpointError(
                        f"{path}: '{key}' is stored as {kind}; give the model with its full"
                        " weights, as float32, bfloat16 or float16"
                    )

    def write(self, model: Any, folder: Path) -> dict[str, Any]:
        """Writes new weights beside copies of the given config and tokenizer; returns digests."""
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        save_unchecked(model, folder)
        (folder / GENERATION).unlink(missing_ok=True)
        digests = {}
        for file in sorted(folder.glob("*.safetensors")):
            keep_metadata(file, self.files[0])
            digests[file.name] = file_digest(file)
        for given, kept in ((self.folder, KEPT), (self.words, WORDS)):
            for file in sorted(given.iterdir()):
                if file.is_file() and any(fnmatch.fnmatch(file.name, pattern) for pattern in kept):
                    shutil.copyfile(file, folder / file.name)
        return {"weights_sha256": digests}


def save_unchecked(model: Any, folder: Path) -> None:
    """Writes a model of transformers; its generation config as it is.

    ``save_pretrained`` refuses generation configs that ``from_pretrained`` reads.
    """
    from transformers import GenerationConfig

    given, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(folder, max_shard_size=SHARD)
    finally:
        model.generation_config = given
    if given is not None:
        (folder / GENERATION).write_text(given.to_json_string(), encoding="utf-8")


def read_causal(path: Path) -> CausalCheckpoint:
    """Finds the parts of a model.

    Args:
        path: A folder with ``config.json``, safetensors (one file, or several and their index) and
            a tokenizer; or a hub id, which is fetched.

    Raises:
        CheckpointError: Something is missing, pickled or malformed.
    """
    if path.is_dir():
        return _read_folder(path, path.resolve().name, None)
    if path.is_file():
        refuse_pickles(path)
        raise CheckpointError(f"{path}: is a file; give the folder with {CONFIG} and the tokenizer")
    if not is_repository(path):
        raise CheckpointError(f"{path}: no such folder; give one, or OWNER/NAME of the hub")
    folder = fetch(path, _FETCHED)
    return _read_folder(folder, parsed(path)[0], folder.name)


def _read_folder(folder: Path, name: str, revision: str | None) -> CausalCheckpoint:
    if is_adapter(folder):
        return replace(read_base(folder, read_causal), name=name, adapter=folder)
    files = _weights(folder)
    config = _json(folder / CONFIG)
    if config.get("quantization_config") is not None:
        raise CheckpointError(f"{folder}: is quantised; give the model with its full weights")
    if not any((folder / file).is_file() for file in TOKENIZERS):
        raise CheckpointError(
            f"{folder}: holds no tokenizer; add tokenizer.json and tokenizer_config.json "
            "(tokenizer.save_pretrained)"
        )
    return CausalCheckpoint(name, folder, config, files, revision)


def _weights(folder: Path) -> tuple[Path, ...]:
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,)
    if not (folder / INDEX).is_file():
        for other in sorted(folder.iterdir()):
            refuse_pickles(other)
        inside = {file.parent for file in folder.glob("*/*.safetensors")}
        last = max(inside, key=lambda each: (len(each.name), each.name), default=None)
        one = f"; give that of one checkpoint, such as {last}" if last else ""
        raise CheckpointError(f"{folder}: holds no {WEIGHTS} and no {INDEX}{one}")
    shards = _json(folder / INDEX).get("weight_map")
    named = isinstance(shards, dict) and all(isinstance(s, str) for s in shards.values())
    if not shards or not named:
        raise CheckpointError(f"{folder / INDEX}: has no weight_map; fetch it again")
    names = sorted(set(shards.values()))
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / INDEX}: names '{name}', which is no .safetensors file of this folder; "
                "fetch it again"
            )
    files = tuple(folder / name for name in names)
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{folder}: lacks {file.name}, which {INDEX} names; add it")
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: holds no {path.name}; add it") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must be a mapping; fetch it again")
    return content
