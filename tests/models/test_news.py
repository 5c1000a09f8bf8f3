"""The encoders of news and of their readers, against torch's own layers with the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from homebody.core import Catalogue, Column, Tree
from homebody.errors import HomebodyError
from homebody.models.minilm import LAYERS, WIDTH, layer_start, through_layers, whole
from homebody.models.news import (
    ENCODERS,
    NAML,
    NRMS,
    PLM,
    USER_ENCODERS,
    MeanUser,
    NAMLUser,
    NewsById,
    NewsEncoder,
    NRMSUser,
    encode_many,
    filled,
    item_numbers,
    looked_up,
    principal_axes,
)
from homebody.ops import dropout_mask
from homebody.rng import Rng

N, D, E, QUERY, HEADS = 7, 12, 8, 5, 3
RNG = Rng.of(3)


def codes(width: int, size: int, name: str) -> Tensor:
    """Titles of different lengths; the last news item has no words."""
    drawn = (RNG.fold(name).uniform(N, width) * (size - 1)).long() + 1
    length = torch.arange(N) % width + 1
    length[-1] = 0
    return torch.where(torch.arange(width) < length[:, None], drawn, -1)


def catalogue() -> Catalogue:
    titles = Column(codes(5, 6, "title"), 6, "sequence", True, words=("ash", "cat", "dog", "elk", "fox"))
    bodies = Column(codes(9, 5, "body"), 5, "sequence", True, words=("bee", "cat", "dog", "gnu"))
    topics = Column(torch.tensor([1, 2, 0, 1, 3, 2, 1]), 4, "one")
    return Catalogue(N, {"title": titles, "body": bodies, "category": topics})


NEWS = catalogue()
ENCODER: dict[str, NewsEncoder] = {
    "id": NewsById(d=D),
    "nrms": NRMS(d=D, query=QUERY, width=E, heads=HEADS),
    "naml": NAML(d=D, query=QUERY, width=E),
    "plm": PLM(d=D),
}


def inputs(encoder: NewsEncoder) -> Tree:
    if isinstance(encoder, PLM):
        return {"plm": torch.cat([RNG.fold("plm").normal(N, 384), torch.zeros(1, 384)])}
    return encoder.inputs(NEWS)


def start(encoder: NewsEncoder) -> Tree:
    words = encoder.words(NEWS)
    shared = encoder.start(NEWS, RNG, RNG.fold("table").normal(len(words) + 1, E) if words else None)
    # Nothing is 0, so that every parameter shows.
    return {name: value + 0.1 * RNG.fold("move", name).normal(*value.shape) for name, value in shared.items()}


def rows(given: Tree, chosen: Tensor) -> Tree:
    return {name: value[chosen] for name, value in given.items()}


def additive(x: Tensor, part: Tree, name: str) -> Tensor:
    """Additive attention of one sequence, with torch's linear layers."""
    first, second = nn.Linear(x.shape[-1], QUERY), nn.Linear(QUERY, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(part[f"{name}/weight"].T)
        first.bias.copy_(part[f"{name}/offset"])
        second.weight.copy_(part[f"{name}/query"][None])
        return second(first(x).tanh()).softmax(0).mT @ x


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """Self-attention of one sequence with nn.MultiheadAttention; narrower inputs are padded with zeros."""
    layer = nn.MultiheadAttention(D, HEADS, bias=False, batch_first=True)
    wide = torch.zeros(len(x), D)
    wide[:, : x.shape[1]] = x
    with torch.no_grad():
        layer.in_proj_weight.zero_()
        layer.in_proj_weight[:, : x.shape[1]] = weight.T
        layer.out_proj.weight.copy_(torch.eye(D))
        return layer(wide[None], wide[None], wide[None])[0][0]


def words(encoder: NewsEncoder, shared: Tree, name: str, item: int) -> Tensor:
    """The vectors of one text's words, found by the words themselves."""
    column, known = NEWS.items[name], encoder.words(NEWS)
    read = [column.words[code - 1] for code in column.values[item].tolist() if code > 0]
    return torch.stack([shared["news/word"][known.index(word) + 1] for word in read])


def test_nrms_equals_torchs_layers() -> None:
    encoder = ENCODER["nrms"]
    shared = start(encoder)
    found = encoder.encode(shared, inputs(encoder))
    assert found.shape == (N + 1, D)
    for item in range(N - 1):
        seen = heads(words(encoder, shared, "title", item), shared["news/attention"])
        torch.testing.assert_close(found[item], additive(seen, shared, "news/pool")[0], atol=1e-5, rtol=1e-4)
    assert not found[N - 1 :].any()


def test_nrms_equals_torchs_layers_at_its_own_size() -> None:
    encoder = NRMS()
    assert (encoder.d, encoder.heads, encoder.query, encoder.width) == (400, 20, 200, 50)
    shared = encoder.start(NEWS, RNG, 0.4 * RNG.fold("glove").normal(len(encoder.words(NEWS)) + 1, 50))
    assert {name: tuple(value.shape) for name, value in shared.items()} == {
        "news/word": (6, 50),
        "news/attention": (50, 1200),
        "news/pool/weight": (400, 200),
        "news/pool/offset": (200,),
        "news/pool/query": (200,),
    }
    layer = nn.MultiheadAttention(400, 20, bias=False, batch_first=True)
    x = torch.zeros(1, 3, 400)
    x[0, :, :50] = shared["news/word"][[1, 5, 2]]
    with torch.no_grad():
        layer.in_proj_weight.zero_()
        layer.in_proj_weight[:, :50] = shared["news/attention"].T
        layer.out_proj.weight.copy_(torch.eye(400))
        seen = layer(x, x, x)[0][0]
    fit = (seen @ shared["news/pool/weight"]).tanh() @ shared["news/pool/query"]
    found = encoder.encode(shared, {"words/title": torch.tensor([[1, 5, 2, -1, -1]])})[0]
    torch.testing.assert_close(found, fit.softmax(0) @ seen, atol=1e-4, rtol=1e-4)


def test_naml_equals_torchs_layers() -> None:
    encoder = ENCODER["naml"]
    shared = start(encoder)
    found = encoder.encode(shared, inputs(encoder))
    for item in range(N):
        views = []
        for name in ("title", "body") if item < N - 1 else ():
            layer = nn.Conv1d(E, D, kernel_size=3, padding=1)
            with torch.no_grad():
                layer.weight.copy_(shared[f"news/{name}/filter"].reshape(3, E, D).permute(2, 1, 0))
                layer.bias.copy_(shared[f"news/{name}/offset"])  # type: ignore[union-attr]
                seen = layer(words(encoder, shared, name, item).T[None])[0].T.relu()
            views.append(additive(seen, shared, f"news/{name}/pool"))
        dense = nn.Linear(100, D)
        with torch.no_grad():
            dense.weight.copy_(shared["news/category/weight"].T)
            dense.bias.copy_(shared["news/category/offset"])
            row = shared["news/category/table"][NEWS.items["category"].values[item]]
            views.append(dense(row).relu()[None])
        expected = additive(torch.cat(views), shared, "news/views")[0]
        torch.testing.assert_close(found[item], expected, atol=1e-5, rtol=1e-4)
    assert not found[N].any()


def test_views_that_the_data_does_not_have_are_left_out() -> None:
    encoder = ENCODER["naml"]
    title = Catalogue(N, {"title": NEWS.items["title"]})
    assert list(encoder.inputs(title)) == ["words/title"]
    shared = encoder.start(title, RNG, RNG.normal(6, E))
    assert encoder.encode(shared, encoder.inputs(title)).shape == (N + 1, D)
    assert not any("body" in name or "category" in name for name in shared)
    abstract = Catalogue(N, {"title": NEWS.items["title"], "abstract": NEWS.items["body"], "year": NEWS.items["title"]})
    assert list(encoder.inputs(abstract)) == ["words/title", "words/abstract"]


def test_ids_and_language_models_by_hand() -> None:
    encoder, shared = ENCODER["id"], start(ENCODER["id"])
    found = encoder.encode(shared, inputs(encoder))
    assert torch.equal(found[:N], shared["news/item"])
    assert not found[N].any()
    encoder, shared = ENCODER["plm"], start(ENCODER["plm"])
    given = inputs(encoder)
    layer = nn.Linear(384, D)
    with torch.no_grad():
        layer.weight.copy_(shared["news/weight"].T)
        layer.bias.copy_(shared["news/offset"])
        torch.testing.assert_close(encoder.encode(shared, given)[:N], layer(given["plm"][:N]), atol=1e-5, rtol=1e-4)
    assert not encoder.encode(shared, given)[N].any()


def test_a_language_models_layer_starts_with_the_principal_axes_of_its_texts() -> None:
    """Against torch's SVD: news differ from one another as the texts do, and their mean is 0."""
    texts = RNG.fold("texts").normal(30, WIDTH) * torch.linspace(2, 0, WIDTH) + 1
    shared = PLM(d=12).start(Catalogue(30), RNG, texts)
    news = PLM(d=12).encode(shared, {"plm": texts})
    left, values, _ = torch.linalg.svd(texts - texts.mean(0), full_matrices=False)
    kept = left[:, :12] * values[:12]
    torch.testing.assert_close(news @ news.T, 1.25**2 * kept @ kept.T, atol=1e-2, rtol=1e-4)
    torch.testing.assert_close(news.mean(0), torch.zeros(12), atol=1e-4, rtol=0)
    # Numbers beyond the texts' own 384 start as those of any layer.
    wide, random = (PLM(d=400).start(Catalogue(30), RNG, words)["news/weight"] for words in (texts, None))
    assert torch.equal(wide[:, 384:], random[:, 384:])
    axes = principal_axes(texts, 400)[1]
    torch.testing.assert_close(axes.T @ axes, torch.eye(384), atol=1e-5, rtol=0)
    assert (axes.gather(0, axes.abs().argmax(0, keepdim=True)) > 0).all()


def test_the_gradient_of_a_looked_up_table_is_the_same_on_any_number_of_threads() -> None:
    table, codes = RNG.fold("table").normal(300, 50), RNG.fold("codes").integers(300, 40_000).view(2_000, 20)
    codes[0, 0] = -1
    slope = RNG.fold("slope").normal(2_000, 20, 50)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4, 4, 4):
            torch.set_num_threads(threads)
            found.append(grad(lambda table: (looked_up(table, codes) * slope).sum())(table))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], one) for one in found)
    by_hand = torch.zeros(300, 50)
    for code, one in zip(codes.flatten().tolist()[1:], slope.flatten(0, 1)[1:], strict=True):
        by_hand[code] += one
    torch.testing.assert_close(found[0], by_hand)


