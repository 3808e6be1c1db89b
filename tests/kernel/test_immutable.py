"""Values that never change, and their copies."""

from __future__ import annotations

import pytest

from breakwater.kernel.immutable import changed, computed_once, immutable


@immutable(slots=False)
class Side:
    length: int
    name: str = ""

    @computed_once
    def area(self) -> int:
        return self.length**2


def test_a_copy_computes_its_own_values_and_has_no_other_fields() -> None:
    side = Side(2)
    assert changed(side, length=3) == Side(3)
    assert side.area == 4
    assert changed(side, length=3).area == 9
    with pytest.raises(TypeError, match="width"):
        changed(side, width=3)
