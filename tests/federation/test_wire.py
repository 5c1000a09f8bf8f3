"""What goes over the wire: it comes back unchanged, and whatever else arrives is refused before it is read."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from homebody.core import Catalogue, Rows, Tree
from homebody.federation import wire
from homebody.methods.fedmf import FedMF
from homebody.privacy import Channel, Clip, Laplace
from homebody.rng import Rng

KINDS = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
tensors = st.sampled_from(list(KINDS.values())).flatmap(lambda kind: arrays.arrays(kind, shapes)).map(torch.from_numpy)


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    size, width = draw(st.integers(1, 9)), draw(st.integers(0, 3))
    index = draw(st.lists(st.integers(-1, size - 1), max_size=6))
    value = draw(arrays.arrays(np.float32, (len(index), width)))
    return Rows(torch.tensor(index, dtype=torch.int64), torch.from_numpy(value), size)


trees = st.dictionaries(st.text(max_size=5), st.one_of(tensors, some_rows()), max_size=4)
scalars = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False)
)
headers = st.dictionaries(
    st.text(max_size=5), st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5), max_size=4
)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit by bit: NaN too."""
    return left.dtype == right.dtype and left.shape == right.shape and left.numpy().tobytes() == right.numpy().tobytes()


@settings(deadline=None)
@given(headers, st.dictionaries(st.text(max_size=5), st.binary(max_size=20), max_size=4))
def test_a_letter_comes_back(header: dict[str, Any], parts: dict[str, bytes]) -> None:
    found, pieces = wire.decode_letter(wire.encode_letter(header, parts))
    assert (found, pieces) == (header, parts)
    assert list(pieces) == list(parts)


@settings(deadline=None)
@given(trees)
def test_a_tree_comes_back(tree: Tree) -> None:
    again = wire.decode_tree(wire.encode_tree(tree))
    assert again.keys() == tree.keys()
    for name, value in tree.items():
        if isinstance(value, Rows):
            real = value.index >= 0
            assert isinstance(again[name], Rows)
            assert again[name].size == value.size
            assert same(again[name].index, value.index[real])
            assert same(again[name].value, value.value[real])
        else:
            assert same(again[name], value)


@settings(deadline=None)
@given(trees, st.randoms())
def test_the_same_tree_has_the_same_bytes(tree: Tree, random: Any) -> None:
    """A checkpoint gives names back in any order, and a device knows what it answered by these bytes."""
    names = list(tree)
    random.shuffle(names)
    assert wire.encode_tree({name: tree[name] for name in names}) == wire.encode_tree(tree)


@settings(deadline=None)
@given(arrays.arrays(np.float32, st.integers(0, 8), elements=st.floats(-7e4, 7e4, width=32)))
def test_half_precision_never_makes_a_number_infinite(values: np.ndarray) -> None:
    tree = {"w": torch.from_numpy(values), "n": torch.arange(3)}
    again = wire.decode_tree(wire.encode_tree(tree, half=True))
    assert same(again["n"], tree["n"])
    small = not len(values) or np.abs(values).max() < 65504
    assert again["w"].dtype == (torch.float16 if small and len(values) else torch.float32)
    assert torch.isfinite(again["w"]).all()
    torch.testing.assert_close(again["w"].float(), tree["w"], rtol=1e-3, atol=1e-7)


def test_half_precision_halves() -> None:
    tree = {"item": Rows(torch.arange(50), torch.ones(50, 20), 60)}
    assert len(wire.encode_tree(tree, half=True)) < len(wire.encode_tree(tree)) - 1900
    assert wire.decode_tree(wire.encode_tree({"w": torch.tensor([float("nan")])}, half=True))["w"].isnan().all()


def test_tensors_that_are_views_are_packed_as_they_look() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    tree = {"turned": table.t(), "part": table[:, 1:3], "grad": torch.ones(2, requires_grad=True)}
    again = wire.decode_tree(wire.encode_tree(tree))
    assert again["turned"].tolist() == table.t().tolist()
    assert again["part"].tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
    again["grad"] += 1  # it is nobody else's memory


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_malformed(noise: bytes) -> None:
    for data in (noise, b"HB" + noise, struct.pack("<2sHI", b"HB", 1, max(0, len(noise))) + noise):
        with pytest.raises(wire.Malformed):
            wire.decode_letter(data)
        with pytest.raises(wire.Malformed):
            wire.decode_tree(data)


