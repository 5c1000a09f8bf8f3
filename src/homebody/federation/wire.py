"""What goes over the wire: trees of tensors, and letters of a header and some parts; versioned, compact, no pickle.

A letter is `HB`, a version, the length of its header, the header (JSON, with the length of every part), the parts.
A tree is the same with a part for every tensor. Whatever arrives is measured before anything is made of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import Catalogue, Data, Method, Rows, Tree
from homebody.errors import HomebodyError
from homebody.privacy import Stage
from homebody.rng import Rng

__all__ = [
    "QUESTION",
    "ROSTER",
    "SUM",
    "Expected",
    "Malformed",
    "OtherVersion",
    "check",
    "decode_letter",
    "decode_tree",
    "decode_update",
    "digest",
    "encode_letter",
    "encode_tree",
    "expected",
    "longest",
    "nothing",
    "packed",
    "packed_bytes",
    "refuse_unfit",
    "report_numbers",
    "shapes",
    "unpacked",
]

VERSION = 1
MAGIC = b"HB"
HEADER_BYTES = 1 << 20
"""The longest header: names and shapes, never what grows with a catalogue."""
TENSORS = 256
QUESTION, SUM, ROSTER = "question", "sum", "roster"
"""The parts of a letter, and of its answer, that belong to an exchange of a secure sum; and the signed list of devices
that may take part, for whoever lacks it."""
_PREFIX = struct.Struct("<2sHI")
_KINDS = {
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.float64: "<f8",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.bool: "|b1",
}
_DTYPES = {kind: dtype for dtype, kind in _KINDS.items()}


class Malformed(ValueError):
    """A malformed message; the sentence says what is wrong and nothing of the contents. Such messages are counted."""


class OtherVersion(Malformed):
    """It was written for another version of the wire format."""


def encode_letter(header: Mapping[str, Any], parts: Mapping[str, bytes] | None = None) -> bytes:
    """A letter.

    >>> decode_letter(encode_letter({"do": "train"}, {"shared": b"123"}))
    ({'do': 'train'}, {'shared': b'123'})
    """
    parts = parts or {}
    sizes = {name: len(part) for name, part in parts.items()}
    text = json.dumps({"header": header, "parts": sizes}, allow_nan=False).encode()
    if len(text) > HEADER_BYTES:
        raise Malformed(f"A header has at most {HEADER_BYTES:,} bytes, not {len(text):,}.")
    return b"".join([_PREFIX.pack(MAGIC, VERSION, len(text)), text, *parts.values()])


def decode_letter(letter: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Its header and its parts; refused where the lengths do not add up."""
    if len(letter) < _PREFIX.size:
        raise Malformed("The letter is too short.")
    magic, version, length = _PREFIX.unpack_from(letter)
    if magic != MAGIC:
        raise Malformed("This is not a letter of Homebody.")
    if version != VERSION:
        raise OtherVersion(f"The letter is of wire version {version}, and this side reads {VERSION}: update the older.")
    start = _PREFIX.size + length
    if length > HEADER_BYTES or start > len(letter):
        raise Malformed("The header claims to be longer than the letter, or than any header.")
    try:
        known = json.loads(letter[_PREFIX.size : start], parse_constant=_no_constant, object_pairs_hook=_once)
        header, sizes = known["header"], known["parts"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Malformed("The header is malformed.") from error
    if not isinstance(header, dict) or not isinstance(sizes, dict):
        raise Malformed("The header is malformed.")
    if not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise Malformed("A part's length is no whole number.")
    if start + sum(sizes.values()) != len(letter):
        raise Malformed("The parts' lengths do not add up to the letter.")
    parts = {}
    for name, size in sizes.items():
        parts[name] = letter[start : start + size]
        start += size
    return header, parts


def _no_constant(name: str) -> None:
    """JSON knows no NaN and no infinity, whatever Python makes of them."""
    raise ValueError(name)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names stand there once each: of two, readers would take different ones."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name stands there twice")
    return entries


def encode_tree(tree: Tree, *, half: bool = False) -> bytes:
    """A tree as bytes; padding of rows is left out, indices take 32 bits. half: floats take 16, where they fit.

    Names stand in order: trees that are the same have the same bytes, wherever they come from.

    >>> tree = {"item": Rows(torch.tensor([2, -1]), torch.tensor([[0.5], [9.0]]), size=3), "bias": torch.ones(2)}
    >>> again = decode_tree(encode_tree(tree))
    >>> again["item"].index.tolist(), again["item"].value.tolist(), again["bias"].tolist()
    ([2], [[0.5]], [1.0, 1.0])
    """
    head: list[list[Any]] = []
    parts: dict[str, bytes] = {}

    def add(tensor: Tensor) -> None:
        whole = _halved(tensor.detach().cpu()) if half else tensor.detach().cpu()
        head[-1].append([_KINDS[whole.dtype], list(whole.shape)])
        parts[str(len(parts))] = whole.contiguous().numpy().astype(_KINDS[whole.dtype], copy=False).tobytes()

    for name, value in sorted(tree.items()):
        if isinstance(value, Rows):
            real = value.index >= 0
            head.append([name, value.size])
            add(value.index[real].to(torch.int32))
            add(value.value[real])
        else:
            head.append([name, None])
            add(value)
    return encode_letter({"tree": head}, parts)


