"""The silence of the engine, on a fake clock."""

from __future__ import annotations

from container.wire.channel import MAX_PAUSE_S, Silence
from tests.clock import Clock


def test_silence_is_the_time_since_the_last_message() -> None:
    clock = Clock()
    silence = Silence(clock)
    for _ in range(8):
        clock.now += 0.25
        silence.listened()
    assert silence.seconds == 2
    silence.heard()
    assert silence.seconds == 0


def test_a_long_time_between_two_readings_counts_only_up_to_the_maximum() -> None:
    clock = Clock()
    silence = Silence(clock)
    clock.now += 60
    silence.listened()
    assert silence.seconds == MAX_PAUSE_S
