"""One paper, one file. Names are what people type on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import is_dataclass
from pathlib import Path

from homebody.core import Method
from homebody.errors import HomebodyError, unknown_name
from homebody.reference import Reference

__all__ = ["METHODS", "find"]

METHODS: dict[str, str] = {
    "alone": "homebody.methods.alone:Alone",
    "dp-privrec": "homebody.methods.dp_privrec:DPPrivRec",
    "dplcf": "homebody.methods.dplcf:DPLCF",
    "fcf": "homebody.methods.fcf:FCF",
    "fedgnn": "homebody.methods.fedgnn:FedGNN",
    "fedials": "homebody.methods.fedials:FedIALS",
    "fedmf": "homebody.methods.fedmf:FedMF",
    "fedncf": "homebody.methods.fedncf:FedNCF",
    "fedrecon": "homebody.methods.fedrecon:FedRecon",
    "fmf-ldp": "homebody.methods.fmf_ldp:FMFLDP",
    "fofl-self": "homebody.methods.fofl_self:FOFLSelf",
    "ials": "homebody.methods.ials:IALS",
    "mf": "homebody.methods.mf:MF",
    "ncf": "homebody.methods.ncf:NCF",
    "nn-self": "homebody.methods.nn_self:NNSelf",
    "pfedrec": "homebody.methods.pfedrec:PFedRec",
    "popularity": "homebody.methods.popularity:Popularity",
    "private-popularity": "homebody.methods.private_popularity:PrivatePopularity",
    "privrec": "homebody.methods.privrec:PrivRec",
    "privrec-cen": "homebody.methods.privrec_cen:PrivRecCEN",
    "random": "homebody.methods.chance:Chance",
}
"""Methods and references, by name."""
SIX = ("init_shared", "init_local", "prepare", "client", "server", "score")


def find(name: str) -> type[Method] | type[Reference]:
    """The class of a known name, or of `path/to/file.py:Class`.

    >>> find("fedmf").__name__
    'FedMF'
    """
    if name in METHODS:
        module, _, attribute = METHODS[name].partition(":")
        found: type[Method] | type[Reference] = getattr(importlib.import_module(module), attribute)
        return found
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), attribute)
    if name.endswith(".py"):
        raise HomebodyError(f"Name the class in {name} as well: {name}:MyMethod.")
    raise unknown_name("method", name, METHODS)


def _from_file(path: Path, attribute: str) -> type[Method] | type[Reference]:
    if not path.is_file():
        raise HomebodyError(f"There is no file {path} to take the method {attribute} from.")
    module_name = f"homebody_user_method_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise HomebodyError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Method | Reference) and value.__module__ == module_name
    }
    if attribute not in classes:
        raise unknown_name(f"method in {path} called", attribute, classes)
    _check(classes[attribute])
    return classes[attribute]


def _check(found: type) -> None:
    """Refuse a class that cannot run, before anything else is done."""
    name = found.__name__
    if not is_dataclass(found):
        raise HomebodyError(f"{name} must be a dataclass: put @dataclass(frozen=True) above it.")
    federated = issubclass(found, Method)
    if federated and not hasattr(found, "uplink"):
        raise HomebodyError(f"{name} must name its way out: uplink: Channel = Channel().")
    for function in SIX if federated else ("fit",):
        if getattr(found, function) in (getattr(Method, function, None), getattr(Reference, function, None)):
            raise HomebodyError(f"{name} must define {function}(); CONTRIBUTING.md shows how.")
