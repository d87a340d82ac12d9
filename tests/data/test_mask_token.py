"""The mask token: as asked for, the tokenizer's own, or a spare one."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from paceline.data.mask_token import MaskToken, choose_mask_token
from paceline.errors import ConfigError

WORDS = ["a", "b", "<bos>", "<eos>"]


def tokenizer(*special: str, template: str = "", **roles: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*WORDS, *special])}, unk_token="a"))
    made.add_special_tokens([*WORDS[2:], *special])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", chat_template=template, **roles
    )


def test_the_tokenizers_own_goes_before_a_spare_one() -> None:
    found = choose_mask_token(tokenizer("<|reserved_special_token_0|>", "<|mask|>", mask_token="<|mask|>"), None, 8)
    assert found == MaskToken(5, "<|mask|>")


@pytest.mark.parametrize("asked", [4, "<|reserved_special_token_0|>"])
def test_an_id_and_its_text_are_the_same_token(asked: int | str) -> None:
    words = tokenizer("<|reserved_special_token_0|>", "<|mask|>", mask_token="<|mask|>")
    assert choose_mask_token(words, asked, 8) == MaskToken(4, "<|reserved_special_token_0|>")


@pytest.mark.parametrize("name", ["<|reserved_special_token_0|>", "<unused0>", "<SPECIAL_20>", "<|placeholder1|>"])
def test_the_first_spare_token_is_taken_and_named(name: str) -> None:
    found = choose_mask_token(tokenizer("<|end|>", name, "<unused99>"), None, 64)
    assert (
        found is not None
        and (found.id, found.text) == (5, name)
        and f"its spare token 5 ({name}) is used" in found.note
    )


def test_a_token_with_a_meaning_is_not_spare() -> None:
    words = tokenizer(
        "<unused0>", "<unused1>", "<unused2>", "<unused3>", template="{{ '<unused1>' }}", pad_token="<unused0>"
    )
    found = choose_mask_token(words, None, 64, taken={6})
    assert found is not None and found.id == 7


def test_else_the_first_row_behind_the_tokenizer_is_spare() -> None:
    found = choose_mask_token(tokenizer(), None, 5)
    assert found is not None and str(found) == "4 (beyond the tokenizer's tokens)" and found.note
    assert choose_mask_token(tokenizer(), None, None) is None


@pytest.mark.parametrize(
    ("asked", "size", "says"),
    [
        (None, 4, "has no mask token and no spare one; give the id of a token .* (0 to 3)"),
        (
            9,
            8,
            "= 9: outside the target's embedding; allowed: 0 to 7; for example drafter.mask_token_id: 4 (<unused0>)",
        ),
        (
            3,
            8,
            "= 3: is the tokenizer's eos token, which means something else to the target; for .*: 4 (<unused0>)",
        ),
        (-1, None, "= -1: outside the target's embedding; allowed: 0 or more"),
        ("<unused>", 8, "= <unused>: the tokenizer has no such token; did you mean <unused0>?"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_an_example(asked: int | str | None, size: int | None, says: str) -> None:
    words = tokenizer(*(["<unused0>"] if asked is not None else []))
    with pytest.raises(ConfigError, match=says.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")) as error:
        choose_mask_token(words, asked, size)
    assert len(error.value.errors) == 1