def decode_tree(data: bytes) -> Tree:
    """The inverse of `encode_tree`; refused unless every length, kind and shape fits."""
    header, parts = decode_letter(data)
    head = header.get("tree")
    tree: Tree = {}
    if not isinstance(head, list) or len(head) > TENSORS:
        raise Malformed("The tree has no list of its tensors, or a list too long.")
    bodies = iter(parts.values())
    for entry in head:
        match entry:
            case [str(name), int(size), ["<i4", _] as index, value] if _is_side(size) and name not in tree:
                rows = Rows(_tensor(index, next(bodies, b"")).to(torch.int64), _tensor(value, next(bodies, b"")), size)
                if rows.index.dim() != 1 or rows.value.dim() < 1 or len(rows.index) != len(rows.value):
                    raise Malformed("A table's rows have another length than their indices.")
                if len(rows.index) and not 0 <= int(rows.index.min()) <= int(rows.index.max()) < size:
                    raise Malformed("A row is outside its table.")
                tree[name] = rows
            case [str(name), None, value] if name not in tree:
                tree[name] = _tensor(value, next(bodies, b""))
            case _:
                raise Malformed("An entry of the tree is not as it should be.")
    if next(bodies, None) is not None:
        raise Malformed("The tree has more parts than tensors.")
    return tree


def _tensor(said: Any, body: bytes) -> Tensor:
    match said:
        case [str(kind), list(shape)] if kind in _DTYPES and len(shape) <= 8:
            if not all(_is_side(side) for side in shape):
                raise Malformed("A tensor's shape is not of whole numbers.")
            if math.prod(shape) * np.dtype(kind).itemsize != len(body):
                raise Malformed("A tensor's bytes do not fill its shape.")
            if math.prod(max(1, side) for side in shape) >= 2**59:  # a stride would not fit, though nothing is there
                raise Malformed("An empty tensor's shape is too large.")
            if kind == "|b1" and body.strip(b"\0\1"):
                raise Malformed("A tensor of truth values holds something else.")
            return torch.from_numpy(np.frombuffer(body, dtype=kind).reshape(shape).copy())
    raise Malformed("A tensor is of a kind that is not known here.")


