"""Words and texts of the catalogue as vectors: GloVe's, those of a file, random ones, or a language model's.

They are functions of public texts, so they cost no privacy. Those of the language model are computed once and kept on
the disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from homebody.core import Catalogue, Tree
from homebody.data.pretrained import PRETRAINED, pretrained
from homebody.data.sources import cache_dir
from homebody.data.wordpiece import WordPiece
from homebody.errors import HomebodyError
from homebody.files import SHARED, replacing
from homebody.models.minilm import LAYERS, WIDTH, layer_start, piece_vectors, sentence_vectors, through_layers
from homebody.models.news import NAML, NRMS, PLM, NewsEncoder, item_numbers, text_column
from homebody.rng import Rng

__all__ = ["news_inputs", "news_start", "text_states", "text_vectors", "top_layers", "word_vectors"]

GLOVE, MINILM = "glove-6b-50d", "all-minilm-l6-v2"
SPREAD = 0.1
"""The standard deviation of random word vectors."""
SENTENCES_AT_ONCE = 32
_inputs: WeakKeyDictionary[Catalogue, dict[tuple[NewsEncoder, str], Tree]] = WeakKeyDictionary()


def news_inputs(encoder: NewsEncoder, catalogue: Catalogue, device: torch.device | str = "cpu") -> Tree:
    """What the encoder reads of each news item: a row for each, and one more, the last, for no news at all.

    They are computed once for a catalogue and a device.
    """
    known, asked = _inputs.setdefault(catalogue, {}), (encoder, str(device))
    if asked not in known:
        if isinstance(encoder, PLM):
            texts = _texts(encoder, catalogue)
            if encoder.layers:
                states, real = text_states(texts, encoder.layers)
                rows = {"plm/states": states, "plm/real": real}
            else:
                rows = {"plm": text_vectors(texts)}
            rows = {name: torch.cat([value, torch.zeros_like(value[:1])]) for name, value in rows.items()}
        else:
            rows = encoder.inputs(catalogue)
        rows |= {"own": item_numbers(catalogue)} if encoder.ids else {}
        known[asked] = {name: value.to(device) for name, value in rows.items()}
    return known[asked]


def _texts(encoder: PLM, catalogue: Catalogue) -> Sequence[str]:
    """The texts that a language model reads."""
    column = text_column(catalogue, encoder.title, "plm")
    if len(column.texts) != catalogue.n_items:
        raise HomebodyError(
            f"The encoder plm reads the texts of '{encoder.title}', and only their words are known here: "
            "choose another encoder."
        )
    return column.texts


def news_start(encoder: NewsEncoder, catalogue: Catalogue, rng: Rng, words: str = "glove") -> Tree:
    """The parameters that the encoder starts from; `words` is the source, as `word_vectors` takes it."""
    device = rng.key.device
    own = {"news/own": torch.zeros(catalogue.n_items, encoder.d, device=device)} if encoder.ids else {}
    return {**_content_start(encoder, catalogue, rng, words), **own}


def _content_start(encoder: NewsEncoder, catalogue: Catalogue, rng: Rng, words: str) -> Tree:
    if isinstance(encoder, PLM):
        device = rng.key.device
        if device.type == "meta":  # shapes alone
            parts = [layer_start(layer, device) for layer in encoder.trained] if encoder.layers else []
            own = {name: value for part in parts for name, value in part.items()}
            table = None
        else:
            own = top_layers(encoder.layers) if encoder.layers else {}
            table = text_vectors(_texts(encoder, catalogue)).to(device) if encoder.axes else None
        trained = {f"news/{name}": value.to(device) for name, value in own.items()}
        return {**encoder.start(catalogue, rng, table), **trained}
    if not isinstance(encoder, NRMS | NAML):
        return encoder.start(catalogue, rng)
    table = word_vectors(encoder.words(catalogue), words, rng.fold("words"), encoder.width)
    return encoder.start(catalogue, rng, table)


def word_vectors(words: Sequence[str], source: str, rng: Rng, width: int = 50) -> Tensor:
    """(len(words) + 1, d): the first row is that of unknown words, then one for each word.

    source: `glove` (400,000 words, d = 50), `random` (d = width), or the path of a file in GloVe's format: a word and
    its numbers in each line. A word that the source does not have gets a random vector, spread as the others are.

    >>> word_vectors(["cat", "dog"], "random", Rng.of(0), width=4).shape
    torch.Size([3, 4])
    """
    if source == "random":
        return SPREAD * rng.normal(len(words) + 1, width)
    if source == "glove":
        place, vectors = _glove(words)
    else:
        place, vectors = _from_file(words, Path(source).expanduser())
    if not len(place):
        raise HomebodyError(
            f"None of the catalogue's {len(words):,} words has a vector in '{source}': give a file of their language, "
            "or random."
        )
    table = rng.normal(len(words) + 1, vectors.shape[1]) * float(vectors.std())
    known = torch.from_numpy(vectors).to(table.device)
    return table.index_copy(0, torch.from_numpy(place).to(table.device) + 1, known)


def _glove(words: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The places of the words that have a vector, and their vectors."""
    folder = pretrained(GLOVE)
    index = pl.read_parquet(folder / "words.parquet").rename({"index": "word"}).with_row_index("row")
    wanted = pl.DataFrame({"word": pl.Series(words, dtype=pl.String)}).with_row_index("place")
    both = wanted.join(index, on="word", how="inner", maintain_order="left")
    vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
    return both["place"].to_numpy().astype(np.int64), np.array(vectors[both["row"].to_numpy()], dtype=np.float32)


