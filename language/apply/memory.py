"""A user's causal language model in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError
from stable_forgetting.common.base.files import file_digest
from stable_forgetting.common.store.weights import weights_digest
from stable_forgetting.language.apply.checkpoint import save_unchecked
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.tokenizers import check_tokenizer, load_tokenizer


@dataclass(frozen=True)
class GivenCausal:
    """A causal language model in memory, in the place of a :class:`CausalCheckpoint`.

    Attributes:
        model: One of transformers.
        given: Its tokenizer; None reads that of the folder or hub id that the model came from.
    """

    model: Any
    given: Any = None
    revision: ClassVar[None] = None
    dtypes: ClassVar[Mapping[str, Any]] = {}
    weights: ClassVar[Path] = Path("the given model")

    @property
    def name(self) -> str:
        """Where the model came from, or the name of its class."""
        origin = getattr(self.model, "name_or_path", "")
        if not origin:
            return type(self.model).__name__
        return Path(origin).name if Path(origin).is_dir() else origin

    @cached_property
    def digests(self) -> dict[str, str]:
        """One digest over all tensors."""
        return {"in memory": weights_digest(self.model)}

    @property
    def dtype(self) -> str:
        """Torch's name of the weights' type."""
        return str(self.model.dtype).removeprefix("torch.")

    @cached_property
    def tokenizer(self) -> Any:
        """A fast tokenizer with an end-of-sequence token.

        Raises:
            UserError: There is none, or it does not fit the model.
        """
        if self.given is not None:
            return check_tokenizer(self.given, type(self.given).__name__)
        origin = getattr(self.model, "name_or_path", "")
        if not origin:
            raise ConfigError("the model does not say where its tokenizer lies; give tokenizer=")
        try:
            return load_tokenizer(CausalModelConfig(name=origin))
        except DataError:
            raise ConfigError(f"{origin} holds no tokenizer; give tokenizer=") from None

    def load(self) -> tuple[Any, Any]:
        """The model itself and its tokenizer.

        Raises:
            CheckpointError: It is none of transformers', not causal, or too small for the
                tokenizer.
        """
        from stable_forgetting.language.models.build import check_causal

        if not hasattr(self.model, "get_input_embeddings") or not hasattr(self.model, "config"):
            raise CheckpointError("the model is no causal language model of transformers")
        if hasattr(self.model, "peft_config"):
            raise CheckpointError("the model has a PEFT adapter; give model.merge_and_unload()")
        entries = self.model.get_input_embeddings().num_embeddings
        if entries < len(self.tokenizer):
            raise CheckpointError(
                f"the model has {entries} embeddings for a tokenizer of {len(self.tokenizer)}; "
                "give the model's own tokenizer"
            )
        check_causal(self.model, self.name)
        return self.model, self.tokenizer

    def write(self, model: Any, folder: Path) -> dict[str, Any]:
        """Model and tokenizer as transformers write them; returns the digest of each file."""
        save_unchecked(model, folder)
        self.tokenizer.save_pretrained(folder)
        files = sorted(folder.glob("*.safetensors"))
        return {"weights_sha256": {file.name: file_digest(file) for file in files}}