@settings(max_examples=300, deadline=None)
@given(trees, st.data())
def test_a_changed_tree_is_read_or_refused_and_nothing_else(tree: Tree, data: st.DataObject) -> None:
    packed = bytearray(wire.encode_tree(tree))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(packed) - 1))
        packed[place] = data.draw(st.integers(0, 255))
    try:
        found = wire.decode_tree(bytes(packed))
    except wire.Malformed:
        return
    for value in found.values():
        if isinstance(value, Rows) and len(value.index):
            assert 0 <= int(value.index.min()) <= int(value.index.max()) < value.size


@settings(deadline=None)
@given(trees, st.data())
def test_a_cut_or_longer_letter_is_malformed(tree: Tree, data: st.DataObject) -> None:
    packed = wire.encode_tree(tree)
    with pytest.raises(wire.Malformed):
        wire.decode_tree(packed[: data.draw(st.integers(0, len(packed) - 1))])
    with pytest.raises(wire.Malformed):
        wire.decode_tree(packed + b"\0")


def letter(text: str | bytes, body: bytes = b"", *, length: int | None = None, version: int = 1) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<2sHI", b"HB", version, len(content) if length is None else length) + content + body


@pytest.mark.parametrize(
    "bad",
    [
        letter("{}", length=2**32 - 1),
        letter("{}", length=3),
        letter(" " * (wire.HEADER_BYTES + 1)),
        letter("[]"),
        letter("7"),
        letter("null"),
        letter('"header"'),
        letter('{"header": {}}'),
        letter('{"parts": {}}'),
        letter('{"header": [], "parts": {}}'),
        letter('{"header": {}, "parts": []}'),
        letter('{"header": {}, "parts": {"a": -1}}'),
        letter('{"header": {}, "parts": {"a": -3, "b": 3}}'),
        letter('{"header": {}, "parts": {"a": 3.0}}', b"123"),
        letter('{"header": {}, "parts": {"a": true}}', b"1"),
        letter('{"header": {}, "parts": {"a": "3"}}', b"123"),
        letter('{"header": {}, "parts": {"a": null}}'),
        letter('{"header": {}, "parts": {"a": 1e999}}'),
        letter('{"header": {}, "parts": {"a": 99999999999999999999}}', b"123"),
        letter('{"header": {}, "parts": {"a": %s}}' % ("9" * 5000), b"123"),
        letter('{"header": {}, "parts": {"a": 2}}', b"123"),
        letter('{"header": {}, "parts": {"a": 3, "a": 3}}', b"123"),
        letter('{"header": {"do": 1, "do": 2}, "parts": {}}'),
        letter('{"header": {"x": NaN}, "parts": {}}'),
        letter('{"header": {"x": -Infinity}, "parts": {}}'),
        letter('{"header": {"x": %s}, "parts": {}}' % ("[" * 200_000)),
        letter('{"header": {"x": %s}, "parts": {}}' % ("[" * 200_000 + "]" * 200_000)),
        letter('{"header": {"x": %s}, "parts": {}}' % ('{"a":' * 100_000 + "1" + "}" * 100_000)),
        letter(b'{"header": {"x": "\xff"}, "parts": {}}'),
    ],
)
def test_a_malformed_letter_is_refused(bad: bytes) -> None:
    with pytest.raises(wire.Malformed) as refused:
        wire.decode_letter(bad)
    assert not isinstance(refused.value, wire.OtherVersion)


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_version_is_named(version: int) -> None:
    with pytest.raises(wire.OtherVersion, match=f"of wire version {version}, and this side reads 1: update the older"):
        wire.decode_letter(letter("{}", version=version))


def tree_of(*entries: Any, bodies: tuple[bytes, ...] = ()) -> bytes:
    return wire.encode_letter({"tree": list(entries)}, {str(number): body for number, body in enumerate(bodies)})


