"""Reading WAV files, tested with sine waves."""

from __future__ import annotations

import io
import math
import wave

import numpy as np
import pytest

from core.errors import RequestError
from engine.tasks.pipelines.sound import read_wav, resample

LONG_ENOUGH = 200
"""Two frames at 8 kHz, repeated this often, last 0.05 s. Shorter sounds are rejected."""


def wav(frames: bytes, *, width: int = 2, channels: int = 1, rate: int = 8000) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(frames)
    return data.getvalue()


def integers(values: list[int], width: int) -> bytes:
    return b"".join(value.to_bytes(width, "little", signed=width > 1) for value in values)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(width: int) -> None:
    full = 2 ** (8 * width - 1)
    given = [0, full // 2, full - 1, -full // 4, -full] * LONG_ENOUGH
    shifted = [sample + full for sample in given] if width == 1 else given
    read = read_wav(wav(integers(shifted, width), width=width), 8000)
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, np.array(given) / full, atol=1e-7)


def test_channels_are_averaged() -> None:
    frames = integers([100, 300, -200, 0] * LONG_ENOUGH, 2)
    read = read_wav(wav(frames, channels=2), 8000)
    np.testing.assert_allclose(read * 2**15, [200, -100] * LONG_ENOUGH, rtol=1e-6)


@pytest.mark.parametrize(("rate", "wanted"), [(44_100, 16_000), (8000, 16_000), (11_025, 8000)])
def test_resampling_keeps_a_tone(rate: int, wanted: int) -> None:
    tone = np.cos(2 * np.pi * 440 * np.arange(rate // 4) / rate)
    got = resample(tone, rate, wanted)
    expected = np.cos(2 * np.pi * 440 * np.arange(len(got)) / wanted)
    assert len(got) == math.ceil(rate // 4 * wanted / rate)
    inner = slice(len(got) // 10, -len(got) // 10)
    np.testing.assert_allclose(got[inner], expected[inner], atol=0.01)


def test_frequencies_above_the_new_nyquist_limit_are_removed() -> None:
    """If these frequencies were kept, they would alias to other tones."""
    shrill = np.cos(2 * np.pi * 7000 * np.arange(16_000) / 16_000)
    assert np.abs(resample(shrill, 16_000, 8000)[400:-400]).max() < 0.01


def test_the_files_sampling_rate_is_used() -> None:
    frames = np.full(4410, 2**14, np.int16).tobytes()
    read = read_wav(wav(frames, rate=44_100), 16_000)
    np.testing.assert_allclose(read, np.full(1600, 0.5), atol=1e-6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a WAV file"),
        (b"OggS" + b"\0" * 40, "not a WAV file"),
        (wav(b"\0" * 20)[:30], "not a WAV file"),
        (wav(b""), "lasts 0.00 s"),
        (wav(b"\0\0", rate=1), "1 Hz"),
        (wav(b"\0\0" * 4000 * 601, rate=4000), "lasts 601.00 s"),
    ],
)
def test_invalid_sounds(data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_wav(data, 8000)
    assert caught.value.field == "inputs"


def test_a_truncated_file_is_read_up_to_its_end() -> None:
    whole = wav(integers([100, 200, 300] * LONG_ENOUGH, 2))
    assert len(read_wav(whole[:-3], 8000)) == 3 * LONG_ENOUGH - 2


def test_resampling_makes_no_clicks_at_the_ends() -> None:
    ramp = np.linspace(0.25, 1, 4500)
    got = resample(ramp, 44_100, 16_000)
    np.testing.assert_allclose(got, np.linspace(0.25, 1, len(got)), atol=0.02)
