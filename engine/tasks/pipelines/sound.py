"""Sounds as models take them: one channel, floats, at the model's own sampling rate."""

from __future__ import annotations

import io
import math
import wave
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import RequestError

RATES = range(4_000, 384_001)
"""Hz; others in a file's header would be a mistake, or an attempt on the memory."""
MIN_SECONDS, MAX_SECONDS = 0.05, 600
"""Models of speech look at 25 ms at once."""

Samples = NDArray[np.float32]


def read_wav(data: object, rate: int) -> Samples:
    """The samples of a WAV file, -1 to 1, the mean of its channels, at so many a second.

    Raises RequestError where it is none of PCM, too short or too long.
    """
    if not isinstance(data, bytes):  # a text would be a path
        raise RequestError("inputs", "expected the bytes of a WAV file")
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, its_rate = (
                file.getsampwidth(),
                file.getnchannels(),
                file.getframerate(),
            )
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        reason = str(error) or "it ends too early"
        raise RequestError("inputs", f"is no WAV file of PCM samples: {reason}") from None
    frames = frames[: len(frames) - len(frames) % (width * channels)]
    if its_rate not in RATES:
        raise RequestError("inputs", f"has a strange sampling rate: {its_rate} Hz")
    seconds = len(frames) / (width * channels * its_rate)
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise RequestError(
            "inputs", f"lasts {seconds:.2f} s; {MIN_SECONDS} to {MAX_SECONDS} s are taken"
        )
    mono = _floats(frames, width).reshape(-1, channels).mean(axis=1)
    return resampled(mono, its_rate, rate).astype(np.float32)


def write_wav(samples: NDArray[Any], rate: int) -> bytes:
    """A WAV file of 16 bits a sample: [samples] or [channels, samples], of -1 to 1."""
    channels = samples if samples.ndim == 2 else samples[None]
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((channels.T.clip(-1, 1) * (2**15 - 1)).round().astype("<i2").tobytes())
    return data.getvalue()


def resampled(samples: NDArray[np.float64], rate: int, wanted: int) -> NDArray[np.float64]:
    """The same sound with `wanted` instead of `rate` samples a second.

    By its spectrum, which is cut or filled with zeros. That takes a sound for periodic, so it is
    continued by its mirror image, without which there would be a click at both ends; and first up
    to a whole number of samples at both rates, without which it would be stretched.
    """
    if rate == wanted:
        return samples
    whole = np.pad(samples, (0, -len(samples) % (rate // math.gcd(rate, wanted))), "symmetric")
    num_wanted = len(whole) * wanted // rate
    spectrum = np.fft.rfft(np.concatenate([whole, whole[::-1]]))
    same = np.fft.irfft(spectrum, 2 * num_wanted) * (num_wanted / len(whole))
    return same[: math.ceil(len(samples) * wanted / rate)]


def _floats(frames: bytes, width: int) -> NDArray[np.float64]:
    """Of little-endian integers of so many bytes; those of one byte are unsigned."""
    if width == 1:
        return np.frombuffer(frames, np.uint8) / 128.0 - 1.0
    # Each becomes the upper bytes of 32 bits.
    padded = np.zeros((len(frames) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(frames, np.uint8).reshape(-1, width)
    return padded.view("<i4")[:, 0] / 2.0**31