def test_top_layers_of_a_language_model_are_those_of_the_whole_model() -> None:
    """Two layers below that stay as they are, and two above that are trained, are the four one after another."""
    layers, encoder = range(LAYERS - 4, LAYERS), PLM(d=D, layers=2)
    weights = {
        name: 0.05 * RNG.fold(name).normal(*empty.shape) + (1.0 if name.endswith("LayerNorm.weight") else 0.0)
        for layer in layers
        for name, empty in layer_start(layer, "cpu").items()
    }
    real = torch.arange(4) < torch.tensor([4, 2, 1, 0])[:, None]
    x = RNG.fold("pieces").normal(4, 4, WIDTH)
    below = through_layers(weights, x, real, layers[:2])
    shared = start(encoder) | {
        f"news/{name}": weights[name] for layer in encoder.trained for name in layer_start(layer, "meta")
    }
    found = encoder.encode(shared, {"plm/states": below, "plm/real": real})
    vectors = whole(through_layers(weights, x, real, layers), real)
    finished = PLM(d=D).encode(shared, {"plm": vectors})
    torch.testing.assert_close(found[:3], finished[:3], atol=1e-5, rtol=1e-4)
    assert not found[3].any()  # no text at all
    assert (encoder.light, PLM(d=D).light) == (False, True)
    # Every parameter has a gradient, in parts and at once, also beside a row without text.
    given = {"plm/states": below, "plm/real": real}
    _, slopes = encode_many(encoder, shared, given, at_once=3)
    change = slopes(RNG.fold("slope").normal(4, D))
    assert change.keys() == shared.keys()
    assert all(bool(value.isfinite().all()) and bool(value.any()) for value in change.values())


