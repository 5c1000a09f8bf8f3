"""One paper, one file. Names are what people type on the command line.

A method may also come from an installed package, by an entry point of the group `homebody.methods`, or from a file.
A file's code runs only once somebody named it themselves: a recipe from a stranger may name any file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from homebody.core import Method
from homebody.errors import HomebodyError, refuse_unknown, unknown_name
from homebody.methods.packages import entry_point, packaged_methods
from homebody.privacy import Channel
from homebody.privacy.specs import parse_channel, stage_texts
from homebody.reference import Reference
from homebody.settings import params

__all__ = [
    "METHODS",
    "MethodFile",
    "build",
    "code_of",
    "find",
    "no_field",
    "own_channel",
    "recipe_name",
    "trust",
]

METHODS: dict[str, str] = {
    "alone": "homebody.methods.pfedrec:Alone",
    "dp-als": "homebody.methods.dp_als:DPALS",
    "dp-fedrec": "homebody.methods.dp_fedrec:DPFedRec",
    "dp-privrec": "homebody.methods.dp_privrec:DPPrivRec",
    "dplcf": "homebody.methods.dplcf:DPLCF",
    "dssm": "homebody.methods.dssm:DSSM",
    "fcf": "homebody.methods.fcf:FCF",
    "fed-mvmf": "homebody.methods.fed_mvmf:FedMVMF",
    "fedgnn": "homebody.methods.fedgnn:FedGNN",
    "fedials": "homebody.methods.fedials:FedIALS",
    "fedmf": "homebody.methods.fedmf:FedMF",
    "fedncf": "homebody.methods.fedncf:FedNCF",
    "fedrec": "homebody.methods.fedrec:FedRec",
    "fedrecon": "homebody.methods.fedrecon:FedRecon",
    "fl-mv-dssm": "homebody.methods.fl_mv_dssm:FLMVDSSM",
    "fmf-ldp": "homebody.methods.fmf_ldp:FMFLDP",
    "fofl-self": "homebody.methods.nn_self:FOFLSelf",
    "ials": "homebody.methods.ials:IALS",
    "mf": "homebody.methods.mf:MF",
    "ncf": "homebody.methods.ncf:NCF",
    "nearby": "homebody.methods.nearby:Nearby",
    "nearby-popularity": "homebody.methods.nearby:NearbyPopularity",
    "news-cen": "homebody.methods.news_cen:NewsCentral",
    "nn-self": "homebody.methods.nn_self:NNSelf",
    "pfedrec": "homebody.methods.pfedrec:PFedRec",
    "popularity": "homebody.methods.baselines:Popularity",
    "private-popularity": "homebody.methods.baselines:PrivatePopularity",
    "privaterec": "homebody.methods.privaterec:PrivateRec",
    "privrec": "homebody.methods.privrec:PrivRec",
    "privrec-cen": "homebody.methods.privrec_cen:PrivRecCEN",
    "public-features": "homebody.methods.nearby:PublicFeatures",
    "random": "homebody.methods.baselines:Chance",
}
"""Methods and references, by name."""
SIX = ("init_shared", "init_local", "prepare", "client", "server", "score")


_TRUSTED: dict[Path, str] = {}
"""Files whose code may run in this process, each with the SHA-256 of its content when it was named."""


class MethodFile(NamedTuple):
    """A file that a method's name asks to run."""

    path: Path
    sha256: str

    def __str__(self) -> str:
        return f"{self.path} (SHA-256 {self.sha256})"


def find(name: str) -> type[Method] | type[Reference]:
    """The class that a name stands for: a shipped method, an entry point, or a trusted `path/to/file.py:Class`.

    `module:Class` is found too where this process has the module, such as a class that a notebook defines.

    >>> find("fedmf").__name__
    'FedMF'
    """
    if name in METHODS:
        module, _, attribute = METHODS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if place := _place(name):
        return _from_file(*place)
    if (installed := entry_point(name)) is not None:
        return _checked(_loaded(name, installed))
    if (loaded := _loaded_class(name)) is not None:
        return _checked(loaded)
    raise unknown_name("method", name, {*METHODS, *packaged_methods()})


def _loaded_class(name: str) -> object:
    """What `module:Class` names, if this process has that module already; nothing is imported, so no code is run."""
    module, colon, attribute = name.partition(":")
    return vars(sys.modules[module]).get(attribute) if colon and module in sys.modules else None


def recipe_name(kind: type[Method] | type[Reference]) -> str:
    """The name by which `find` gives this class: what people type, or `module:Class` of a module that is loaded.

    >>> recipe_name(find("fedmf"))
    'fedmf'
    """
    place = f"{kind.__module__}:{kind.__qualname__}"
    shipped = next((name for name, known in METHODS.items() if known == place), None)
    if shipped is not None:
        return shipped
    if _loaded_class(place) is not kind:
        raise HomebodyError(f"{kind.__qualname__} is not found by its name: define the class at the top of a module.")
    return place


