"""Read, write and resample sounds; models take one channel of floats at their own sampling rate."""

from __future__ import annotations

import io
import math
import wave
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import RequestError

RATES = range(4_000, 384_001)
"""Accepted sampling rates in Hz; others are a mistake, or an attempt to exhaust memory."""
MIN_SECONDS, MAX_SECONDS = 0.05, 600
"""Accepted lengths. Speech models use windows of 25 ms."""

Samples = NDArray[np.float32]


def read_wav(data: object, rate: int) -> Samples:
    """Return the samples of a WAV file in [-1, 1], averaged over channels, resampled to `rate` Hz.

    Raises RequestError if it is not PCM, too short or too long.
    """
    if not isinstance(data, bytes):  # a str would be a path
        raise RequestError("inputs", "expected the bytes of a WAV file")
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, file_rate = (
                file.getsampwidth(),
                file.getnchannels(),
                file.getframerate(),
            )
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        reason = str(error) or "it is truncated"
        raise RequestError("inputs", f"is not a WAV file of PCM samples: {reason}") from None
    frames = frames[: len(frames) - len(frames) % (width * channels)]
    if file_rate not in RATES:
        raise RequestError("inputs", f"has an unsupported sampling rate: {file_rate} Hz")
    seconds = len(frames) / (width * channels * file_rate)
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise RequestError(
            "inputs", f"lasts {seconds:.2f} s; expected {MIN_SECONDS} to {MAX_SECONDS} s"
        )
    mono = _to_floats(frames, width).reshape(-1, channels).mean(axis=1)
    return resample(mono, file_rate, rate).astype(np.float32)


def write_wav(samples: NDArray[Any], rate: int) -> bytes:
    """Encode samples in [-1, 1], [samples] or [channels, samples], as a 16-bit WAV file."""
    channels = samples if samples.ndim == 2 else samples[None]
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((channels.T.clip(-1, 1) * (2**15 - 1)).round().astype("<i2").tobytes())
    return data.getvalue()


def resample(samples: NDArray[np.float64], rate: int, wanted: int) -> NDArray[np.float64]:
    """Resample from `rate` to `wanted` samples per second, by truncating or padding the spectrum.

    An FFT treats the sound as periodic. So it is extended by its mirror image, which avoids a click
    at both ends. Before that it is padded to a whole number of samples at both rates, which avoids
    stretching it.
    """
    if rate == wanted:
        return samples
    padded = np.pad(samples, (0, -len(samples) % (rate // math.gcd(rate, wanted))), "symmetric")
    num_wanted = len(padded) * wanted // rate
    spectrum = np.fft.rfft(np.concatenate([padded, padded[::-1]]))
    result = np.fft.irfft(spectrum, 2 * num_wanted) * (num_wanted / len(padded))
    return result[: math.ceil(len(samples) * wanted / rate)]


def _to_floats(frames: bytes, width: int) -> NDArray[np.float64]:
    """Convert little-endian integers of `width` bytes to [-1, 1]; one-byte samples are unsigned."""
    if width == 1:
        return np.frombuffer(frames, np.uint8) / 128.0 - 1.0
    # Put each sample into the upper bytes of an int32.
    padded = np.zeros((len(frames) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(frames, np.uint8).reshape(-1, width)
    return padded.view("<i4")[:, 0] / 2.0**31
