from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from respec.report.pieces import token_pieces


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that every character beyond ASCII is spread over several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={"<eos>": 0} | {c: i for i, c in enumerate(alphabet, 1)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_pieces_join_to_the_text_and_show_special_tokens(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "a é\n≤ 🙂 b"
    ids = [*byte_tokenizer.encode(text, add_special_tokens=False), 0]
    pieces = token_pieces(byte_tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text + "<eos>"
    assert pieces[:4] == ("a", " ", "", "é") and pieces[-1] == "<eos>"


def test_a_character_that_was_never_completed_is_shown_as_such(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    assert "".join(token_pieces(byte_tokenizer, ids)) == "a\ufffd"


def test_no_tokens_no_pieces(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    assert token_pieces(byte_tokenizer, []) == ()