def build(name: str, given: Mapping[str, Any], stages: Sequence[str] = ()) -> Method | Reference:
    """The method or reference of this name with these fields, and with these stages as its channel if there are any.

    >>> build("fedmf", {"factors": 8}, ["clip:norm=1"]).factors
    8
    """
    kind = find(name)
    known = [spec.name for spec in params(kind)]
    for field in given:
        if field not in known:
            raise no_field(name, field, known)
    built: Method | Reference = kind(**given)
    if not stages or not isinstance(built, Method):
        return built
    channel = parse_channel(stages)
    if not any(spec.name == "uplink" for spec in fields(built)):  # type: ignore[arg-type]
        raise HomebodyError(f"{name} has no field 'uplink', so no stage can be put on its way out.")
    built = replace(built, uplink=channel)  # type: ignore[type-var]
    own = stage_texts(built.uplink)
    if own != stage_texts(channel):  # as texts: a stage may have been fitted to other fields
        raise HomebodyError(
            f"{name} has stages of its own ({', '.join(own)}), which follow from its fields: "
            "leave --stage out, and give --set."
        )
    return built


def own_channel(name: str) -> Channel:
    """The channel of a method if no stages are given; an empty one for a reference."""
    return getattr(find(name), "uplink", Channel())


def no_field(method: str, name: str, known: Iterable[str]) -> HomebodyError:
    """The error for an unknown field; it says where a setting of the method's own channel belongs."""
    channel = own_channel(method)
    if any(spec.name == name and not spec.kw_only for stage in channel.stages for spec in fields(stage)):  # type: ignore[arg-type]
        texts = " ".join(f"--stage {text}" for text in stage_texts(channel))
        return HomebodyError(
            f"{name} is no field of {method} but a setting of its channel: give all its stages, as in {texts}."
        )
    return unknown_name(f"field of {method}", name, known)


def trust(name: str, sha256: str | None = None) -> str:
    """Let `find` run the file that this name gives, as it is now; return the name with its absolute path.

    A name that is no file's stays as it is. sha256: what the file must hold.

    >>> trust("fedmf")
    'fedmf'
    """
    place, code = _place(name), code_of(name)
    if place is None or code is None:
        return name
    if sha256 is not None and code.sha256 != sha256:
        raise HomebodyError(f"{code.path} changed while it was in use: start again.")
    _TRUSTED[code.path] = code.sha256
    return f"{code.path}:{place[1]}"


def code_of(name: str) -> MethodFile | None:
    """The file that a method's name asks to run; None where the method is installed."""
    place = _place(name)
    return None if place is None else MethodFile(place[0], hashlib.sha256(_source(*place)).hexdigest())


def _place(name: str) -> tuple[Path, str] | None:
    """A file and a class in it."""
    if name in METHODS:
        return None
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py"):
        return Path(path).resolve(), attribute
    if name.endswith(".py"):
        raise HomebodyError(f"Name the class in {name} as well: {name}:MyMethod.")
    return None


def _source(path: Path, attribute: str) -> bytes:
    if not path.is_file():
        raise HomebodyError(f"There is no file {path} to take the method {attribute} from.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise HomebodyError(f"{path} cannot be read: {error.strerror}.") from error


def _loaded(name: str, installed: Any) -> Any:
    try:
        return installed.load()
    except Exception as error:
        raise HomebodyError(
            f"The method {name} ({installed.value}) cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _from_file(path: Path, attribute: str) -> type[Method] | type[Reference]:
    source = _source(path, attribute)
    code = MethodFile(path, hashlib.sha256(source).hexdigest())
    if _TRUSTED.get(path) != code.sha256:
        raise HomebodyError(
            f"This would run the code of {code}, which nobody here named. Read that file. If you trust it, name it on "
            "the command line yourself, or give --trust-code to a command that takes a folder."
        )
    module_name = f"homebody_user_method_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        # Not by the import system: that would take bytecode from a __pycache__ beside the file, which nobody read.
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except Exception as error:
        raise HomebodyError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Method | Reference) and value.__module__ == module_name
    }
    refuse_unknown(f"method in {path} called", [attribute], classes)
    return _checked(classes[attribute])


def _checked(kind: Any) -> type[Method] | type[Reference]:
    """The class, if it can run; otherwise it is refused before anything else is done."""
    if not isinstance(kind, type) or not issubclass(kind, Method | Reference):
        raise HomebodyError(f"{kind!r} is not a class of a method or of a reference.")
    name = kind.__name__
    if not is_dataclass(cast(object, kind)):
        raise HomebodyError(f"{name} must be a dataclass: put @dataclass(frozen=True) above it.")
    federated = issubclass(kind, Method)
    if federated and not hasattr(kind, "uplink"):
        raise HomebodyError(f"{name} must name its way out: uplink: Channel = Channel().")
    for function in SIX if federated else ("fit",):
        if getattr(kind, function) in (getattr(Method, function, None), getattr(Reference, function, None)):
            raise HomebodyError(f"{name} must define {function}(); CONTRIBUTING.md shows how.")
    return kind
