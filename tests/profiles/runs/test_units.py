"""Times are told in the unit of their magnitude."""

import pytest

from graphengine.profiles.runs.units import MS, US, S, duration, unit_for


@pytest.mark.parametrize(
    ("us", "told"),
    [
        (0.0, "0.00 us"), (0.45, "0.45 us"), (12.06, "12.1 us"), (902.4, "902 us"),
        (3035.0, "3.04 ms"), (-5.0, "-5.00 us"), (500_000.0, "500 ms"), (90e6, "90.0 s"),
        (2.5e9, "2,500 s"),
    ],
)  # fmt: skip
def test_a_duration_is_told_in_the_largest_unit_that_fits(us: float, told: str) -> None:
    assert duration(us) == told


def test_time_between_tokens_is_told_in_milliseconds_at_least() -> None:
    told = [duration(us, MS) for us in (0.0, 90.4, 3035.0, 18_197.0, 319_668.0, 12e6)]
    assert told == ["0.000 ms", "0.090 ms", "3.035 ms", "18.20 ms", "319.7 ms", "12.0 s"]


def test_a_table_has_the_unit_of_its_largest_time() -> None:
    assert [unit_for(us) for us in (0.0, 9999.0, 10_000.0, 10e6)] == [US, US, MS, S]
    assert unit_for(5.0, least=MS) is MS and unit_for(1e12) is S