@pytest.mark.parametrize("name", ENCODERS)
def test_padding_of_texts_does_not_matter(name: str) -> None:
    encoder = ENCODER[name]
    shared, given = start(encoder), inputs(encoder)
    longer = {
        key: torch.cat([value, torch.full_like(value[:, :3], -1)], 1) if key.startswith("words/") else value
        for key, value in given.items()
    }
    torch.testing.assert_close(encoder.encode(shared, longer), encoder.encode(shared, given), atol=1e-6, rtol=1e-5)


def loss(encoder: NewsEncoder, reader: str, shared: Tree, batch: Tree) -> Tensor:
    """A person's loss: the first of three candidates was clicked."""
    given = {name.removeprefix("news:"): value for name, value in batch.items() if name.startswith("news:")}
    news = encoder.encode(shared, given)
    history, real = filled(news[3:], batch["real"], shared["user/empty"], batch["hidden"])
    person = {"mean": MeanUser(D), "naml": NAMLUser(D, QUERY), "nrms": NRMSUser(D, QUERY, HEADS)}[reader]
    fit = news[:3] @ person.encode(shared, history, real)
    return fit.logsumexp(0) - fit[0]


def people(encoder: NewsEncoder, dropout: float) -> Tree:
    """Three people: one of four news items, one of two, one of none."""
    given, batches = inputs(encoder), []
    for person in range(3):
        rng = RNG.fold("person", person)
        chosen = (rng.uniform(7) * N).long()
        own = rows(given, torch.where(torch.arange(7) < 7 - 2 * person, chosen, N))
        own |= encoder.masks(rng, dropout, own) if dropout else {}
        real = torch.arange(4) < 4 - 2 * person
        hidden = rng.uniform(4) < 0.3
        batches.append({**{f"news:{name}": value for name, value in own.items()}, "real": real, "hidden": hidden})
    return {name: torch.stack([one[name] for one in batches]) for name in batches[0]}


