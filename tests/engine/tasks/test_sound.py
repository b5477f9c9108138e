"""WAV files as models take them, told by what is known of sines."""

from __future__ import annotations

import io
import math
import wave

import numpy as np
import pytest

from core.errors import RequestError
from engine.tasks.pipelines.sound import read_wav, resampled

LONG_ENOUGH = 200
"""Times two samples or more."""


def wav(frames: bytes, *, width: int = 2, channels: int = 1, rate: int = 8000) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(frames)
    return data.getvalue()


def integers(values: list[int], width: int) -> bytes:
    return b"".join(each.to_bytes(width, "little", signed=width > 1) for each in values)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(width: int) -> None:
    full = 2 ** (8 * width - 1)
    given = [0, full // 2, full - 1, -full // 4, -full] * LONG_ENOUGH
    shifted = [each + full for each in given] if width == 1 else given
    read = read_wav(wav(integers(shifted, width), width=width), 8000)
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, np.array(given) / full, atol=1e-7)


def test_channels_become_one() -> None:
    frames = integers([100, 300, -200, 0] * LONG_ENOUGH, 2)
    read = read_wav(wav(frames, channels=2), 8000)
    np.testing.assert_allclose(read * 2**15, [200, -100] * LONG_ENOUGH, rtol=1e-6)


@pytest.mark.parametrize(("rate", "wanted"), [(44_100, 16_000), (8000, 16_000), (11_025, 8000)])
def test_a_tone_at_another_rate_is_the_same_tone(rate: int, wanted: int) -> None:
    tone = np.cos(2 * np.pi * 440 * np.arange(rate // 4) / rate)
    got = resampled(tone, rate, wanted)
    expected = np.cos(2 * np.pi * 440 * np.arange(len(got)) / wanted)
    assert len(got) == math.ceil(rate // 4 * wanted / rate)
    inner = slice(len(got) // 10, -len(got) // 10)
    np.testing.assert_allclose(got[inner], expected[inner], atol=0.01)


def test_what_a_lower_rate_cannot_hold_is_left_out() -> None:
    """Without that it would be heard as another tone."""
    shrill = np.cos(2 * np.pi * 7000 * np.arange(16_000) / 16_000)
    assert np.abs(resampled(shrill, 16_000, 8000)[400:-400]).max() < 0.01


def test_the_rate_of_the_file_counts() -> None:
    frames = np.full(4410, 2**14, np.int16).tobytes()
    read = read_wav(wav(frames, rate=44_100), 16_000)
    np.testing.assert_allclose(read, np.full(1600, 0.5), atol=1e-6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no WAV file"),
        (b"OggS" + b"\0" * 40, "no WAV file"),
        (wav(b"\0" * 20)[:30], "no WAV file"),
        (wav(b""), "lasts 0.00 s"),
        (wav(b"\0\0", rate=1), "1 Hz"),
        (wav(b"\0\0" * 4000 * 601, rate=4000), "lasts 601.00 s"),
    ],
)
def test_what_is_no_sound(data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_wav(data, 8000)
    assert caught.value.field == "inputs"


def test_a_file_that_is_cut_off_has_what_is_there() -> None:
    whole = wav(integers([100, 200, 300] * LONG_ENOUGH, 2))
    assert len(read_wav(whole[:-3], 8000)) == 3 * LONG_ENOUGH - 2


def test_there_is_no_click_at_either_end() -> None:
    ramp = np.linspace(0.25, 1, 4500)
    got = resampled(ramp, 44_100, 16_000)
    np.testing.assert_allclose(got, np.linspace(0.25, 1, len(got)), atol=0.02)
