"""Frames come at an even pace, and less often when they cost much."""

from __future__ import annotations

import pytest

from kvtui.pace import BEST_SECONDS, MOST_BESIDE_A_MODEL, MOST_OF_A_CORE, MOST_SLOWED, WORST_SECONDS, Pace


class Clocks:
    """Wall and processor time, both moved by hand."""

    def __init__(self, most_of_a_core: float = MOST_OF_A_CORE) -> None:
        self.wall = 10.0
        self.cpu = 3.0
        self.followed_until = self.wall
        self.late = 0.0
        """How much later than asked for each turn comes."""
        self.pace = Pace(lambda: self.wall, lambda: self.cpu, most_of_a_core=most_of_a_core)

    def run(self, seconds: float, cost: float, following: float = 0.0) -> int:
        """Turns for a time, each frame costing so much, and following so much a second; how many frames there were."""
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
            self.wall += self.pace.wait() + self.late
        return frames


def test_cheap_frames_come_at_the_best_rate() -> None:
    assert abs(Clocks().run(10, 0.002) - 10 / BEST_SECONDS) <= 2


def test_turns_that_come_a_little_late_make_no_fewer_frames() -> None:
    clocks = Clocks()
    clocks.late = BEST_SECONDS / 4
    assert abs(clocks.run(10, 0.002) - 10 / BEST_SECONDS) <= 2


def test_a_frame_that_comes_much_too_late_is_not_made_up_for() -> None:
    clocks = Clocks()
    clocks.run(1, 0.002)
    clocks.wall += 5
    assert abs(clocks.run(1, 0.002) - 1 / BEST_SECONDS) <= 2


def test_one_odd_frame_is_not_paid_for_by_those_behind_it() -> None:
    clocks = Clocks()
    clocks.run(1, 0.0015)
    clocks.run(BEST_SECONDS, 0.3)
    assert abs(clocks.run(1, 0.0015) - 1 / BEST_SECONDS) <= 2


def test_panels_that_can_wait_do_so_before_frames_come_less_often() -> None:
    clocks = Clocks()
    frames = 0
    for _ in range(600):
        # Half of a frame is the panels', as often as they are drawn.
        frames += clocks.run(BEST_SECONDS, 0.0025 + 0.0025 / clocks.pace.slowness)
    assert 1 < clocks.pace.slowness < MOST_SLOWED
    assert clocks.pace.interval < BEST_SECONDS * 1.1


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
    clocks.run(20, 1.0)
    assert clocks.pace.interval == WORST_SECONDS
    assert clocks.pace.slowness == MOST_SLOWED


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
