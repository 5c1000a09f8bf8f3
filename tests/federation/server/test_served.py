"""A server's model as a service has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from homebody.core import Evaluated
from homebody.errors import HomebodyError
from homebody.federation.server.admin import make
from homebody.federation.server.plan import ServerPlan, opened
from homebody.federation.server.served import served_model
from homebody.privacy.queries import Query
from homebody.progress import Best, Progress
from homebody.recipe import Recipe


@pytest.mark.parametrize("measured", [False, True])
def test_a_servers_model_is_that_of_the_chosen_round(tmp_path: Path, measured: bool) -> None:
    folder, query = tmp_path / "server", Query.parse("choice:epsilon=5,interests=4")
    (tmp_path / "items.csv").write_text("id,name\n" + "".join(f"i{item},Item {item}\n" for item in range(12)))
    make(folder, ServerPlan(Recipe("fedmf", "devices", {"factors": 3}), run="abc"), str(tmp_path / "items.csv"), [])
    with pytest.raises(HomebodyError, match="has trained no round yet"):
        served_model(folder, query)
    first, last = ({"item": torch.randn(12, 3), "user": torch.randn(3)} for _ in range(2))
    with opened(folder) as (_, records):
        best = Best(1, Evaluated({"valid/hr@10": 0.5}), first, {}) if measured else None
        records.save(Progress(2, shared=last, best=best))
        records.add_items([("late", "Late")])
    model = served_model(folder, query)
    assert torch.equal(model.shared["item"][:12], (first if measured else last)["item"])
    assert model.ids == (*(f"i{item}" for item in range(12)), "late")
    assert (model.names["i3"], model.head.run, model.head.fields) == ("Item 3", "abc", {"factors": 3})
    with opened(folder) as (_, records):
        again = records.load()
    assert again is not None
    assert again.step == 2, "Nothing was changed."
