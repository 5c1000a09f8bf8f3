"""What a service answers: to devices, to people and to its operator."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import PATIENCE, wait_until
from tests.serving.conftest import Answer, Running, films, news
from torch import Tensor

from homebody.errors import HomebodyError
from homebody.rng import Rng
from homebody.serving.client import LETTER, Offer, RefusedRequest, head_path, list_path, query_body
from homebody.serving.model_file import Model
from homebody.serving.openapi import ENDPOINTS
from homebody.serving.operator import add, add_token, install, remove, remove_token

Serve = Callable[..., Running]


def rows(answer: Answer) -> list[str]:
    return [item["id"] for item in answer.said["items"]]


def fits(found: Any, model: Model, told: Tensor) -> bool:
    """Whether these are the best items, with their scores; of equal ones it may be others."""
    scores = model.served.places @ model.served.head.heard(told)
    number = {id_: place for place, id_ in enumerate(model.served.ids)}
    assert [score for _, score in found] == pytest.approx(scores.topk(len(found)).values.tolist(), rel=1e-5)
    assert [score for _, score in found] == pytest.approx([float(scores[number[id_]]) for id_, _ in found], rel=1e-5)
    return len({id_ for id_, _ in found}) == len(found) == 20


class TestWhatDevicesFetch:
    def test_a_service_says_what_it_offers(self, served: Serve) -> None:
        model = films()
        offer = served(model).client.model()
        assert offer == Offer(
            model.digest, 2, 300, "choice:epsilon=5,interests=6", ("table", "shelf", "query"), 40, 6, 0,
            offer.table_bytes,
        )  # fmt: skip
        assert offer.table_bytes == pytest.approx(len(served(films(), name="other").client.get("/v1/table")), rel=0.2)

    def test_a_head_never_changes(self, served: Serve) -> None:
        model, here = films(), served(films())
        answer = here.ask("GET", head_path(model.digest))
        assert (answer.body, answer.headers["content-type"]) == (model.served.head.content, LETTER)
        assert "immutable" in answer.headers["cache-control"]
        assert here.client.head(model.digest).digest == model.digest
        assert here.ask("GET", head_path(model.digest), if_none_match=answer.headers["etag"]).status == 304

    def test_shelf_and_lists_are_those_of_the_model(self, served: Serve) -> None:
        model, client = films(), served(films()).client
        assert client.shelf().items.tolist() == model.served.shelf(40).tolist()
        assert client.shelf(half=True).items.tolist() == model.served.shelf(20).tolist()
        lists = [client.list(model.digest, choice) for choice in range(6)]
        assert [part.items.tolist() for part in lists] == model.served.lists(20).tolist()
        expected = model.served.rows(lists[0].items)
        torch.testing.assert_close(lists[0].rows["item"], expected.rows["item"])
        assert (lists[0].ids, lists[0].whole.keys()) == (expected.ids, expected.whole.keys())

    def test_the_table_has_every_row_and_then_what_changed(self, served: Serve) -> None:
        here = served(films())
        table, version = here.client.table(), here.client.model().version
        assert (len(table.part), table.since, table.removed) == (300, None, ())
        assert here.client.table(version).part.ids == ()
        item = {"id": "new", "vector": [1.0] * 16}
        assert here.ask("POST", "/v1/items", {"items": [item]}, here.operator).said["version"] == version + 1
        assert here.ask("DELETE", "/v1/items/film-3", token=here.operator).said["version"] == version + 2
        changed = here.client.table(version)
        assert (changed.part.ids, changed.removed, changed.since) == (("new",), ("film-3",), version)
        assert here.client.table(version + 1).part.ids == ()
        assert here.client.table(1).since is None  # of a model before: all rows
        whole = here.client.table()
        assert len(whole.part) == 300
        assert "film-3" not in whole.part.ids

    def test_a_table_that_is_too_large_is_refused(self, served: Serve) -> None:
        here = served(films(), table_bytes=1000)
        assert here.client.model().ways == ("shelf", "query")
        with pytest.raises(RefusedRequest, match=r"about 1\d,\d{3} bytes, and 1,000 are sent: take the shelf"):
            here.client.table()

    def test_answers_may_be_kept_and_come_anew_once_they_changed(self, served: Serve) -> None:
        here = served(films())
        first = here.ask("GET", "/v1/shelf")
        assert first.headers["cache-control"] == "public, max-age=60"
        assert here.ask("GET", "/v1/shelf", if_none_match=first.headers["etag"]).status == 304
        letter = here.ask("GET", "/v1/shelf", accept=LETTER)
        assert letter.headers["etag"] != first.headers["etag"]
        kept = here.client.get("/v1/shelf")
        assert here.client.get("/v1/shelf") is kept
        here.ask("DELETE", f"/v1/items/{rows(first)[0]}", token=here.operator)
        again = here.ask("GET", "/v1/shelf", if_none_match=first.headers["etag"])
        assert (again.status, rows(again)[:39]) == (200, rows(first)[1:])
        assert here.client.get("/v1/shelf") != kept

    def test_a_list_shows_its_choice_by_no_length(self, served: Serve) -> None:
        here = served(films())
        model = here.client.model().model
        for accept in ("*/*", LETTER):
            answers = [here.ask("GET", list_path(model, choice), accept=accept) for choice in range(6)]
            assert len({answer.body for answer in answers}) == 6
            assert len({len(answer.body) + len(str(answer.headers)) for answer in answers}) == 1
        assert len({list_path(model, choice) for choice in range(6)}) == 6
        before = here.client.get(list_path(model, 2))
        assert here.client.get(list_path(model, 2)) is not before  # a 304 would be shorter

    def test_a_catalogue_smaller_than_the_shelf(self, served: Serve) -> None:
        client = served(films(25)).client
        assert len(client.shelf()) == 25
        model = client.model().model
        assert {len(client.list(model, choice)) for choice in range(6)} == {5}
        assert len({len(client.get(list_path(model, choice))) for choice in range(6)}) == 1

    def test_a_service_without_queries(self, served: Serve) -> None:
        here = served(films(query=""))
        offer = here.client.model()
        assert (offer.query, offer.ways, offer.choices) == ("", ("table", "shelf"), 0)
        with pytest.raises(RefusedRequest, match="Lists are named by three digits, of which there are none here"):
            here.client.list(offer.model, 0)
        with pytest.raises(RefusedRequest, match="Nothing is ranked here: take the table, the shelf or a list"):
            here.client.query(offer.model, torch.ones(5))


class TestQueries:
    def test_the_service_ranks_what_a_mechanism_told(self, served: Serve) -> None:
        model = news()
        here, told = served(model), torch.tensor([0.9, -0.2, 0.1, 0.0, 0.3])
        found = here.client.query(model.digest, told)
        assert fits(found, model, told)
        said = here.ask("POST", "/v1/query", {"model": model.digest, "told": told.tolist()}).said
        assert [entry["id"] for entry in said["ranked"]] == [item for item, _ in found]
        assert (said["model"], said["version"]) == (model.digest, 2)

    @pytest.mark.parametrize(
        "query", ["unit:epsilon=4", "vector:epsilon=4", "attention:epsilon=5,interests=5,delta=0.001"]
    )
    def test_every_mechanism_is_heard(self, served: Serve, query: str) -> None:
        model = news(query=query)
        here, head = served(model), model.served.head
        told = head.tell(torch.ones(head.size), Rng.of(3))
        assert fits(here.client.query(model.digest, told), model, told)

    def test_rows_come_for_what_a_mechanism_told(self, served: Serve) -> None:
        model = films(query="unit:epsilon=5")
        here, draw = served(model), Rng.of(0).normal(20, model.served.head.size)
        shelf = here.client.shelf(half=True)
        for told in draw:
            part = here.client.chosen(model.digest, told)
            ranked = [model.served.ids[item] for item in model.served.ask(told, 40)[0].tolist()]
            assert list(part.ids) == [item for item in ranked if item not in shelf.ids][: len(part)]
            assert len(part) == here.client.model().rows - len(shelf)
        answers = [here.client.post(query_body(model.digest, told), accept=LETTER) for told in draw]
        assert len({len(answer) for answer in answers}) == 1
        with pytest.raises(RefusedRequest, match="Nothing is ranked here"):
            here.client.query(model.digest, draw[0])

    def test_the_rows_of_a_choice_are_a_list(self, served: Serve) -> None:
        model = films()
        with pytest.raises(RefusedRequest, match="The rows of a choice are a list: take /v1/lists"):
            served(model).client.chosen(model.digest, torch.tensor(1, dtype=torch.int32))

    def test_a_choice_is_ranked_by_the_chances_of_all(self, served: Serve) -> None:
        model = news(query="choice:epsilon=5,interests=5")
        here = served(model)
        for choice in range(5):
            told = torch.tensor(choice, dtype=torch.int32)
            assert fits(here.client.query(model.digest, told), model, told)

    def test_queries_and_answers_have_one_length(self, served: Serve) -> None:
        model = news()
        here, draw = served(model), Rng.of(0).normal(50, 5)
        bodies = [query_body(model.digest, told) for told in draw]
        assert len({len(body) for body in bodies}) == 1
        answers = [here.ask("POST", "/v1/query", body, content_type=LETTER) for body in bodies]
        assert len({len(answer.body) + len(str(answer.headers)) for answer in answers}) == 1
        assert {answer.headers["cache-control"] for answer in answers} == {"no-store"}

    def test_many_at_once_are_answered_as_one_by_one(self, served: Serve) -> None:
        model = news()
        here, draw = served(model), Rng.of(0).normal(40, 5)

        def ask(told: Any) -> bytes:
            return here.ask("POST", "/v1/query", query_body(model.digest, told), content_type=LETTER).body

        alone = [ask(told) for told in draw]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, draw)) == alone

    def test_nothing_of_a_query_is_logged_or_kept(self, served: Serve, capfd: pytest.CaptureFixture[str]) -> None:
        model = news()
        here = served(model)
        before = {path: path.read_bytes() for path in here.folder.rglob("*") if path.is_file()}
        here.client.query(model.digest, torch.tensor([0.123456, 0, 0, 0, 0]))
        here.ask("POST", "/v1/query", {"model": model.digest, "told": [0.123456]})
        here.ask("POST", "/v1/query", {"model": "secret"})
        assert {path: path.read_bytes() for path in here.folder.rglob("*") if path.is_file()} == before
        logged = capfd.readouterr().err
        assert all(text not in logged for text in ("0.123", "secret", "127.0.0.1", "query"))


class TestItems:
    def test_news_are_encoded_when_they_come(self, served: Serve) -> None:
        model = news()
        here = served(model)
        title = model.served.catalogue.items["title"].values[7]
        words = " ".join(model.served.catalogue.items["title"].words[word - 1] for word in title.tolist() if word > 0)
        item = {"id": "late", "name": "Late news", "features": {"title": words.upper()}}
        here.ask("POST", "/v1/items", {"items": [item]}, here.operator)
        part = here.client.table().part
        both = part.only(torch.tensor([7, 60]))
        assert (both.ids, both.names) == (("n7", "late"), {"late": "Late news"})
        row = both.rows["index/news"]
        torch.testing.assert_close(row[0], row[1])
        told = torch.tensor([0.9, -0.2, 0.1, 0.0, 0.3])
        scores = dict(here.client.query(model.digest, told))
        assert scores.get("late", 0.0) == scores.get("n7", 0.0)

    def test_what_cannot_be_encoded_is_refused(self, served: Serve) -> None:
        here = served(news())
        films_here = served(films(), name="films")
        for one, item, sentence in (
            (here, {"id": "a"}, "'a' has no text: give its features, with a 'title'."),
            (here, {"id": "a", "vector": [1.0] * 4}, "'a' has no text"),
            (films_here, {"id": "a"}, "'a' has no row of this model: give its vector, a list of 16 numbers."),
            (films_here, {"id": "a", "vector": [1.0] * 15}, "a list of 16 numbers"),
            (films_here, {"id": "a", "vector": [1e300] * 16}, "a list of 16 numbers"),
        ):
            answer = one.ask("POST", "/v1/items", {"items": [item]}, one.operator)
            assert answer.status == 422
            assert sentence in answer.said["error"]
        assert films_here.client.model().items == 300

    def test_items_come_all_or_none(self, served: Serve) -> None:
        here = served(films())
        good = {"id": "a/new one", "vector": [1.0] * 16}
        for items, status in (([good, {"id": "film-3", "vector": [1.0] * 16}], 409), ([good, {"id": "b"}], 422)):
            assert here.ask("POST", "/v1/items", {"items": items}, here.operator).status == status
        assert here.ask("POST", "/v1/items", {"items": [good]}, here.operator).status == 200
        assert here.ask("POST", "/v1/items", {"items": [good]}, here.operator).status == 409
        assert here.ask("DELETE", "/v1/items/a%2Fnew%20one", token=here.operator).status == 200
        gone = here.ask("DELETE", "/v1/items/a%2Fnew%20one", token=here.operator)
        assert (gone.status, gone.said) == (404, {"error": "There is no item 'a/new one'."})

    def test_an_item_that_comes_back_is_the_new_one(self, served: Serve) -> None:
        here = served(films())
        first = here.client.shelf().ids[0]
        here.ask("DELETE", f"/v1/items/{first}", token=here.operator)
        item = {"id": first, "vector": [9.0] * 16}
        assert here.ask("POST", "/v1/items", {"items": [item]}, here.operator).status == 200
        shelf = here.client.shelf()
        assert (shelf.ids[0], shelf.items[0].item() >= 300) == (first, True)
        here.close()
        again = served().client.shelf()
        assert (again.ids, again.items.tolist()) == (shelf.ids, shelf.items.tolist())

    def test_an_operators_commands_are_seen_while_it_runs(self, served: Serve, tmp_path: Path) -> None:
        here = served(films())
        lines = [json.dumps({"id": f"new-{n}", "vector": [100.0 + n] * 16}) for n in range(100)]
        (tmp_path / "items.jsonl").write_text("\n".join(lines))
        assert add(here.folder, tmp_path / "items.jsonl") == (100, 3)
        wait_until(lambda: here.client.shelf().ids[0] == "new-99", "the items are in answers")
        assert remove(here.folder, ["new-99", "film-0"]) == 5
        wait_until(lambda: here.client.model().items == 398, "the items are gone")
        assert here.client.shelf().ids[0] == "new-98"

    def test_a_file_of_items_that_is_no_such_file(self, served: Serve, tmp_path: Path) -> None:
        here = served(films())
        for text, sentence in (
            ("{", "is neither JSON nor a JSON object a line"),
            ("[]", "There is no item"),
            ('[{"id": "a", "vectr": []}]', "There is no part of an item 'vectr'; did you mean 'vector'"),
            ('[{"id": "a"}, {"id": "a"}]', "stands there twice"),
        ):
            (tmp_path / "items.json").write_text(text)
            with pytest.raises(HomebodyError, match=sentence):
                add(here.folder, tmp_path / "items.json")


class TestTokens:
    def test_a_service_may_ask_for_tokens(self, served: Serve) -> None:
        here = served(films(), tokens=True)
        refused = here.ask("GET", "/v1/shelf")
        assert refused.status == 401
        assert refused.said["error"].startswith("This needs a token: send it as Authorization: Bearer TOKEN.")
        reader = add_token(here.folder, "ann")
        wait_until(lambda: here.ask("GET", "/v1/shelf", token=reader).status == 200, "the token is known")
        assert here.ask("GET", "/v1/shelf", token=reader).headers["cache-control"].startswith("private")
        assert here.ask("GET", "/v1/shelf", token=reader + "x").status == 401
        assert here.ask("POST", "/v1/query", b"{}").status == 401
        for method, path in (("POST", "/v1/items"), ("DELETE", "/v1/items/film-1")):
            assert here.ask(method, path, {"items": []}, reader).status == 401
        for path in ("/health", "/metrics", "/openapi.json", "/docs"):
            assert here.ask("GET", path).status == 200
        remove_token(here.folder, "ann")
        wait_until(lambda: here.ask("GET", "/v1/shelf", token=reader).status == 401, "the token is forgotten")

    def test_a_token_is_kept_as_a_hash_alone(self, served: Serve) -> None:
        here = served(films())
        files = [path.read_bytes() for path in here.folder.rglob("*") if path.is_file()]
        assert here.operator
        assert all(here.operator.encode() not in content for content in files)
        with pytest.raises(HomebodyError, match="There is a token 'operator' already"):
            add_token(here.folder, "operator")
        with pytest.raises(HomebodyError, match=r"There is no token 'ann' \(operator\)"):
            remove_token(here.folder, "ann")


class TestReload:
    def test_the_model_before_answers_a_while_and_is_then_gone(self, served: Serve) -> None:
        now = [time.time()]
        before, after = films(), films(seed=1, query="choice:epsilon=6,interests=6")
        here = served(before, clock=lambda: now[0])
        mine = here.client.list(before.digest, 2)
        now[0] += 1
        install(here.folder, after)
        wait_until(lambda: here.client.model().model == after.digest, "the new model is served")
        assert here.client.list(before.digest, 2).ids == mine.ids
        assert here.client.head(before.digest).digest == before.digest
        assert here.client.table().part.model == here.client.shelf().model == after.digest
        now[0] = time.time() + 601
        wait_until(lambda: here.ask("GET", head_path(before.digest)).status == 410, "the old model is gone")
        for path in (head_path(before.digest), list_path(before.digest, 2)):
            gone = here.ask("GET", path)
            assert (gone.status, gone.said["model"]) == (410, after.digest)
            assert after.digest in gone.said["error"]
        with pytest.raises(RefusedRequest, match="This model was replaced by") as caught:
            here.client.list(before.digest, 2)
        assert (caught.value.status, caught.value.model) == (410, after.digest)
        wait_until(lambda: len([*(here.folder / "models").iterdir()]) == 1, "its file is gone")
        unknown = here.ask("GET", head_path("0" * 32))
        assert (unknown.status, unknown.said["model"]) == (404, after.digest)

    def test_news_that_were_added_are_encoded_by_the_next_model(self, served: Serve) -> None:
        here = served(news())
        item = {"id": "late", "features": {"title": "cat moon tea"}}
        here.ask("POST", "/v1/items", {"items": [item]}, here.operator)
        here.ask("DELETE", "/v1/items/n3", token=here.operator)
        done = install(here.folder, news(seed=1))
        assert (done.carried, done.lost) == (1, [])
        wait_until(lambda: here.client.model().model == done.model, "the new model is served")
        part = here.client.table().part
        assert "late" in part.ids
        assert "n3" not in part.ids

    def test_no_request_fails_while_models_and_items_change(self, served: Serve) -> None:
        here, stop = served(news()), threading.Event()
        failed, answered = list[Answer](), [0, 0, 0]

        def asks(number: int) -> None:
            model = here.ask("GET", "/v1/model").said["model"]
            while not stop.is_set():
                query = here.ask("POST", "/v1/query", {"model": model, "told": [0.5, 0.1, 0.2, 0.0, 0.1]})
                shelf = here.ask("GET", "/v1/shelf", accept=LETTER)
                failed.extend(answer for answer in (query, shelf) if answer.status != 200)
                answered[number] += 1
                if answered[number] % 5 == 0:
                    model = here.ask("GET", "/v1/model").said["model"]

        threads = [threading.Thread(target=asks, args=(number,), daemon=True) for number in range(3)]
        for thread in threads:
            thread.start()
        for seed in range(1, 4):
            wanted = [count + 5 for count in answered]
            wait_until(lambda wanted=wanted: all(map(int.__ge__, answered, wanted)), "requests are answered")
            model = install(here.folder, news(seed=seed)).model
            item = {"id": f"late-{seed}", "features": {"title": "cat moon"}}
            wait_until(lambda model=model: here.client.model().model == model, "the model is served")
            assert here.ask("POST", "/v1/items", {"items": [item]}, here.operator).status == 200
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert failed == []
        assert here.client.model().items == 63

    def test_rows_of_the_model_before_are_lost_and_named(self, served: Serve) -> None:
        here = served(films())
        here.ask("POST", "/v1/items", {"items": [{"id": "new", "vector": [1.0] * 16}]}, here.operator)
        assert install(here.folder, films(seed=1)).lost == ["new"]

    def test_a_service_that_starts_again_answers_the_same(self, served: Serve) -> None:
        here = served(news(query="choice:epsilon=5,interests=5"))
        late = [{"id": f"late-{n}", "features": {"title": "cat moon tea"}} for n in range(3)]
        here.ask("POST", "/v1/items", {"items": late}, here.operator)
        here.ask("DELETE", "/v1/items/late-1", token=here.operator)
        here.ask("DELETE", "/v1/items/n5", token=here.operator)
        model = here.client.model().model
        paths = ["/v1/model", "/v1/shelf", "/v1/table", *(list_path(model, choice) for choice in range(5))]

        def everything(one: Running) -> list[bytes]:
            got = [one.ask("GET", path, accept=accept).body for path in paths for accept in ("*/*", LETTER)]
            asked = [{"model": model, "choice": choice} for choice in range(5)]
            return [*got, *(one.ask("POST", "/v1/query", body).body for body in asked)]

        before = everything(here)
        here.close()
        assert everything(served()) == before


class TestDescription:
    def test_openapi_describes_what_is_served_and_nothing_else(self, served: Serve) -> None:
        here = served(films())
        described = here.ask("GET", "/openapi.json").said
        listed = {(method.upper(), path) for path, each in described["paths"].items() for method in each}
        routes = {
            (method, route.path.replace(":path", ""))
            for route in here.service.routes
            for method in route.methods - {"HEAD"}  # GET brings it
        }
        assert listed == routes == {(each.method, each.path) for each in ENDPOINTS}
        for path, each in described["paths"].items():
            for said in each.values():
                named = {one["name"] for one in said.get("parameters", []) if one["in"] == "path"}
                assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}

    def test_what_is_described_is_what_is_answered(self, served: Serve) -> None:
        here = served(films())
        model = here.client.model().model
        for endpoint in ENDPOINTS:
            if endpoint.method == "GET":
                path = endpoint.path.format(model=model, choice="001")
                answer = here.ask("GET", path)
                assert (answer.status, answer.headers["content-type"]) == (200, endpoint.answers[0]), path

    def test_the_page_needs_no_scripts(self, served: Serve) -> None:
        page = served(films()).ask("GET", "/docs").body.decode()
        assert "<script" not in page
        assert "//" not in page.replace("application/", "")
        assert all(endpoint.path in page for endpoint in ENDPOINTS)

    def test_counts_say_how_many_and_not_who(self, served: Serve) -> None:
        here = served(films())
        here.client.shelf()
        here.ask("GET", "/v1/models/unknown")
        lines = here.ask("GET", "/metrics").body.decode()
        assert "homebody_serve_items 300" in lines
        assert 'homebody_serve_refused_total{reason="unknown model"} 1' in lines
        assert 'homebody_serve_answered_total{reason="kept"}' in lines
