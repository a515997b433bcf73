"""Reading an audio file that a user hands in: rewards.py, sample.py and vae.py do it alike.
Corpora, whose files are many and may be broken, have their own reader in data.py."""

import numpy as np
import soundfile
import soxr
import torch

SAMPLE_RATE = 16_000
SILENCE_PEAK = 1e-3     # -60 dBFS: nothing to imitate below it


def read_wav(path, silence=True):
    """An audio file as (S,) float32 at 16 kHz, not cropped. Channels are averaged and other rates
    resampled (soxr), each with a note on the screen. Raises ValueError that names the file if it
    cannot be read, is empty, holds NaN or, with silence=False, holds no sound."""
    try:
        wav, rate = soundfile.read(path, dtype="float32", always_2d=True)         # (S, channels)
    except (OSError, soundfile.LibsndfileError) as error:
        raise ValueError(f"{path}: no readable audio file ({error})") from error
    if wav.shape[1] > 1:
        print(f"note: {path} has {wav.shape[1]} channels; their mean is used")
    wav = wav.mean(axis=1)
    if not len(wav):
        raise ValueError(f"{path} is empty; record it again")
    if not np.isfinite(wav).all():
        raise ValueError(f"{path} holds NaN or infinite samples; export it again")
    if not silence and np.abs(wav).max() < SILENCE_PEAK:
        raise ValueError(f"{path} is silent; record it louder")
    if rate != SAMPLE_RATE:
        print(f"note: {path} is at {rate} Hz; resampled to {SAMPLE_RATE} Hz")
        wav = soxr.resample(wav, rate, SAMPLE_RATE)
    return torch.from_numpy(np.ascontiguousarray(wav, dtype=np.float32))
