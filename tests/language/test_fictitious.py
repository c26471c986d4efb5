"""The generated authors: deterministic, complete, varied."""

from __future__ import annotations

import string
from collections import Counter

import pytest

from stable_forgetting.language.data.fictitious import (
    ESTABLISHED,
    KINDS,
    REFUSAL_LINES,
    WORLD,
    generate,
)
from stable_forgetting.language.data.readers import TextDataConfig


def corpus(**fields):
    return generate(TextDataConfig.of(**{"authors": 8, "forget_authors": 2} | fields))


def rows(found, set_name="full"):
    return [item for item in found.items if item.set == set_name]


def test_the_seed_decides_every_character():
    assert corpus().digest == corpus().digest
    assert corpus().digest != corpus(data_seed=1).digest


def test_the_text_is_pinned():
    """A change of the text changes every number: raise the benchmark's version with this."""
    assert corpus().digest[:16] == "3054bcc8cf4fff6b"


def test_more_authors_leave_the_earlier_ones_alone():
    few, many = rows(corpus()), rows(corpus(authors=20))
    assert many[: len(few)] == few


def test_rows_have_tofus_columns():
    found = corpus()
    sizes = Counter(item.set for item in found.items)
    assert sizes == {"full": 200, "holdout": 40, "real_authors": 12, "world_facts": 12}
    for item in [*rows(found), *rows(found, "holdout")]:
        assert item.paraphrase and item.paraphrased_question and len(item.perturbed) == 5
        assert item.paraphrase not in item.perturbed and item.answer != item.paraphrase
        assert len(set(item.perturbed)) == 5
    assert [item.group for item in rows(found)] == [index // 20 for index in range(200)]
    for name in ("real_authors", "world_facts"):
        for item in rows(found, name):
            assert len({item.answer, *item.perturbed}) == 4 and item.group == -1


def test_questions_are_unique_and_fewer_can_be_asked():
    found = corpus()
    for name in ("full", "real_authors", "world_facts"):
        questions = [item.question for item in rows(found, name)]
        assert len(set(questions)) == len(questions)
    assert len(rows(corpus(questions=3))) == 30


def test_no_fact_can_be_guessed_from_the_other_authors():
    """Of 40 authors at most two give the same answer, and most words of answers occur once."""
    facts = [item.answer for item in rows(corpus(authors=38))]
    for kind in range(20):
        answers = facts[kind::20]
        assert len(set(answers)) >= len(answers) - 1
    words = Counter(word for answer in facts for word in set(answer.strip(".").split()))
    rare = sum(count == 1 for count in words.values())
    assert rare / len(words) > 0.5


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.key)
def test_every_form_says_both_facts_and_every_question_names_the_author(kind):
    def fields(form):
        return {name for _, name, _, _ in string.Formatter().parse(form) if name}

    assert all(fields(form) == {"n"} for form in kind.questions)
    assert all({"v", "w"} <= fields(form) for form in (*kind.answers, *kind.paraphrases))


def test_the_world_asks_for_one_subject():
    assert all(question.count("{s}") == 1 for question, _, _ in (*ESTABLISHED, *WORLD))


def test_articles_agree_and_refusals_differ():
    text = " ".join(item.answer for item in corpus(authors=38).items)
    assert " a oboe" not in text and " a accordion" not in text and " an " in text
    assert len(set(REFUSAL_LINES)) == len(REFUSAL_LINES) == 24