@pytest.mark.parametrize("reader", USER_ENCODERS)
@pytest.mark.parametrize("name", ENCODERS)
def test_gradients_are_finite_and_many_at_once_equal_each_alone(name: str, reader: str) -> None:
    encoder = ENCODER[name]
    readers = {"mean": MeanUser(D), "naml": NAMLUser(D, QUERY), "nrms": NRMSUser(D, QUERY, HEADS)}
    shared = {**start(encoder), **readers[reader].start(RNG), "user/empty": RNG.fold("r0").normal(D)}
    batches = people(encoder, dropout=0.2)
    slopes = vmap(grad(lambda one, batch: loss(encoder, reader, one, batch)), in_dims=(None, 0))(shared, batches)
    for person in range(3):
        alone = {name: value.clone().requires_grad_() for name, value in shared.items()}
        value = loss(encoder, reader, alone, {key: part[person] for key, part in batches.items()})
        value.backward()  # type: ignore[no-untyped-call]
        for key, part in alone.items():
            expected = torch.zeros_like(part) if part.grad is None else part.grad
            assert torch.isfinite(expected).all()
            atol = 1e-5 * max(1.0, float(expected.abs().max()))  # many at once add up in another order
            torch.testing.assert_close(slopes[key][person], expected, atol=atol, rtol=1e-4)
    assert slopes["user/empty"][2].any()


