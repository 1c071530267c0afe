"""English text that every Python ships with, as characters, in training and held-out parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 4096  # characters; every so many blocks, one is kept from training, so that all topics are held out alike
_HELD_OUT_EVERY = 20


def load_text() -> str:
    """Returns the language reference that ``help()`` reads, restricted to printable ASCII and newlines."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise SystemExit(
            "the demo trains on pydoc_data.topics, which this Python lacks: install the full standard library "
            "(on Debian and Ubuntu: apt-get install libpython3-stdlib)"
        ) from error
    joined = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return "".join(character for character in joined if character == "\n" or " " <= character <= "~")


@dataclass(frozen=True)
class Corpus:
    """The text as indices into its alphabet."""

    alphabet: str
    training: Tensor  # (N,) int64
    held_out: Tensor  # (M,) int64

    @classmethod
    def from_text(cls, text: str) -> Corpus:
        """Builds the alphabet from the text and takes the held-out blocks out of it."""
        alphabet = "".join(sorted(set(text)))
        index = {character: position for position, character in enumerate(alphabet)}
        codes = torch.tensor([index[character] for character in text], dtype=torch.int64)
        held_out = torch.arange(len(codes)) // _BLOCK % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
        return cls(alphabet, codes[~held_out], codes[held_out])

    def encode(self, text: str) -> Tensor:
        """Returns the indices of a text, (len(text),) int64."""
        return torch.tensor([self.alphabet.index(character) for character in text], dtype=torch.int64)

    def decode(self, codes: Tensor) -> str:
        """Returns the text of a vector of indices."""
        return "".join(self.alphabet[code] for code in codes.tolist())


def draw_batch(codes: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws random windows of the text.

    Returns:
        The characters and, for each, the one that follows it, both (batch, length) int64.
    """
    starts = torch.randint(len(codes) - length, (batch, 1), generator=generator)
    positions = starts + torch.arange(length + 1)
    windows = codes[positions]
    return windows[:, :-1], windows[:, 1:]
