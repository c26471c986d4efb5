"""The key-value cache under the name that the installed transformers uses: no warning on screen."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from stable_forgetting.language.measure.generation import generate
from stable_forgetting.language.models.backbone import cache_input, cache_output
from stable_forgetting.language.models.composite import CompositeOutput


class Old(nn.Module):
    def forward(self, input_ids, past_key_values=None):
        return CompositeOutput(input_ids, past_key_values)


class New(nn.Module):
    def forward(self, input_ids, cache=None):
        return cache


def test_a_model_gets_its_cache_under_the_name_that_it_knows():
    assert cache_input(Old(), 1) == {"past_key_values": 1}
    assert cache_input(New(), 1) == {"cache": 1}
    assert cache_output(Old()(0, past_key_values=2)) == 2


@pytest.mark.parametrize("kind", ["gpt_neo", "llama"])
def test_greedy_answers_warn_of_nothing(kind, caplog):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "num_layers": 2, "num_hidden_layers": 2, "num_heads": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    sizes |= {"attention_types": [[["global"], 2]]} if kind == "gpt_neo" else {}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    logging.getLogger("transformers").propagate = True
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        (text,) = generate(model, [np.arange(3)], stop=[], max_new_tokens=4)
    assert len(text) == 4 and not [r for r in caplog.records if "past_key_values" in r.message]
