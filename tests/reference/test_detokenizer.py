"""Text comes out token by token, complete and never ahead of its bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from resilient_executor.reference import resolve_checkpoint
from resilient_executor.reference.detokenizer import Detokenizer, Vocabulary

TOKENIZER: Tokenizer = Tokenizer.from_file(str(resolve_checkpoint(None) / "tokenizer.json"))
VOCABULARY = Vocabulary(TOKENIZER)


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_text(text: str) -> None:
    detokenizer = Detokenizer(VOCABULARY)
    pieces = [detokenizer.append(token) for token in TOKENIZER.encode(text).ids]
    assert "".join(pieces) + detokenizer.finish() == text == detokenizer.text


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_tokens_give_what_the_tokenizer_gives(tokens: list[int]) -> None:
    detokenizer = Detokenizer(VOCABULARY)
    pieces = [detokenizer.append(token, last=i == len(tokens) - 1) for i, token in enumerate(tokens)]
    assert "".join(pieces) == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_a_character_is_held_back_until_it_is_complete() -> None:
    tokens = TOKENIZER.encode("a\N{GRINNING FACE}b", add_special_tokens=False).ids
    assert len(tokens) == 6, "the vocabulary has no token for this character, so its four bytes come one by one"
    detokenizer = Detokenizer(VOCABULARY)
    assert [detokenizer.append(token) for token in tokens] == ["a", "", "", "", "\N{GRINNING FACE}", "b"]


@pytest.mark.parametrize("end_with_token", [True, False])
def test_an_incomplete_character_at_the_end_becomes_a_replacement(end_with_token: bool) -> None:
    tokens = TOKENIZER.encode("a\N{GRINNING FACE}", add_special_tokens=False).ids[:-1]
    detokenizer = Detokenizer(VOCABULARY)
    for token in tokens[:-1]:
        detokenizer.append(token)
    held_back = detokenizer.append(tokens[-1], last=end_with_token)
    if not end_with_token:
        assert held_back == ""
        detokenizer.finish()
    assert detokenizer.text == "a\N{REPLACEMENT CHARACTER}"


def test_special_and_unknown_tokens_have_no_text() -> None:
    assert VOCABULARY.token_bytes(0) == VOCABULARY.token_bytes(1) == VOCABULARY.token_bytes(10**6) == b""
