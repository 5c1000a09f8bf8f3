"""`import homebody as hb` has every method of the package under the name of its class; class names are unique."""

import ast
import doctest
import re
import rlcompleter
from collections import Counter
from pathlib import Path

import pytest

import homebody as hb
from homebody.methods import METHODS, find


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_name_of_the_package(name):
    found = find(name)
    assert getattr(hb, found.__name__) is found
    assert found.__name__ in hb.__all__


def test_whatever_is_promised_can_be_had():
    assert all(hasattr(hb, name) for name in hb.__all__)


def test_type_checkers_see_every_name_from_where_it_is_loaded():
    tree = ast.parse(Path(hb.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))  # if TYPE_CHECKING
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {**hb._HOMES, **dict.fromkeys(hb._ROOMS, "homebody")}


def test_dir_and_tab_show_what_there_is():
    shown = dir(hb)
    assert set(hb.__all__) <= set(shown)
    assert {"account", "audit", "fit", "load", "FedMF", "Budget"} <= set(shown)
    assert not [name for name in shown if name.startswith("_") and name != "__version__"]
    completer = rlcompleter.Completer({"hb": hb})
    offered = [completer.complete("hb.lo", state) for state in range(3)]
    assert [name.rstrip("()") for name in offered if name] == ["hb.load"]


@pytest.mark.parametrize("name", [name for name in dir(hb) if name != "__version__"])
def test_every_name_has_an_example(name):
    examples = doctest.DocTestParser().get_examples(getattr(hb, name).__doc__ or "")
    assert examples, f"hb.{name} has no example"
    assert any(example.want for example in examples), f"the example of hb.{name} shows no output"


def test_examples_are_run(pytestconfig):
    assert pytestconfig.getoption("doctestmodules")
    assert "src" in pytestconfig.getini("testpaths")


def test_the_package_says_that_it_has_types():
    assert (Path(hb.__file__).parent / "py.typed").is_file()


def test_no_class_name_stands_twice():
    texts = (path.read_text(encoding="utf-8") for path in Path(hb.__file__).parent.rglob("*.py"))
    names = Counter(name for text in texts for name in re.findall(r"^ *class (\w+)[(:]", text, re.MULTILINE))
    assert len(names) > 300
    assert [name for name, count in names.items() if count > 1] == []
