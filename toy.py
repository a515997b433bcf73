"""The toy world: a small real one, in which the whole method runs on a laptop.

eSpeak NG speaks sentences of a small grammar in many voices (the corpus) and a small frame-domain
VAE turns speech into latents; toy_judges.py has the recognisers and speaker encoders that judge it.
This is the stand-in for Emilia and Semantic-VAE at a size that fits two CPU cores. train.py owns
the training loop (`Run.fit`), and nothing in model.py, rewards.py or grow.py knows this file.
"""

import ctypes
import hashlib
import json
import math
import multiprocessing
import os
import random
import signal
import threading
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.audio_utils import mel_filter_bank

from checks import at_least
from judges import load_strict

SAMPLE_RATE = 16_000
HOP_SAMPLES = 400               # one latent frame: 25 ms, 40 Hz
PATCH_SAMPLES = 1_600           # one patch of P=4 frames
ALPHABET = " abcdefghijklmnopqrstuvwxyz"

# ---------------------------------------------------------------- sentences and voices

PEOPLE = "man woman girl teacher doctor farmer king mother".split()
ANIMALS = "dog cat horse rabbit monkey elephant".split()
ADJECTIVES = "old young small happy black white tall".split()
MOVED = "walked went came ran".split()
DID = "saw found liked wanted".split()
THINGS = "paper table picture flower hat apple window".split()
PLACES = "river garden house school market kitchen forest mountain".split()
WORDS = sorted({*PEOPLE, *ANIMALS, *ADJECTIVES, *MOVED, *DID, *THINGS, *PLACES,
                *"the we they she he was looked to from behind".split()})

# eSpeak NG's voice variants by split, so that RL and evaluation hear voices that DiTAR's
# pretraining never did. Left out are those that Whisper tiny.en cannot follow (they whisper, growl
# or ring); the clearest ones are kept for RL and evaluation, where real judges may listen.
VARIANTS = {name: names.split() for name, names in dict(
    pretrain="Mr_serious m1 Mario m8 steph2 Michael adam edward2 john iven2 robert Mike iven4 "
             "Tweaky rob f4 pablo f1 Annie david Reed Marco norbert anika travis klatt klatt3 "
             "klatt6 robosoft3 robosoft4 robosoft5 robosoft6 robosoft7 iven paul ian marcelo zac "
             "announcer caleb shelby grandma boris f5",
    rl="Hugo miguel m4 Gene2 antonio Alex iven3 grandpa steph3 sandro m6 mike2 michel gustave f2 "
       "Jacky ed max quincy aunty",
    tune="croak Denis m2 victor edward m7",
    eval="m3 Henrique steph Storm Nguyen Gene benjamin Diogo pedro f3 linda m5").items()}


def sentence(rng):
    """Three to seven words of a small grammar. rng: random.Random."""
    def noun(nouns, p_adjective):
        adjective = rng.choice(ADJECTIVES) + " " if rng.random() < p_adjective else ""
        return f"the {adjective}{rng.choice(nouns)}"
    subject = rng.choice("we they she he".split()) if rng.random() < 0.2 else noun(
        PEOPLE + ANIMALS, 0.4)
    kind = rng.random()
    if kind < 0.1:
        return f"{subject} {rng.choice(['was', 'looked'])} {rng.choice(ADJECTIVES)}"
    if kind < 0.55:
        return f"{subject} {rng.choice(MOVED)} {rng.choice(['to', 'from', 'behind'])} the " \
               f"{rng.choice(PLACES)}"
    return f"{subject} {rng.choice(DID)} {noun(THINGS + ANIMALS, 0.4)}"


def held_out(text):
    """A tenth of all sentences is kept for tuning and evaluation and never trained on."""
    return zlib.crc32(text.encode()) % 10 == 0


@dataclass(frozen=True)
class CorpusConfig:
    pretrain: int = 12_000      # utterances of each split; DiTAR learns from this one
    judge: int = 6_000          # the VAE's and the judges' own, in every split's voices
    rl: int = 2_000             # prompts of GROW, in voices that pretraining never saw
    tune: int = 512             # for choosing hyper-parameters; never reported
    eval: int = 512             # held-out prompts in voices that no DiTAR training saw
    speakers_per_variant: int = 6   # eSpeak pitch and intonation range drawn per speaker
    rate_wpm: int = 140         # a calm rate, words per minute
    word_gap: int = 2           # extra blank between words, 10 ms each
    seed: int = 0
    cache_dir: str = "out/corpus"

    def __post_init__(self):
        at_least("corpus", self, pretrain=2, judge=2, rl=2, tune=2, eval=2, speakers_per_variant=1,
                 word_gap=0)
        if not 80 <= self.rate_wpm <= 450:
            raise ValueError(f"corpus.rate_wpm={self.rate_wpm}; eSpeak NG speaks 80 to 450")


