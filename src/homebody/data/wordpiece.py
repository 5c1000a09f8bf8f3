"""WordPiece, BERT's tokenizer for text in lower case: words and punctuation, cut into pieces of a vocabulary."""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Sequence
from pathlib import Path

__all__ = ["WordPiece"]

LONGEST_WORD = 100
"""A word of more characters is unknown."""
_CJK = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


class WordPiece:
    """Texts as numbers of pieces: [CLS], the pieces, [SEP].

    A piece inside a word begins with ##. The longest piece that fits is taken, from the left.

    >>> pieces = WordPiece(["[UNK]", "[CLS]", "[SEP]", "home", "##body", "!"])
    >>> pieces.of("Homebody! Nobody"), pieces.of("Homebody!", most=3)
    ([1, 3, 4, 5, 0, 2], [1, 3, 2])
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._place = {piece: number for number, piece in enumerate(vocabulary)}
        self._unknown, self._first, self._last = (self._place[name] for name in ("[UNK]", "[CLS]", "[SEP]"))

    @classmethod
    def read(cls, path: Path) -> WordPiece:
        """From a file with a piece in each line."""
        return cls(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))

    def of(self, text: str, most: int = 256) -> list[int]:
        """The pieces of a text; beyond `most`, [CLS] and [SEP] included, it is cut."""
        pieces: list[int] = []
        for word in _words(text):
            if len(pieces) > most - 2:
                break
            pieces += self._cut(word)
        return [self._first, *pieces[: most - 2], self._last]

    def _cut(self, word: str) -> list[int]:
        if len(word) > LONGEST_WORD:
            return [self._unknown]
        pieces, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self._place), None)
            if end is None:
                return [self._unknown]
            pieces.append(self._place[prefix + word[start:end]])
            start = end
        return pieces


def _words(text: str) -> list[str]:
    """Words and single marks of punctuation, in lower case and without accents."""
    plain = unicodedata.normalize("NFD", "".join(_cleaned(text))).lower()
    letters = (character for character in plain if unicodedata.category(character) != "Mn")
    return "".join(f" {letter} " if _is_punctuation(letter) else letter for letter in letters).split()


def _cleaned(text: str) -> list[str]:
    """Without control characters, and with spaces around Chinese ones, which are words by themselves."""
    kept = []
    for character in text:
        code = ord(character)
        if character in "\t\n\r" or unicodedata.category(character) == "Zs":
            kept.append(" ")
        elif code == 0xFFFD or unicodedata.category(character).startswith("C"):
            continue
        else:
            kept.append(f" {character} " if any(low <= code <= high for low, high in _CJK) else character)
    return kept


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")