@pytest.mark.parametrize("reader", USER_ENCODERS)
def test_padding_of_a_history_does_not_matter(reader: str) -> None:
    person = {"mean": MeanUser(D), "naml": NAMLUser(D, QUERY), "nrms": NRMSUser(D, QUERY, HEADS)}[reader]
    shared, empty = person.start(RNG), RNG.fold("r0").normal(D)
    news = RNG.fold("history").normal(3, D)
    alone = person.encode(shared, *filled(news, torch.ones(3, dtype=torch.bool), empty))
    padded = torch.cat([news, torch.full((4, D), 9.0)])
    found = person.encode(shared, *filled(padded, torch.arange(7) < 3, empty))
    torch.testing.assert_close(found, alone, atol=1e-6, rtol=1e-5)
    # Somebody without any news is somebody who read r₀, however long the padding is.
    nobody = person.encode(shared, *filled(padded, torch.zeros(7, dtype=torch.bool), empty))
    torch.testing.assert_close(nobody, person.encode(shared, empty[None], torch.tensor([True])), atol=1e-6, rtol=1e-5)
    hidden = filled(news, torch.ones(3, dtype=torch.bool), empty, torch.tensor([False, True, False]))
    expected = torch.stack([news[0], empty, news[2]])
    assert torch.equal(hidden[0], expected)
    assert hidden[1].all()


def test_readers_equal_torchs_layers() -> None:
    news = RNG.fold("history").normal(4, D)
    real = torch.ones(4, dtype=torch.bool)
    shared = NRMSUser(D, QUERY, HEADS).start(RNG)
    shared["user/pool/offset"] = RNG.fold("offset").normal(QUERY)
    expected = additive(heads(news, shared["user/attention"]), shared, "user/pool")[0]
    found = NRMSUser(D, QUERY, HEADS).encode(shared, news, real)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    found = NAMLUser(D, QUERY).encode(shared, news, real)
    torch.testing.assert_close(found, additive(news, shared, "user/pool")[0], atol=1e-5, rtol=1e-4)


