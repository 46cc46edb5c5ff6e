"""Frames come at an even pace, and less often when they cost much."""

from __future__ import annotations

import pytest

from kvtui.pace import BEST_SECONDS, MOST_BESIDE_A_MODEL, MOST_OF_A_CORE, TICK_SECONDS, WORST_SECONDS, Pace


class Clocks:
    """Wall and processor time, both moved by hand."""

    def __init__(self, most_of_a_core: float = MOST_OF_A_CORE) -> None:
        self.wall = 10.0
        self.cpu = 3.0
        self.followed_until = self.wall
        self.pace = Pace(lambda: self.wall, lambda: self.cpu, most_of_a_core=most_of_a_core)

    def run(self, seconds: float, cost: float, following: float = 0.0) -> int:
        """Tick for a time, each frame costing so much, and following so much a second; how many frames there were."""
        frames = 0
        stop = self.wall + seconds
        while self.wall < stop:
            if self.pace.due():
                with self.pace.following():
                    self.cpu += following * (self.wall - self.followed_until)
                self.followed_until = self.wall
                self.pace.drew()
                self.cpu += cost
                frames += 1
            self.wall += TICK_SECONDS
        return frames


def test_cheap_frames_come_at_the_best_rate() -> None:
    assert abs(Clocks().run(10, 0.002) - 10 / BEST_SECONDS) <= 2


@pytest.mark.parametrize("part", [MOST_OF_A_CORE, MOST_BESIDE_A_MODEL])
def test_dear_frames_take_no_more_than_their_part_of_a_core(part: float) -> None:
    clocks = Clocks(part)
    clocks.run(5, 0.015)
    frames = clocks.run(20, 0.015)
    assert 0.5 < frames * 0.015 / 20 / part <= 1.1


def test_an_engine_that_is_dear_to_follow_is_drawn_as_often_as_any_other() -> None:
    assert abs(Clocks().run(10, 0.002, following=0.6) - 10 / BEST_SECONDS) <= 2


def test_however_dear_frames_are_two_come_in_a_second() -> None:
    clocks = Clocks()
    clocks.run(10, 1.0)
    assert clocks.pace.interval == WORST_SECONDS
    assert clocks.pace.slowness == WORST_SECONDS / BEST_SECONDS


def test_when_frames_get_cheap_again_they_come_often_again() -> None:
    clocks = Clocks()
    clocks.run(10, 0.2)
    clocks.run(30, 0.001)
    assert clocks.pace.interval == BEST_SECONDS
    assert clocks.pace.slowness == 1


def test_a_key_is_answered_at_once() -> None:
    clocks = Clocks()
    clocks.run(10, 0.2)
    clocks.pace.drew()
    assert not clocks.pace.due()
    clocks.pace.hurry()
    assert clocks.pace.due()
