"""A model as a service keeps it: one file that needs neither the run that it comes from nor its data."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from homebody.core import Column
from homebody.data.codes import Code
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.schema import FeatureSchema
from homebody.serving.model import Head, Served

__all__ = ["Model"]


@dataclass(frozen=True, eq=False)
class Model:
    """A model, and how much each of its items is everyone's: the order of the shelf."""

    served: Served
    common: Tensor
    """(N,) higher comes first."""

    @classmethod
    def of(cls, served: Served) -> Self:
        serving = served.head.serving
        with torch.no_grad():
            common = (
                serving.common(served.method, served.shared, served.catalogue).float()
                if "shelf" in serving.ways
                else torch.zeros(len(served.ids))
            )
        return cls(served, common.nan_to_num(-3e38, 3e38, -3e38))

    @cached_property
    def known(self) -> frozenset[str]:
        """The ids of its items."""
        return frozenset(self.served.ids)

    @property
    def digest(self) -> str:
        return self.served.digest

    @cached_property
    def content(self) -> bytes:
        served = self.served
        numbers = {name: served.catalogue.items[name].values for name in served.codes}
        parts = {
            "head": served.head.content,
            "shared": wire.encode_tree(served.shared),
            "common": wire.encode_tree({"common": self.common}),
            "codes": json.dumps({name: code.to_json() for name, code in served.codes.items()}).encode(),
            "items": wire.encode_tree(numbers),
            "ids": json.dumps(served.ids).encode(),
            "names": json.dumps(dict(served.names)).encode(),
        }
        return wire.encode_letter({"model": 1}, parts)

    @classmethod
    def read(cls, content: bytes) -> Self:
        """The inverse of `content`."""
        try:
            header, parts = wire.decode_letter(content)
            if header.get("model") != 1:
                raise HomebodyError("The model was written by another version: `homebody serve reload` writes it anew.")
            head = Head.read(parts["head"])
            shared, numbers = wire.decode_tree(parts["shared"]), wire.decode_tree(parts["items"])
            codes = {name: Code.from_json(code) for name, code in json.loads(parts["codes"]).items()}
            ids = tuple(json.loads(parts["ids"]))
            common = wire.decode_tree(parts["common"])["common"]
            known = FeatureSchema(
                head.codes.get("people", {}), codes, {name: values.numpy() for name, values in numbers.items()}
            ).catalogue(len(ids))
            names = json.loads(parts["names"])
        except (wire.Malformed, KeyError, ValueError, TypeError) as error:
            raise HomebodyError(f"The model cannot be read ({error}): `homebody serve reload` writes it.") from error
        contexts = {name: _nothing(code) for name, code in head.codes.get("contexts", {}).items()}
        catalogue = replace(known, contexts=contexts)
        places = torch.zeros(len(ids), 0)
        if head.size:
            with torch.no_grad():
                places = head.serving.places(head.method, shared, catalogue).float()
        order = common.argsort(descending=True, stable=True)
        return cls(Served(head, shared, catalogue, ids, places, order, names, codes=codes), common)


def _nothing(code: Code) -> Column:
    return Column(torch.from_numpy(code.unknown(0)), code.size, code.kind, code.text)