@pytest.fixture(params=["at once", "in parts"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether memory suffices for all news of `encode_many`."""
    if request.param == "in parts":
        monkeypatch.setattr("homebody.models.news.KEPT", 0)
    return str(request.param)


@pytest.mark.parametrize("name", ENCODERS)
def test_news_encoded_in_parts_equal_news_encoded_at_once(name: str, how: str) -> None:
    encoder = ENCODER[name]
    shared, given = start(encoder), inputs(encoder)
    given |= encoder.masks(RNG.fold("masks"), 0.3, given)
    weight = RNG.fold("weight").normal(N + 1, D)
    vectors, slopes = encode_many(encoder, {**shared, "user/other": weight}, given, at_once=3)
    assert_close = torch.testing.assert_close
    assert_close(vectors, encoder.encode(shared, given), atol=1e-5, rtol=1e-4)
    expected = grad(lambda own: (encoder.encode(own, given) * weight).sum())(shared)
    found = slopes(weight)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_close(found[key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["nrms", "naml", "plm"])
def test_own_vectors_are_added_to_what_the_text_says(name: str, how: str) -> None:
    encoder = replace(ENCODER[name], ids=True)
    given = {**inputs(ENCODER[name]), "own": item_numbers(NEWS)}
    shared = {**start(ENCODER[name]), "news/own": torch.zeros(N, D)}
    plain = ENCODER[name].encode(shared, inputs(ENCODER[name]))
    assert torch.equal(encoder.encode(shared, given), plain)  # they start at 0
    shared["news/own"] = RNG.fold("own").normal(N, D)
    torch.testing.assert_close(encoder.encode(shared, given)[:N], plain[:N] + shared["news/own"])
    assert not encoder.encode(shared, given)[N].any()
    assert (encoder.user, encoder.light) == (ENCODER[name].user, ENCODER[name].light)
    assert encoder.words(NEWS) == ENCODER[name].words(NEWS)
    assert encoder.masks(RNG, 0.2, given).keys() == ENCODER[name].masks(RNG, 0.2, given).keys()
    vectors, slopes = encode_many(encoder, shared, given, at_once=3)
    torch.testing.assert_close(vectors, encoder.encode(shared, given), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(slopes(torch.ones(N + 1, D))["news/own"], torch.ones(N, D))


@pytest.mark.parametrize("name", ENCODERS)
def test_parts_are_encoded_once_and_once_more_for_the_gradient(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, sizes = ENCODER[name], list[int]()
    encode = type(encoder).encode

    def watched(self: NewsEncoder, shared: Tree, given: Tree) -> Tensor:
        sizes.append(len(next(iter(given.values()))))
        return encode(self, shared, given)

    monkeypatch.setattr(type(encoder), "encode", watched)
    vectors, slopes = encode_many(encoder, start(encoder), inputs(encoder), at_once=3)
    slopes(torch.ones_like(vectors))
    assert sizes == ([N + 1] if how == "at once" else [3, 3, 2] * 2)


def test_touched_rows_stand_in_for_the_whole_table() -> None:
    """A client may give the rows that it reads, with codes that number them."""
    encoder = ENCODER["nrms"]
    shared, given = start(encoder), inputs(encoder)
    index, slot = torch.unique(given["words/title"].clamp(min=0), return_inverse=True)
    slot = torch.where(given["words/title"] >= 0, slot, -1)
    found = encoder.encode({**shared, "news/word": shared["news/word"][index]}, {"words/title": slot})
    assert torch.equal(found, encoder.encode(shared, given))


def test_dropout_masks_keep_the_mean_and_depend_on_the_stream_alone() -> None:
    """500,000 draws: the share of zeros has a standard deviation of 0.0006, so 0.003 is five of them."""
    mask = dropout_mask(Rng.of(1), 0.2, 1000, 20, 25)
    assert abs((mask == 0).float().mean().item() - 0.2) < 0.003
    assert mask.unique().tolist() == pytest.approx([0.0, 1.25])
    assert torch.equal(dropout_mask(Rng.of(1), 0.2, 10, 20, 25), mask[:10])
    assert not torch.equal(dropout_mask(Rng.of(2), 0.2, 10, 20, 25), mask[:10])
    assert dropout_mask(Rng.of(1), 0.2, 3, 5).shape == (3, 5)


@pytest.mark.parametrize("name", ["nrms", "naml", "plm"])
def test_each_person_draws_masks_of_their_own_many_at_once_or_alone(name: str) -> None:
    encoder, given = ENCODER[name], inputs(ENCODER[name])
    streams = Rng.of(4).fold(torch.arange(3)).key
    chosen = torch.arange(15).reshape(3, 5) % (N + 1)
    many = vmap(lambda key, own: encoder.masks(Rng(key), 0.2, rows(given, own)))(streams, chosen)
    for person in range(3):
        alone = encoder.masks(Rng(streams[person]), 0.2, rows(given, chosen[person]))
        assert all(torch.equal(many[key][person], mask) for key, mask in alone.items())
    assert not any(torch.equal(mask[0], mask[1]) for mask in many.values())


def test_dropout_scales_what_it_keeps() -> None:
    encoder, shared = ENCODER["plm"], start(ENCODER["plm"])
    given = inputs(encoder)
    masks = encoder.masks(RNG.fold("masks"), 0.5, given)
    expected = (given["plm"] * masks["keep/plm"]) @ shared["news/weight"] + shared["news/offset"]
    torch.testing.assert_close(encoder.encode(shared, {**given, **masks})[:N], expected[:N])
    masks = ENCODER["naml"].masks(RNG, 0.5, inputs(ENCODER["naml"]))
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {
        "keep/words/title": (N + 1, 5, E),
        "keep/seen/title": (N + 1, 5, D),
        "keep/words/body": (N + 1, 9, E),
        "keep/seen/body": (N + 1, 9, D),
    }


def test_errors_are_sentences() -> None:
    with pytest.raises(HomebodyError, match=r"these items have none: give --item-features FILE .* or choose"):
        NRMS().inputs(Catalogue(3))
    text = NEWS.items["title"]._replace(kind="many")
    with pytest.raises(HomebodyError, match=r"have it without the order of its words.*--kind title=sequence"):
        NAML().words(Catalogue(N, {"title": text}))
    with pytest.raises(HomebodyError, match="10 numbers cannot be shared out among 3 heads"):
        NRMS(d=10, heads=3)
    with pytest.raises(HomebodyError, match="have 8 numbers, and the encoder nrms reads 50: set its width to 8"):
        NRMS().start(NEWS, RNG, torch.ones(6, 8))
    with pytest.raises(HomebodyError, match="starts from word vectors"):
        replace(NAML(), width=3).start(NEWS, RNG)
    with pytest.raises(HomebodyError, match="news_inputs"):
        PLM().inputs(NEWS)
