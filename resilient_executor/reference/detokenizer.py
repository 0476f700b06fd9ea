"""Text from tokens, one token at a time, for byte-level BPE vocabularies.

A token of such a vocabulary is a string in which each character stands for one byte, and a character of the text may
be spread over several tokens. So the bytes go through an incremental UTF-8 decoder: what it returns is final.
"""

from __future__ import annotations

import codecs

from tokenizers import Tokenizer


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """The bytes behind each token id; special tokens (begin and end of text) have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        alphabet = _byte_of_character()
        added = tokenizer.get_added_tokens_decoder()
        self._bytes = [b""] * tokenizer.get_vocab_size()
        for text, token_id in tokenizer.get_vocab().items():
            if token_id in added:
                self._bytes[token_id] = b"" if added[token_id].special else text.encode()
            else:
                self._bytes[token_id] = bytes(alphabet[character] for character in text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for ids that the tokenizer does not know (a padded embedding has such)."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""


class Detokenizer:
    """The text of one request as it grows."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""

    def append(self, token_id: int, *, last: bool = False) -> str:
        """Add a token; returns the text that became final with it.

        With ``last``, bytes of an incomplete character come out as U+FFFD.
        """
        return self._take(self._vocabulary.token_bytes(token_id), last)

    def finish(self) -> str:
        """End the text without another token; returns what was held back, as U+FFFD."""
        return self._take(b"", True)

    def _take(self, data: bytes, last: bool) -> str:
        delta = self._decoder.decode(data, last)
        self.text += delta
        return delta