F4, I4 = ["<f4", [1]], ["<i4", [1]]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (wire.encode_letter({}), "no list of its tensors"),
        (wire.encode_letter({"tree": {}}), "no list of its tensors"),
        (tree_of(*[[str(n), None, ["<f4", [0]]] for n in range(300)], bodies=(b"",) * 300), "a list too long"),
        (tree_of(["a", None, F4], ["a", None, F4], bodies=(bytes(4),) * 2), "An entry of the tree"),
        (tree_of([5, None, F4], bodies=(bytes(4),)), "An entry of the tree"),
        (tree_of(["a", None], bodies=(bytes(4),)), "An entry of the tree"),
        (tree_of("abc"), "An entry of the tree"),
        (tree_of(["a", None, F4], bodies=(bytes(4), b"more")), "more parts than tensors"),
        (tree_of(["a", None, F4]), "do not fill its shape"),
        (tree_of(["a", None, ["<f4", [2]]], bodies=(bytes(4),)), "do not fill its shape"),
        (tree_of(["a", None, ["<f4", [-1]]], bodies=(bytes(4),)), "not of whole numbers"),
        (tree_of(["a", None, ["<f4", [1.0]]], bodies=(bytes(4),)), "not of whole numbers"),
        (tree_of(["a", None, ["<f4", [True]]], bodies=(bytes(4),)), "not of whole numbers"),
        (tree_of(["a", None, ["<f4", [2**31]]], bodies=(bytes(4),)), "not of whole numbers"),
        (tree_of(["a", None, ["<f4", [1] * 9]], bodies=(bytes(4),)), "kind that is not known"),
        (tree_of(["a", None, ["|O", [1]]], bodies=(bytes(8),)), "kind that is not known"),
        (tree_of(["a", None, ["<c8", [1]]], bodies=(bytes(8),)), "kind that is not known"),
        (tree_of(["a", None, [["<f4"], [1]]], bodies=(bytes(4),)), "kind that is not known"),
        (tree_of(["a", None, ["|b1", [2]]], bodies=(b"\1\7",)), "truth values"),
        (tree_of(["a", None, ["<f4", [0] + [2**31 - 1] * 7]], bodies=(b"",)), "too large"),
        (tree_of(["a", 3, I4, F4], bodies=(struct.pack("<i", 3), bytes(4))), "outside its table"),
        (tree_of(["a", 3, I4, F4], bodies=(struct.pack("<i", -1), bytes(4))), "outside its table"),
        (tree_of(["a", 0, I4, F4], bodies=(bytes(4), bytes(4))), "outside its table"),
        (tree_of(["a", 3, I4, ["<f4", [2]]], bodies=(bytes(4), bytes(8))), "another length"),
        (tree_of(["a", 3, I4, ["<f4", []]], bodies=(bytes(4), bytes(4))), "another length"),
        (tree_of(["a", 3, ["<i4", [1, 1]], F4], bodies=(bytes(4), bytes(4))), "another length"),
        (tree_of(["a", 3, ["<f4", [1]], F4], bodies=(bytes(4), bytes(4))), "An entry of the tree"),
        (tree_of(["a", -3, I4, F4], bodies=(bytes(4), bytes(4))), "An entry of the tree"),
        (tree_of(["a", True, I4, F4], bodies=(bytes(4), bytes(4))), "An entry of the tree"),
        (tree_of(["a", 2**31, I4, F4], bodies=(bytes(4), bytes(4))), "An entry of the tree"),
        (tree_of(["a", 3.0, I4, F4], bodies=(bytes(4), bytes(4))), "An entry of the tree"),
    ],
)
def test_a_malformed_tree_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(wire.Malformed, match=said) as refused:
        wire.decode_tree(data)
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize("shape", [[2**31 - 1, 2**31 - 1], [2**40], [10**30], [2**31 - 1] * 8])
def test_nothing_is_made_as_large_as_a_header_claims(shape: list[int]) -> None:
    """The claims are of terabytes; what is looked at are a few bytes."""
    claims = [
        tree_of(["a", None, ["<f8", shape]], bodies=(bytes(8),)),
        tree_of(["a", 2**31 - 1, ["<i4", shape], ["<f8", shape]], bodies=(bytes(4), bytes(8))),
        letter(json.dumps({"header": {}, "parts": {"a": int(np.prod(shape, dtype=object))}}), b"1"),
    ]
    tracemalloc.start()
    try:
        for data in claims:
            with pytest.raises(wire.Malformed):
                wire.decode_tree(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_a_table_of_many_rows_is_named_and_not_made() -> None:
    """Rows of a table of two thousand million are two rows."""
    tree = wire.decode_tree(wire.encode_tree({"a": Rows(torch.tensor([0, 2**31 - 2]), torch.ones(2, 1), 2**31 - 1)}))
    assert (tree["a"].size, tree["a"].index.tolist()) == (2**31 - 1, [0, 2**31 - 2])


def test_a_header_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(wire.Malformed, match="A header has at most 1,048,576 bytes"):
        wire.encode_letter({"x": "a" * wire.HEADER_BYTES})
    with pytest.raises(ValueError, match="not JSON compliant"):
        wire.encode_letter({"x": float("nan")})


METHOD = FedMF(factors=2)
SHARED = METHOD.init_shared(Catalogue(5), Rng.of(0))


def test_what_an_update_looks_like() -> None:
    wanted = wire.expected(METHOD, SHARED, Catalogue(5))
    assert wanted == {"item": wire.Expected((2,), 5, torch.float32)}
    noisy = FedMF(factors=2, uplink=Channel(Clip(1.0, order=1), Laplace(1.0)))
    assert wire.expected(noisy, SHARED, Catalogue(5)) == {"item": wire.Expected((5, 2), None, torch.float32)}


def rows(count: int = 2, value: Any = None) -> Tree:
    return {"item": Rows(torch.arange(count), torch.ones(count, 2) if value is None else value, 5)}


WANTED = {"item": wire.Expected((2,), 5, torch.float32)}


@pytest.mark.parametrize(
    "good",
    [
        rows(),
        rows(0),
        rows(value=torch.full((2, 2), 10.0)),
        rows(value=torch.full((2, 2), -10.0)),
        rows(value=torch.ones(2, 2).half()),
        {"item": Rows(torch.zeros(900, dtype=torch.int64), torch.ones(900, 2), 5)},
    ],
)
def test_a_good_update_passes(good: Tree) -> None:
    wire.check(good, WANTED, 10.0)
    assert len(wire.encode_tree(good)) < wire.longest(WANTED)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({}, "other names"),
        ({**rows(), "b": torch.ones(1)}, "other names"),
        ({"item": torch.ones(5, 2)}, "another shape"),
        ({"item": Rows(torch.arange(2), torch.ones(2, 3), 5)}, "another shape"),
        ({"item": Rows(torch.arange(2), torch.ones(2), 5)}, "another shape"),
        ({"item": Rows(torch.arange(2), torch.ones(2, 2), 6)}, "another shape"),
        (rows(value=torch.ones(2, 2, dtype=torch.int32)), "another kind"),
        (rows(value=torch.ones(2, 2, dtype=torch.bool)), "another kind"),
        (rows(value=torch.tensor([[1, 1], [1, float("nan")]])), "not finite"),
        (rows(value=torch.tensor([[1, 1], [1, -float("inf")]])), "not finite"),
        (rows(value=torch.tensor([[1, 1], [1, 10.1]])), "over 10"),
        (rows(value=torch.ones(2, 2, dtype=torch.float64)), "another kind"),
        ({"item": Rows(torch.zeros(70_000, dtype=torch.int64), torch.ones(70_000, 2), 5)}, "more rows than its table"),
    ],
)
def test_a_bad_update_is_refused(bad: Tree, said: str) -> None:
    with pytest.raises(wire.Malformed, match=said):
        wire.check(bad, WANTED, 10.0)


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1, 11, -11])
def test_whole_numbers_are_bounded_too(number: int) -> None:
    wanted = {"count": wire.Expected((1,), None, torch.int64)}
    wire.check({"count": torch.tensor([-10])}, wanted, 10.0)
    with pytest.raises(wire.Malformed, match="over 10"):
        wire.check({"count": torch.tensor([number])}, wanted, 10.0)
    with pytest.raises(wire.Malformed, match="another kind"):
        wire.check({"count": torch.tensor([1], dtype=torch.int8)}, wanted, 10.0)


def test_rows_may_be_counted_over_all_tables() -> None:
    wanted = {name: wire.Expected((), 4, torch.bool) for name in "ab"}
    update = {name: Rows(torch.tensor([1, 1]), torch.tensor([True, True]), 4) for name in "ab"}
    wire.check(update, wanted, 1.0, 4)
    with pytest.raises(wire.Malformed, match="more rows than its channel lets through"):
        wire.check(update, wanted, 1.0, 3)


def test_a_digest_names_bytes() -> None:
    assert wire.digest(b"a") == wire.digest(b"a") != wire.digest(b"b")
    assert len(wire.digest(b"")) == 32