def _is_side(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**31


def _halved(tensor: Tensor) -> Tensor:
    """In 16 bits, where no number becomes infinite."""
    if tensor.dtype not in (torch.float32, torch.float64) or not tensor.numel():
        return tensor
    return tensor.half() if float(tensor.abs().max()) < torch.finfo(torch.float16).max else tensor


def digest(data: bytes) -> str:
    """The digest by which a device and the server name the same bytes."""
    return hashlib.sha256(data).hexdigest()[:32]


class Expected(NamedTuple):
    """The type and shape that one tensor of an update must have."""

    shape: tuple[int, ...]
    """Of the whole tensor, or of one row."""
    size: int | None
    """Of the table that it has rows of."""
    kind: torch.dtype
    """Where it is floating, 16 bits will do too."""


def expected(method: Method, shared: Tree, catalogue: Catalogue) -> dict[str, Expected]:
    """The form of a client's update after its half of the channel, from one round on empty data."""
    return shapes(method.uplink.device(_example(method, shared, catalogue), Rng.of(0)))


def nothing(method: Method, shared: Tree, catalogue: Catalogue) -> Tree:
    """The update of somebody who has nothing to learn from, before it goes through the channel."""
    return method.uplink.nothing(_example(method, shared, catalogue))


def _example(method: Method, shared: Tree, catalogue: Catalogue) -> Tree:
    rng, item = Rng.of(0), torch.zeros(1, dtype=torch.int64)
    features = {
        name: torch.zeros(column.values.shape[1:]).to(column.values.dtype) for name, column in catalogue.people.items()
    }
    data = Data(item, item == 0, item, catalogue, features)
    update, _ = method.client(shared, method.init_local(shared, rng), method.prepare(data, rng))
    return update


def shapes(update: Tree) -> dict[str, Expected]:
    """The form of updates like this one."""
    return {
        name: Expected(tuple(value.value.shape[1:]), value.size, value.value.dtype)
        if isinstance(value, Rows)
        else Expected(tuple(value.shape), None, value.dtype)
        for name, value in update.items()
    }


def report_numbers(update: Tree) -> npt.NDArray[np.int64]:
    """The one-bit reports of an update as numbers over all its tensors, which stand in the order of their names.

    >>> ones = torch.ones(2)
    >>> report_numbers({"b[2]": Rows(torch.tensor([3, -1]), ones, 4), "a[1]": Rows(torch.tensor([-1, 1]), ones, 2)})
    array([1, 5])
    """
    numbers, start = [], 0
    for _, rows in sorted(update.items()):
        numbers.append(start + rows.index[rows.index >= 0].numpy())
        start += rows.size
    return np.concatenate(numbers)


def packed(message: Tree) -> bytes:
    """A message as bytes alone, always as many for messages of one form: its tensors in the order of their names.

    >>> form = shapes(message := {"news": torch.tensor([7, -1]), "choice": torch.tensor(3)})
    >>> len(packed(message)) == packed_bytes(form) == 24, unpacked(packed(message), form)["news"].tolist()
    (True, [7, -1])
    """
    parts = (value.detach().cpu().contiguous() for _, value in sorted(message.items()))
    return b"".join(part.numpy().astype(_KINDS[part.dtype], copy=False).tobytes() for part in parts)


def packed_bytes(wanted: Mapping[str, Expected]) -> int:
    """How many bytes a message of this form takes."""
    return sum(math.prod(shape) * np.dtype(_KINDS[kind]).itemsize for shape, _, kind in wanted.values())


def unpacked(content: bytes, wanted: Mapping[str, Expected]) -> Tree:
    """The inverse of `packed`, for content of the right length."""
    message, start = {}, 0
    for name, (shape, _, kind) in sorted(wanted.items()):
        end = start + math.prod(shape) * np.dtype(_KINDS[kind]).itemsize
        message[name] = _tensor([_KINDS[kind], list(shape)], content[start:end])
        start = end
    return message


def refuse_unfit(method: Method, *, proxied: bool = False, helped: bool = False) -> None:
    """Refuse a channel that devices cannot keep: by the server, and by every device for itself. What such a stage
    promises would be charged, and not kept. proxied: there is a proxy to shuffle reports. helped: there is a helper to
    open secure sums."""
    reader = method.uplink.facts.reader
    if reader is not None and type(reader).admits is Stage.admits:
        raise HomebodyError(
            f"{type(method).__name__}'s server reads each message before it sums them, which is not done with devices: "
            "run it in a simulation."
        )
    if method.uplink.facts.shuffled and not proxied:
        raise HomebodyError(
            "Shuffle needs a proxy between devices and server: give the server an address for reports "
            "(--reports 127.0.0.1:9093) and every device a proxy (--proxy), or leave the stage out."
        )
    if method.uplink.facts.skellam and not method.uplink.facts.secret:
        raise HomebodyError(
            "Skellam noise is a share of a secure sum's, and without one it is next to no noise: put `secure-sum` "
            "after it, or add laplace on the device."
        )
    if method.uplink.facts.helped and not helped:
        raise HomebodyError(
            "A secure sum with a helper needs a proxy that opens it: give the server its address (--helper "
            "https://HOST:PORT) and every device the same proxy (--proxy), or leave out helper=true."
        )
    if method.uplink.facts.secret:
        method.uplink.ring(1, people=1)  # its numbers have a range
    if method.uplink.asks_rows:
        raise HomebodyError(
            "ask-rows needs more than one letter a round, which devices do not exchange: leave it out, and the ledger "
            "says what the server learns."
        )


def check(update: Tree, wanted: Mapping[str, Expected], largest: float, rows: int | None = None) -> None:
    """Refuse an update of other names, shapes or kinds, and numbers that are not finite or too large.

    rows: how many it may have in all its tables together.
    """
    if update.keys() != wanted.keys():
        raise Malformed("The update has other names than its method's.")
    if rows is not None and sum(len(value.index) for value in update.values() if isinstance(value, Rows)) > rows:
        raise Malformed("The update has more rows than its channel lets through.")
    for name, (shape, size, kind) in wanted.items():
        value = update[name]
        some = isinstance(value, Rows)
        numbers = value.value if some else value
        given = tuple(numbers.shape[1:] if some else numbers.shape)
        if some != (size is not None) or given != shape or (some and value.size != size):
            raise Malformed(f"'{name}' has another shape than its method's.")
        if some and len(value.index) > _most_rows(value.size):
            raise Malformed(f"'{name}' has more rows than its table.")
        if numbers.dtype != kind and not (numbers.dtype == torch.float16 and kind.is_floating_point):
            raise Malformed(f"'{name}' is of another kind than its method's.")
        # In doubles: the largest negative whole number has no absolute value of its own kind.
        most = float(numbers.to(torch.float64).abs().max()) if numbers.numel() else 0.0
        if not math.isfinite(most):
            raise Malformed(f"'{name}' has numbers that are not finite.")
        if most > largest:
            raise Malformed(f"'{name}' has numbers over {largest:g}.")


def decode_update(part: bytes, wanted: Mapping[str, Expected], largest: float, rows: int | None = None) -> Tree:
    """One person's update, if it passes `check`; a message that is too long is not decoded."""
    if len(part) > longest(wanted):
        raise Malformed("The update is larger than any of its method's.")
    update = decode_tree(part)
    check(update, wanted, largest, rows)
    return update


def longest(wanted: Mapping[str, Expected]) -> int:
    """More bytes than any update of this kind takes: whatever is longer is not even looked into."""
    return HEADER_BYTES + sum(
        8 * math.prod(shape) if size is None else (4 + 8 * math.prod(shape)) * _most_rows(size)
        for shape, size, _ in wanted.values()
    )


def _most_rows(size: int) -> int:
    """Of a table, in one update: a row may come several times, to be added up."""
    return max(size, 1 << 16)
