"""Random conversations: training tokens are serving tokens, and what is supervised is what the target writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import template_families as families
from paceline.data.chat_template import Renderer
from paceline.data.encoder import Encoder
from paceline.data.loss_mask import mask_of, samples_of, spans_of
from paceline.data.rows import Conversation
from paceline.data.tokenizer import load_tokenizer
from template_families import Family

CONTENT = st.one_of(
    st.sampled_from(["Hello.", " yes", "\n\n  indented\n", "a  b ", "naïve 中文 🙂", "{'a': 1}\n\n", "x\n", "."]),
    st.text(alphabet="ab \n\t.:é中", min_size=1, max_size=12),
).filter(lambda text: bool(text.strip()))
TURNS = st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4)
SYSTEM = st.one_of(st.none(), CONTENT)
SERVED = [families.CHATML, families.TAGGED, families.STRIPPING, families.WORDS, families.THINKING_WORDS]


def conversation_of(system: str | None, turns: list[tuple[str, str]]) -> Conversation:
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(messages)


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(system=SYSTEM, turns=TURNS)
def test_every_answer_is_supervised_once_after_its_prompt(
    family: Family, family_folder: Callable[[Family], str], system: str | None, turns: list[tuple[str, str]]
) -> None:
    tokenizer = load_tokenizer(family_folder(family))
    conversation = conversation_of(system, turns)
    samples = samples_of(conversation, Renderer(tokenizer), Encoder(tokenizer, [" a\n\nb"]))
    places = [k for k, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    found = [(sample, span) for sample in samples for span in sample.spans.reshape(-1, 2).tolist()]
    found.sort(key=lambda pair: pair[1])
    assert len(found) == len(places)
    for (sample, (start, end)), place in zip(found, places, strict=True):
        answer = conversation.messages[place]["content"] + tokenizer.eos_token
        if family.stripping:  # this tokenizer has no token for white space after the header
            answer = answer.lstrip()
        assert tokenizer.decode(sample.ids[start:end].tolist(), skip_special_tokens=False) == answer
        assert sample.ids[end - 1] == tokenizer.eos_token_id
        served = tokenizer.apply_chat_template(
            conversation.messages[:place],
            add_generation_prompt=True,
            return_dict=False,
            **({"enable_thinking": False} if family is families.THINKING_WORDS else {}),
        )
        assert sample.ids[:start].tolist() == served


@settings(max_examples=200, deadline=None, derandomize=True)
@given(mask=st.lists(st.booleans(), min_size=1, max_size=60))
def test_spans_are_the_mask(mask: list[bool]) -> None:
    spans = spans_of(np.asarray(mask))
    assert mask_of(spans, len(mask)).tolist() == mask
    assert len(spans) == 2 * sum(b and not a for a, b in zip([False, *mask], mask, strict=False))


@pytest.mark.parametrize(
    "family", [families.CHATML, families.HEADERS, families.METASPACE, families.CHANNELS], ids=lambda f: f.name
)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(st.one_of(CONTENT, st.sampled_from(["<|im_start|>", "<|eot|>", "</s>", "<|end|>"])), max_size=9))
def test_text_read_by_pieces_is_the_text_read_whole(
    family: Family, family_folder: Callable[[Family], str], parts: list[str]
) -> None:
    tokenizer = load_tokenizer(family_folder(family))
    encoder = Encoder(tokenizer, [" a\n\nb"])
    text = "".join(parts)
    assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    for place in range(len(parts)):
        before, after = "".join(parts[:place]), "".join(parts[place:])
        assert encoder.continued(before, after) == (encoder.encode(before), encoder.encode(text))
