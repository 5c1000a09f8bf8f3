"""`import homebody as hb` has every method of the package under the name of its class."""

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
    assert set(hb._HOMES) | {"__version__"} == set(hb.__all__)
