"""Reading an audio file that a user hands in: rewards.py, sample.py and vae.py do it alike.
Corpora, whose files are many and may be broken, have their own reader in data.py."""

from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch

SAMPLE_RATE = 16_000
SILENCE_PEAK = 1e-3     # -60 dBFS: nothing to imitate below it
MAX_SEC = 60            # of one file; the networks take it whole, and their memory grows with it


def read_wav(path, silence=True, max_sec=MAX_SEC):
    """An audio file as (S,) float32 at 16 kHz, not cropped. Channels are averaged and other rates
    resampled (soxr), each with a note on the screen. Raises ValueError that names the file if it
    cannot be read, is empty, is longer than max_sec, holds NaN or no samples of -1 to 1 or, with
    silence=False, holds no sound."""
    try:
        with soundfile.SoundFile(path) as file:
            rate, sec = file.samplerate, file.frames / file.samplerate
            if sec > max_sec:                       # the header tells, before hours are decoded
                raise ValueError(f"{path} lasts {sec:.0f} s; wanted {max_sec} s at most: cut a "
                                 "passage out of it")
            wav = file.read(dtype="float32", always_2d=True)                      # (S, channels)
    except (OSError, soundfile.LibsndfileError) as error:
        raise ValueError(f"{path}: no readable audio file ({error})") from error
    if wav.shape[1] > 1:
        print(f"note: {path} has {wav.shape[1]} channels; their mean is used")
    wav = wav.mean(axis=1)
    if not len(wav):
        raise ValueError(f"{path} is empty; record it again")
    if not np.isfinite(wav).all():
        raise ValueError(f"{path} holds NaN or infinite samples; export it again")
    if (peak := np.abs(wav).max()) > 10:
        raise ValueError(f"{path} holds samples up to {peak:.0f}; wanted -1 to 1: were integers "
                         "written as floats? divide by 32768")
    if not silence and peak < SILENCE_PEAK:
        raise ValueError(f"{path} is silent; record it louder")
    if rate != SAMPLE_RATE:
        print(f"note: {path} is at {rate} Hz; resampled to {SAMPLE_RATE} Hz")
        wav = soxr.resample(wav, rate, SAMPLE_RATE)
    return torch.from_numpy(np.ascontiguousarray(wav, dtype=np.float32))


def check_out(path):
    """Before the work: raises ValueError for a wav that could not be written after it."""
    folder = Path(path).absolute().parent
    if Path(path).suffix != ".wav" or not folder.is_dir() or Path(path).is_dir():
        raise ValueError(f"{path}: wanted a name that ends in .wav, in a folder that exists")