@dataclass
class Corpus:
    """Utterances of one split. wavs: list of int16 arrays, 16 kHz, multiples of 1,600 samples."""
    texts: list
    speakers: np.ndarray        # (N,) int, one id per voice over all splits
    wavs: list

    def wav(self, i):
        return torch.from_numpy(self.wavs[i].astype(np.float32) / 32768)    # (S,)


def load_espeak():
    """eSpeak NG's library and the folder of its data. Raises ImportError where they are missing."""
    try:
        import espeakng_loader
        return (ctypes.CDLL(espeakng_loader.get_library_path()),
                str(Path(espeakng_loader.get_data_path()).parent).encode())
    except (ImportError, OSError) as error:
        raise ImportError(f"eSpeak NG could not be loaded ({error}); the toy corpus needs it: "
                          "pip install espeakng-loader") from error


class ESpeak:
    """eSpeak NG through ctypes; one instance a process (the library keeps global state)."""
    SYNCHRONOUS, UTF8, DONT_EXIT = 2, 1, 0x8000
    RATE, PITCH, RANGE, WORD_GAP = 1, 3, 4, 7

    def __init__(self):
        self.lib, data = load_espeak()
        self.rate_hz = self.lib.espeak_Initialize(self.SYNCHRONOUS, 0, data, self.DONT_EXIT)
        if self.rate_hz <= 0:
            raise RuntimeError("eSpeak NG did not find its data; reinstall espeakng-loader")
        self.lib.espeak_ng_SetRandSeed(ctypes.c_long(1))    # its breath noise; else the clock's
        self.chunks = []

        def collect(samples, n, events):
            if n > 0:
                self.chunks.append(np.ctypeslib.as_array(samples, (n,)).copy())
            return 0
        self.callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short),
                                         ctypes.c_int, ctypes.c_void_p)(collect)
        self.lib.espeak_SetSynthCallback(self.callback)

    def speak(self, text, variant, pitch, pitch_range, rate_wpm, word_gap):
        """Returns int16 (S,), 16 kHz, S a multiple of 1,600, blanks trimmed, one loudness."""
        if self.lib.espeak_SetVoiceByName(f"en-us+{variant}".replace("_", " ").encode()) != 0:
            raise RuntimeError(f"eSpeak NG has no voice variant {variant!r}")
        for parameter, value in ((self.RATE, rate_wpm), (self.PITCH, pitch),
                                 (self.RANGE, pitch_range), (self.WORD_GAP, word_gap)):
            self.lib.espeak_SetParameter(parameter, value, 0)
        self.chunks.clear()
        data = text.encode()
        self.lib.espeak_Synth(data, len(data) + 1, 0, 1, 0, self.UTF8, None, None)
        wav = np.concatenate(self.chunks).astype(np.float32) / 32768
        wav = soxr.resample(wav, self.rate_hz, SAMPLE_RATE)
        loud = np.flatnonzero(np.abs(wav) > 0.01)
        wav = wav[loud[0]:loud[-1] + 1]
        wav = wav * min(0.08 / np.sqrt(np.mean(wav ** 2)), 0.95 / np.abs(wav).max())
        length = math.ceil((len(wav) + 1_600) / PATCH_SAMPLES) * PATCH_SAMPLES
        wav = np.pad(wav, (640, length - len(wav) - 640))       # 40 ms before, 60-160 ms after
        return np.round(wav * 32767).astype(np.int16)


def speakers_of(split, config):
    """The (id, variant, pitch, range) of each speaker of a split; "judge" has those of all."""
    if split == "judge":
        return [s for name in VARIANTS for s in speakers_of(name, config)]
    rows = []
    everyone = [v for names in VARIANTS.values() for v in names]
    for variant in VARIANTS[split]:
        rng = random.Random(f"{config.seed}-{variant}")
        for k in range(config.speakers_per_variant):
            number = everyone.index(variant) * config.speakers_per_variant + k
            rows.append((number, variant, rng.randint(25, 75), rng.randint(30, 80)))
    return rows


def _speak_chunk(job):
    rows, rate_wpm, word_gap = job
    espeak = ESpeak()
    return [espeak.speak(text, *voice, rate_wpm, word_gap) for text, voice in rows]


