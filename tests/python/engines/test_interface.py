"""Which versions of an engine a plug-in is loaded over."""

import re

import pytest
from flash_attention.engines import interface


class Base:
    def build(self, common, fast=False): ...

    @classmethod
    def for_batch(cls, batch): ...


def test_the_same_parameters_pass():
    interface.check("torch", {Base.build: "self common fast", interface.member(Base, "for_batch"): "batch"}, "1.0")


@pytest.mark.parametrize(
    "expected, message",
    [
        (
            {Base.build: "self common"},
            "Base.build has the parameters self common fast; expected self common. Versions that",
        ),
        ({interface.member(Base, "gone"): "self"}, "Base.gone is missing; expected self. Versions that work: 1.0, 1.1"),
    ],
)
def test_others_are_refused_with_the_versions_that_work(expected, message):
    version = interface.version_of("torch")
    with pytest.raises(ImportError, match=re.escape(f"does not fit torch {version}: ") + ".*" + re.escape(message)):
        interface.check("torch", expected, "1.0, 1.1")
    with pytest.raises(ImportError, match="does not fit no-such-engine of unknown version"):
        interface.check("no-such-engine", expected, "1.0")