def _from_file(words: Sequence[str], path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    wanted = {word: place for place, word in enumerate(words)}
    found: dict[int, list[float]] = {}
    width = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                word, *rest = line.rstrip().split(" ")
                if number == 1 and len(rest) == 1 and word.isdecimal() and rest[0].isdecimal():
                    continue  # word2vec's header: how many words, of which length
                width = width or len(rest)
                if not rest or len(rest) != width:
                    raise ValueError(f"line {number} has {len(rest)} numbers and not {width or 'some'}")
                if word in wanted:
                    found.setdefault(wanted[word], [float(text) for text in rest])
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise HomebodyError(
            f"The word vectors {path} cannot be read ({reason}): give glove, random, or a file with a word and its "
            "numbers in each line."
        ) from error
    vectors = np.array(list(found.values()), dtype=np.float32).reshape(len(found), width)
    if not np.isfinite(vectors).all():
        raise HomebodyError(f"The word vectors {path} have a number that is not finite: put it right.")
    return np.array(list(found), dtype=np.int64), vectors


def text_vectors(texts: Sequence[str]) -> Tensor:
    """(len(texts), 384) by MiniLM, of length 1; 0 for an empty text. They are kept in the cache."""
    kept = _kept_at(texts)
    if known := _kept(kept, {"vectors": (len(texts), WIDTH)}):
        return known["vectors"]
    vectors = torch.zeros(len(texts), WIDTH)
    with torch.no_grad():
        for some, weights, pieces, real in _by_length(texts):
            vectors[some] = sentence_vectors(weights, pieces, real)
    _keep(kept, {"vectors": vectors})
    return vectors


def text_states(texts: Sequence[str], layers: int) -> tuple[Tensor, Tensor]:
    """(N, T, 384) what MiniLM makes of each piece of the texts below its last `layers`, and (N, T) which are real.

    They are kept in the cache, with 16 bits a number.
    """
    kept, width = _kept_at(texts, below=layers), (len(texts), -1)
    known = _kept(kept, {"states": (*width, WIDTH), "real": width})
    if known is None:
        parts = [
            (some, through_layers(weights, piece_vectors(weights, pieces), real, range(LAYERS - layers)), real)
            for some, weights, pieces, real in _by_length(texts)
        ]
        longest = max((real.shape[1] for _, _, real in parts), default=1)
        known = {
            "states": torch.zeros(len(texts), longest, WIDTH, dtype=torch.float16),
            "real": torch.zeros(len(texts), longest, dtype=torch.bool),
        }
        for some, x, real in parts:
            known["states"][some, : real.shape[1]] = x.to(torch.float16)
            known["real"][some, : real.shape[1]] = real
        _keep(kept, known)
    return known["states"].float(), known["real"]


def top_layers(layers: int) -> Tree:
    """The parameters of MiniLM's last layers, under its own names."""
    weights = load_file(pretrained(MINILM) / "model.safetensors")
    return {name: weights[name] for layer in range(LAYERS - layers, LAYERS) for name in layer_start(layer, "meta")}


def _by_length(texts: Sequence[str]) -> Iterator[tuple[list[int], Tree, Tensor, Tensor]]:
    """Texts that are not empty, by their numbers, some at a time: the model's weights, pieces, and which are real.

    Sentences of similar length are together: padding costs as much as pieces.
    """
    folder = pretrained(MINILM)
    weights = load_file(folder / "model.safetensors")
    pieces = WordPiece.read(folder / "vocab.txt")
    cut = [pieces.of(text) for text in texts]
    order = sorted((number for number, text in enumerate(texts) if text.strip()), key=lambda number: len(cut[number]))
    for first in range(0, len(order), SENTENCES_AT_ONCE):
        some = order[first : first + SENTENCES_AT_ONCE]
        longest = max(len(cut[number]) for number in some)
        padded = torch.tensor([cut[number] + [0] * (longest - len(cut[number])) for number in some])
        length = torch.tensor([len(cut[number]) for number in some])
        yield some, weights, padded, torch.arange(longest) < length[:, None]


def _kept_at(texts: Sequence[str], below: int = 0) -> Path:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(PRETRAINED[MINILM].package.sha256.encode())
    digest.update(json.dumps(list(texts)).encode())
    states = f"-below-{below}" if below else ""
    return cache_dir() / "vectors" / f"{MINILM}-{digest.hexdigest()}{states}.safetensors"


def _kept(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Tree | None:
    """What was computed before, if the file has it; -1 is any size."""
    try:
        known = load_file(path) if path.is_file() else {}
    except (SafetensorError, OSError):
        return None
    fits = known.keys() == shapes.keys() and all(
        len(value.shape) == len(shapes[name])
        and all(wanted in (-1, size) for size, wanted in zip(value.shape, shapes[name], strict=True))
        and bool(torch.isfinite(value).all())
        for name, value in known.items()
    )
    return known if fits else None


def _keep(path: Path, known: Tree) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HomebodyError(f"{path.parent} cannot be written: {error.strerror or error}.") from error
    with replacing(path, mode=SHARED) as file:
        file.write(save(known))