def _end_with_parent():
    """A worker whose parent was killed would wait for its next job for ever."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)                    # Ctrl-C without a traceback
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _speak_alone(job):
    """In a fresh process: eSpeak carries phases and noise over to the next utterance."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        return pool.submit(_speak_chunk, job).result()


def corpus(split, config, processes=None):
    """The Corpus of a split ("pretrain", "judge", "rl", "tune", "eval"), made once and cached.

    Deterministic: sentence and voice of utterance i depend on (seed, split, i) alone. The file's
    name carries a hash of all that shapes it. Utterances 2k and 2k+1 are by the same speaker, so
    that (prompt, target) pairs lie side by side.
    """
    size, voices = getattr(config, split), speakers_of(split, config)
    rows = []
    for i in range(size):
        rng = random.Random(f"{config.seed}-{split}-{i}")
        text = sentence(rng)
        while split != "judge" and held_out(text) != (split in ("tune", "eval")):
            text = sentence(rng)
        number, *voice = voices[random.Random(f"{config.seed}-{split}-{i // 2}-voice").randrange(
            len(voices))]
        rows.append((text, number, tuple(voice)))
    version = "v2"                      # raise it when what `speak` returns changes
    key = json.dumps([rows, config.rate_wpm, config.word_gap, version]).encode()
    path = Path(config.cache_dir) / f"{split}-{hashlib.sha256(key).hexdigest()[:12]}.npz"
    if not path.exists():
        load_espeak()                   # refuses here, not in a process of its own
        jobs = [([(t, v) for t, _, v in rows[i:i + 500]], config.rate_wpm, config.word_gap)
                for i in range(0, size, 500)]
        with ThreadPoolExecutor(processes or os.cpu_count()) as pool:
            wavs = [wav for chunk in pool.map(_speak_alone, jobs) for wav in chunk]
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp.npz")
        np.savez(scratch, wavs=np.concatenate(wavs), lengths=[len(w) for w in wavs])
        os.replace(scratch, path)
    with np.load(path) as data:
        wavs = np.split(data["wavs"], np.cumsum(data["lengths"])[:-1])
    return Corpus([t for t, _, _ in rows], np.array([n for _, n, _ in rows]), wavs)


def encode_text(text):
    """Character ids of a text. Raises ValueError that names characters outside the alphabet."""
    unknown = sorted(set(text) - set(ALPHABET))
    if unknown:
        raise ValueError(f"characters {unknown} in {text!r} are outside the toy alphabet "
                         f"(a-z and blank); write the text out in lower-case words")
    if not text.strip():
        raise ValueError("the text is empty; give at least one word")
    return [ALPHABET.index(c) for c in text]


# ---------------------------------------------------------------- layers that the judges share

class ConvNeXt(nn.Module):
    """Depthwise convolution over time, then an MLP per frame; padding frames stay out of it."""

    def __init__(self, dim, kernel=7, mult=2, dilation=1):
        super().__init__()
        self.depthwise = nn.Conv1d(dim, dim, kernel, groups=dim, dilation=dilation,
                                   padding=dilation * (kernel // 2))
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mult * dim), nn.GELU(), nn.Linear(mult * dim, dim))

    def forward(self, x, mask):
        """x: (B, T, C); mask: (B, T, 1), 0 on padding."""
        y = self.depthwise((x * mask).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm(y))


def frame_mask(lengths, n_frames):
    return (torch.arange(n_frames, device=lengths.device) < lengths[:, None]).float()[..., None]


def spectrum(wavs, n_fft, hop):
    """STFT on exactly S/hop frames (no frame hangs over the ends): (B, S) -> (B, S/hop, n_fft/2+1).
    Zero padding on both sides, so a padded batch equals its singles."""
    side = (n_fft - hop) // 2
    frames = F.pad(wavs, (side, n_fft - hop - side)).unfold(1, n_fft, hop)
    return torch.fft.rfft(frames * torch.hann_window(n_fft, device=wavs.device))


def log_mel(wavs, n_fft, hop, n_mels):
    """(B, S) -> (B, S/hop, n_mels), natural log of mel magnitudes, roughly unit scale."""
    mel = torch.as_tensor(mel_filter_bank(n_fft // 2 + 1, n_mels, 40, 7_800, SAMPLE_RATE, norm=None,
                                          mel_scale="htk"), dtype=torch.float32, device=wavs.device)
    return (torch.log(spectrum(wavs, n_fft, hop).abs() @ mel + 1e-2) + 1) / 2


