"""The table of planted faults: each still has its place in the source, and tests that exist."""

from __future__ import annotations

import pytest

from tests.planted import FAULTS, ROOT, Fault, sample


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_has_one_place_and_its_tests(fault: Fault) -> None:
    assert (ROOT / "src" / "outrider" / fault.file).read_text().count(fault.old) == 1
    assert fault.old != fault.new
    for test in fault.tests.split():
        file, _, name = test.partition("::")
        # The whole name: pytest runs nothing where a part of it is given.
        assert f"def {name}(" * bool(name) in (ROOT / "tests" / file).read_text()


def test_a_sample_is_some_of_them() -> None:
    assert sample(FAULTS, None) == sample(FAULTS, len(FAULTS)) == FAULTS
    some = sample(FAULTS, 3)
    assert len(some) == 3 and all(fault in FAULTS for fault in some)
