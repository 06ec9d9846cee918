"""Learning rates of steps: warm-up, cosine, legs, and rates as they are given."""

from __future__ import annotations

import math

import pytest

from models.quantize.schedule import Schedule, rate_for


def rates(schedule: Schedule) -> list[float]:
    return [schedule.rate(epoch, step) for epoch in range(schedule.legs[-1]) for step in range(schedule.steps)]


def test_five_percent_of_the_steps_rise_in_a_line_and_the_rest_fall_as_half_a_cosine():
    found = rates(Schedule(2.0, 50, (0, 4)))
    assert found[:10] == pytest.approx([2 * (i + 1) / 10 for i in range(10)])
    # 191 intervals from the highest rate to zero, which would be that of the step behind the last
    assert found[10:] == pytest.approx([1 + math.cos(math.pi * i / 191) for i in range(1, 191)])
    assert max(found) == found[9] == 2.0
    assert 0 < found[-1] < 1e-3


@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (1, 2), (2, 1), (3, 1)])
def test_the_shortest_trainings_have_positive_rates(steps, epochs):
    found = rates(Schedule(1.0, steps, (0, epochs)))
    assert found[0] == 1.0
    assert all(0 < rate <= 1 for rate in found)


def test_a_leg_is_a_schedule_of_its_own_and_leaves_those_before_it_alone():
    first, second, both = (rates(Schedule(1.0, 20, legs)) for legs in ((0, 4), (0, 6), (0, 4, 10)))
    assert both == [*first, *second]


def test_an_epochs_mean():
    schedule = Schedule(1.0, 20, (0, 2))
    assert schedule.mean(1) == pytest.approx(sum(rates(schedule)[20:]) / 20)


def test_rates_by_epoch_hold_as_they_are():
    schedule = Schedule({0: 1e-6, 5: 1e-5, 6: 2e-6}, 3, (0, 4, 10))
    assert [schedule.rate(epoch, 2) for epoch in (0, 4, 5, 6, 9)] == [1e-6, 1e-6, 1e-5, 2e-6, 2e-6]
    assert schedule.mean(5) == pytest.approx(1e-5)


def test_runs_of_a_hundred_steps_want_three_times_the_rate_of_short_and_of_long_ones():
    found = [rate_for(steps) for steps in (1, 30, 60, 100, 250, 1000, 100_000)]
    assert found == pytest.approx([3e-5, 3e-5, 6e-5, 9.49e-5, 6e-5, 3e-5, 3e-5], rel=1e-3)


def test_auto_is_the_rate_of_each_legs_own_steps():
    schedule = Schedule("auto", 50, (0, 5, 25))
    assert rates(schedule) == rates(Schedule(6e-5, 50, (0, 5)))[:250] + rates(Schedule(3e-5, 50, (0, 20)))
    assert [schedule.highest(epoch) for epoch in (4, 5)] == [6e-5, 3e-5]
    assert [Schedule(lr, 50, (0, 5)).highest(1) for lr in (2e-4, {0: 1e-6, 4: 1e-5})] == [2e-4, 1e-5]