def pad_batch(wavs, multiple=6_400):
    """List of (S_i,) tensors -> (B, S) zero-padded to few different lengths (see model.pad_rows),
    (B,) lengths in samples."""
    lengths = torch.tensor([len(w) for w in wavs])
    longest = math.ceil(int(lengths.max()) / multiple) * multiple
    return torch.stack([F.pad(w, (0, longest - len(w))) for w in wavs]), lengths


# ---------------------------------------------------------------- the VAE

@dataclass(frozen=True)
class VAEConfig:
    latent_dim: int = 16        # D; Semantic-VAE has 64 for all of speech
    dim: int = 192              # channels at 40 Hz
    dim_up: int = 160           # channels at 80 Hz, where the inverse STFT runs
    layers: int = 3             # encoder blocks; the decoder has one more, and two at 80 Hz
    kl_weight: float = 0.08     # nats a dimension; a tight code is what DiTAR learns fast
    steps: int = 1_400
    batch: int = 24             # segments of one second
    lr: float = 2e-3

    def __post_init__(self):
        at_least("vae", self, latent_dim=1, dim=1, dim_up=1, layers=1, kl_weight=0, steps=1,
                 batch=1, lr=0)


class ToyVAE(nn.Module):
    """The small VAE: encode -> (mean, log-variance), decode, hop 400.

    STFT in, ConvNeXt blocks at the frame rate, inverse-STFT head out (no transposed convolution).
    Latents that leave and enter are normalised per channel by statistics of the training data.
    """
    N_FFT, SUB_HOP = 800, 200   # two STFT columns a latent frame

    def __init__(self, config=VAEConfig()):
        super().__init__()
        c, bins = config, self.N_FFT // 2 + 1
        self.config = c
        self.encode_in = nn.Linear(2 * bins, c.dim)
        self.encoder = nn.ModuleList(ConvNeXt(c.dim) for _ in range(c.layers))
        self.encode_out = nn.Linear(c.dim, 2 * c.latent_dim)
        self.decode_in = nn.Linear(c.latent_dim, c.dim)
        self.decoder = nn.ModuleList(ConvNeXt(c.dim) for _ in range(c.layers + 1))
        self.up = nn.Linear(c.dim, 2 * c.dim_up)
        self.decoder_up = nn.ModuleList(ConvNeXt(c.dim_up) for _ in range(2))
        self.decode_out = nn.Linear(c.dim_up, 2 * bins)
        self.register_buffer("latent_mean", torch.zeros(c.latent_dim))
        self.register_buffer("latent_std", torch.ones(c.latent_dim))

    def posterior(self, wavs, lengths=None):
        B, S = wavs.shape
        T = S // HOP_SAMPLES
        mask = frame_mask((torch.full((B,), S, device=wavs.device) if lengths is None
                           else lengths) // HOP_SAMPLES, T)
        x = torch.log(spectrum(wavs, self.N_FFT, self.SUB_HOP).abs() + 1e-2)    # (B, 2T, bins)
        x = self.encode_in(x.reshape(B, T, -1))
        for block in self.encoder:
            x = block(x, mask)
        mean, log_var = self.encode_out(x).chunk(2, dim=-1)         # (B, T, D) each
        return mean, log_var.clamp(-10, 4), mask

    def encode(self, wavs, lengths=None):
        """Deterministic. wavs: (B, S), S a multiple of 400; lengths: (B,) samples or None.
        Returns normalised mean and log-variance, (B, S/400, D) each; frames past a length are
        undefined. Raises ValueError for a length that is no multiple of the hop."""
        if wavs.shape[1] % HOP_SAMPLES:
            raise ValueError(f"{wavs.shape[1]} samples is no multiple of the hop of {HOP_SAMPLES}; "
                             "crop the prompt to whole patches first")
        mean, log_var, _ = self.posterior(wavs, lengths)
        return ((mean - self.latent_mean) / self.latent_std,
                log_var - 2 * torch.log(self.latent_std))

    def decode(self, latents, lengths=None):
        """latents: (B, T, D) normalised; lengths: (B,) frames or None. Returns (B, 400 T)."""
        return self.synthesize(latents * self.latent_std + self.latent_mean, lengths)

    def synthesize(self, z, lengths=None):
        B, T, _ = z.shape
        lengths = torch.full((B,), T, device=z.device) if lengths is None else lengths
        mask, mask_up = frame_mask(lengths, T), frame_mask(2 * lengths, 2 * T)
        x = self.decode_in(z)
        for block in self.decoder:
            x = block(x, mask)
        x = self.up(x).view(B, 2 * T, -1)
        for block in self.decoder_up:
            x = block(x, mask_up)
        log_mag, phase = self.decode_out(x).chunk(2, dim=-1)        # (B, 2T, bins) each
        spec = torch.polar(torch.exp(log_mag.clamp(max=6)) * mask_up, phase * mask_up)
        window = torch.hann_window(self.N_FFT, device=z.device)
        frames = torch.fft.irfft(spec) * window / 1.5               # hann^2 at 75 % overlap: 1.5
        length = (2 * T - 1) * self.SUB_HOP + self.N_FFT
        wav = F.fold(frames.transpose(1, 2), (1, length), (1, self.N_FFT),
                     stride=(1, self.SUB_HOP))[:, 0, 0]
        side = (self.N_FFT - self.SUB_HOP) // 2
        return wav[:, side:side + T * HOP_SAMPLES]


def vae_loss(vae, wavs, noise):
    """Multi-resolution spectral reconstruction + KL. wavs: (B, S); noise: (B, T, D) standard
    normal. Returns loss and a dict of floats."""
    mean, log_var, _ = vae.posterior(wavs)
    out = vae.synthesize(mean + torch.exp(0.5 * log_var) * noise)
    reconstruction = 0.0
    for n_fft in (256, 512, 1024, 2048):
        a, b = (spectrum(w, n_fft, n_fft // 4).abs() for w in (out, wavs))
        reconstruction = reconstruction + F.l1_loss(torch.log(a + 1e-2), torch.log(b + 1e-2)) \
            + 0.5 * (a - b).norm() / (b.norm() + 1e-3)
    for n_mels, n_fft in ((40, 512), (80, 1024)):
        reconstruction = reconstruction + 2 * F.l1_loss(log_mel(out, n_fft, 160, n_mels),
                                                        log_mel(wavs, n_fft, 160, n_mels))
    kl = 0.5 * (mean ** 2 + log_var.exp() - 1 - log_var).mean()
    return reconstruction + vae.config.kl_weight * kl, {"reconstruction": reconstruction.item(),
                                                        "kl": kl.item()}


def log_mel_l1(vae, wav):
    """Mean absolute error of a waveform (S,) through the VAE and back, in log mel energies."""
    again = vae.decode(vae.encode(wav[None])[0])
    return F.l1_loss(*(log_mel(x, 1024, 160, 80) for x in (again, wav[None]))).item()


def train_vae(run):
    """Stage "vae": on one-second segments of the judge split; then its latent statistics."""
    c = run.config.vae
    data = corpus("judge", run.config.corpus)
    torch.manual_seed(run.config.seed)
    vae = ToyVAE(c)

    def gradients(step):
        g = run.generator("vae", step)
        wavs = []
        for i in torch.randint(len(data.wavs), (c.batch,), generator=g).tolist():
            wav = data.wav(i)
            wav = F.pad(wav, (0, max(0, 16_000 - len(wav))))
            at = int(torch.randint(len(wav) - 16_000 + 1, (1,), generator=g))
            wavs.append(wav[at:at + 16_000])
        noise = torch.randn(c.batch, 40, c.latent_dim, generator=g)
        loss, logs = vae_loss(vae, torch.stack(wavs), noise)
        (loss / run.ranks).backward()       # every rank does the same batch
        return logs

    weights = run.fit("vae", vae, gradients, c.steps, c.lr, warmup=100, hold=0.3, ema=0.999)
    vae.load_state_dict(weights, strict=False)
    with torch.no_grad():
        sample = [data.wav(i) for i in range(min(300, len(data.wavs)))]
        means = torch.cat([vae.encode(w[None])[0][0] for w in sample])
        vae.latent_mean.copy_(means.mean(dim=0))
        vae.latent_std.copy_(means.std(dim=0))
        errors = [log_mel_l1(vae, wav) for wav in sample[:100]]
    run.finish("vae", vae.state_dict(), {"log_mel_l1": sum(errors) / len(errors)})


def load_vae(run):
    """The frozen VAE of a finished stage."""
    path, (tensors, meta) = run.find("vae"), run.load("vae")
    vae = ToyVAE(VAEConfig(**meta["config"].get("vae", {})))
    load_strict(vae, tensors, path, "a toy VAE; run stages=vae in another out_dir")
    return vae.requires_grad_(False).eval()
