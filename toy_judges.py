"""The toy world's judges: two recognisers and two speaker encoders, small stand-ins for Whisper and
WavLM with the same interface (transcribe, embed).

Of each kind one gives the reward ("asr", "speaker") and the other, of another architecture, other
features and another seed, is held out ("asr_held", "speaker_held"): it never enters a reward and
stands beside the first in every table. They learn from their own utterances in all voices, with
noise, gain, speed and VAE reconstruction, and are frozen before RL begins. Their own error on real
speech is measured when they are made: it bounds what RL can show.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from checks import at_least
from judges import load_strict
from rewards import wer
from toy import (ALPHABET, ConvNeXt, corpus, encode_text, frame_mask, load_vae, log_mel,
                 pad_batch)


@dataclass(frozen=True)
class JudgeConfig:
    asr_steps: int = 1_500
    asr_batch: int = 32         # utterances
    speaker_steps: int = 1_000
    speaker_batch: int = 64
    lr: float = 2e-3

    def __post_init__(self):
        at_least("judges", self, asr_steps=1, asr_batch=1, speaker_steps=1, speaker_batch=1, lr=0)


class CTCRecognizer(nn.Module):
    """Characters by CTC, greedy. `kind` "conv": ConvNeXt blocks at 50 Hz (gives the reward);
    "gru": two bidirectional GRU layers at 40 Hz on other features (held out)."""

    def __init__(self, kind, dim=None):
        super().__init__()
        self.kind = kind
        n_out = len(ALPHABET) + 1                                   # class 0 is the blank
        if kind == "conv":
            dim = dim or 144
            self.hop, self.mel = 320, (512, 160, 80)                # n_fft, hop, mels
            self.proj = nn.Linear(2 * 80, dim)
            self.blocks = nn.ModuleList(ConvNeXt(dim, kernel=9) for _ in range(5))
        else:
            dim = dim or 224
            self.hop, self.mel = 400, (800, 200, 64)
            self.proj = nn.Linear(2 * 64, dim)
            self.blocks = nn.GRU(dim, dim // 2, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(dim, n_out)

    def forward(self, wavs, lengths):
        """wavs: (B, S); lengths: (B,) samples. Returns log-probs (B, T, 28) and (B,) frames."""
        n = lengths // self.hop
        x = log_mel(F.pad(wavs, (0, -wavs.shape[1] % self.hop)), *self.mel)
        x = self.proj(x.reshape(len(x), -1, 2 * self.mel[2]))       # (B, T, C)
        if self.kind == "conv":
            mask = frame_mask(n, x.shape[1])
            for block in self.blocks:
                x = block(x, mask)
        else:
            packed = nn.utils.rnn.pack_padded_sequence(F.gelu(x), n.cpu(), batch_first=True,
                                                       enforce_sorted=False)
            x = nn.utils.rnn.pad_packed_sequence(self.blocks(packed)[0], batch_first=True,
                                                 total_length=x.shape[1])[0]
        return self.out(x).log_softmax(-1), n

    @torch.no_grad()
    def transcribe(self, wavs):
        """List of (S,) tensors at 16 kHz -> list of texts. Independent of the batch."""
        texts = []
        for i in range(0, len(wavs), 64):
            padded, lengths = pad_batch(wavs[i:i + 64])
            scores, n = self(padded, lengths)
            for ids, length in zip(scores.argmax(-1).tolist(), n.tolist()):
                ids = ids[:length]
                kept = [c for c, before in zip(ids, [0] + ids) if c != before and c != 0]
                texts.append(" ".join("".join(ALPHABET[c - 1] for c in kept).split()))
        return texts


class SpeakerEncoder(nn.Module):
    """Waveform -> unit vector. `kind` "attentive": ConvNeXt blocks and attentive statistics
    pooling (gives the reward); "tdnn": dilated convolutions and plain statistics (held out)."""

    def __init__(self, kind, dim=128, emb=96):
        super().__init__()
        self.kind = kind
        self.mel = (640, 200, 80) if kind == "attentive" else (1024, 320, 64)
        self.proj = nn.Linear(self.mel[2], dim)
        if kind == "attentive":
            self.blocks = nn.ModuleList(ConvNeXt(dim) for _ in range(3))
            self.attention = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, dim))
        else:
            self.blocks = nn.ModuleList(nn.Conv1d(dim, dim, 3, dilation=d, padding=d)
                                        for d in (1, 2, 3, 1))
        self.out = nn.Linear(2 * dim, emb)

    def forward(self, wavs, lengths):
        """wavs: (B, S); lengths: (B,) samples. Returns (B, emb), unit norm."""
        hop = self.mel[1]
        x = log_mel(F.pad(wavs, (0, -wavs.shape[1] % hop)), *self.mel)
        mask = frame_mask(lengths // hop, x.shape[1])
        x = self.proj(x)
        if self.kind == "attentive":
            for block in self.blocks:
                x = block(x, mask)
            score = self.attention(x).masked_fill(mask == 0, -1e9)
            weight = score.softmax(dim=1)                           # (B, T, C)
        else:
            for conv in self.blocks:
                x = F.relu(conv((x * mask).transpose(1, 2)).transpose(1, 2))
            weight = mask / mask.sum(dim=1, keepdim=True)
        mean = (weight * x).sum(dim=1)
        std = (weight * (x - mean[:, None]) ** 2).sum(dim=1).clamp_min(1e-6).sqrt()
        return F.normalize(self.out(torch.cat((mean, std), dim=-1)), dim=-1)

    @torch.no_grad()
    def embed(self, wavs):
        """List of (S,) tensors at 16 kHz -> (B, emb). Independent of the batch."""
        return torch.cat([self(*pad_batch(wavs[i:i + 64])) for i in range(0, len(wavs), 64)])


def augment(wavs, lengths, generator, speed):
    """What makes a judge hard to fool: gain, white noise at 10-50 dB and, if `speed`, 0.9-1.1x."""
    B = len(wavs)
    def uniform(low, high, n=B):
        return low + (high - low) * torch.rand(n, generator=generator)
    if speed:
        factor = float(uniform(0.9, 1.1, 1))
        wavs = F.interpolate(wavs[:, None], scale_factor=factor, mode="linear")[:, 0]
        lengths = (lengths * factor).long().clamp(max=wavs.shape[1])
    rms = wavs.pow(2).mean(dim=1, keepdim=True).sqrt()
    noise = torch.randn(wavs.shape, generator=generator)
    noise = noise * rms * 10 ** (-uniform(10, 50)[:, None] / 20)
    return (wavs + noise) * 10 ** (uniform(-6, 6)[:, None] / 20), lengths


def asr_loss(asr, wavs, lengths, texts):
    """CTC, summed per utterance over its characters' count, then the mean."""
    scores, n = asr(wavs, lengths)
    targets = torch.tensor([c + 1 for text in texts for c in encode_text(text)])
    return F.ctc_loss(scores.transpose(0, 1), targets, n,
                      torch.tensor([len(text) for text in texts]), zero_infinity=True)


def speaker_loss(encoder, classes, wavs, lengths, speakers, margin=0.2, scale=20.0):
    """Additive-margin softmax over the training voices. classes: (n_speakers, emb) parameter."""
    cosine = encoder(wavs, lengths) @ F.normalize(classes, dim=-1).T
    return F.cross_entropy(scale * (cosine - margin * F.one_hot(speakers, len(classes))), speakers)


JUDGES = {"asr": lambda: CTCRecognizer("conv"), "asr_held": lambda: CTCRecognizer("gru"),
          "speaker": lambda: SpeakerEncoder("attentive"),
          "speaker_held": lambda: SpeakerEncoder("tdnn")}


def train_judges(run):
    """Stage "judges": all four, on real and VAE-reconstructed speech in every split's voices."""
    c = run.config.judges
    data, vae = corpus("judge", run.config.corpus), load_vae(run)
    n_speakers = int(data.speakers.max()) + 1
    rebuilt = [vae.decode(vae.encode(data.wav(i)[None])[0])[0] for i in range(len(data.wavs))]
    tensors = {}
    for seed, (name, make) in enumerate(JUDGES.items()):
        torch.manual_seed(run.config.seed + seed)
        module = make()
        is_asr = name.startswith("asr")
        if not is_asr:
            module.classes = nn.Parameter(torch.randn(n_speakers, module.out.out_features))
        batch, steps = ((c.asr_batch, c.asr_steps) if is_asr
                        else (c.speaker_batch, c.speaker_steps))

        def gradients(step):
            g = run.generator(name, step)
            rows = torch.randint(len(data.wavs), (batch,), generator=g).tolist()
            real = (torch.rand(batch, generator=g) < 0.5).tolist()  # half are VAE reconstructions
            wavs, lengths = pad_batch([data.wav(i) if r else rebuilt[i]
                                           for i, r in zip(rows, real)])
            wavs, lengths = augment(wavs, lengths, g, speed=is_asr)
            if is_asr:
                loss = asr_loss(module, wavs, lengths, [data.texts[i] for i in rows])
            else:
                loss = speaker_loss(module, module.classes, wavs, lengths,
                                        torch.from_numpy(data.speakers[rows]))
            (loss / run.ranks).backward()   # every rank does the same batch
            return {"loss": loss.item()}

        weights = run.fit("judges", module, gradients, steps, c.lr, warmup=100, hold=0.3,
                          ema=0.999, part="." + name)
        tensors |= {f"{name}.{k}": v for k, v in weights.items() if k != "classes"}
    run.finish("judges", tensors, judge_scores(run, vae, judges_from(tensors)))


def judges_from(tensors, path="judges.safetensors"):
    judges = {}
    for name, make in JUDGES.items():
        judges[name] = make().requires_grad_(False).eval()
        load_strict(judges[name], {k.removeprefix(name + "."): v for k, v in tensors.items()
                                   if k.startswith(name + ".")}, path, f"the toy judge {name}; run "
                    "stages=judges in another out_dir")
    return judges


def judge_scores(run, vae, judges, limit=256):
    """The judges' own error on real speech, which bounds what RL can show, and on the VAE's."""
    data = corpus("eval", run.config.corpus)
    n = min(limit, len(data.wavs)) // 2 * 2
    wavs = [data.wav(i) for i in range(n)]
    rebuilt = [vae.decode(vae.encode(w[None])[0])[0] for w in wavs]
    scores = {}
    for name, judge in judges.items():
        if name.startswith("asr"):
            for label, audio in (("real", wavs), ("vae", rebuilt)):
                texts = judge.transcribe(audio)
                scores[f"{name}_wer_{label}"] = sum(
                    wer(ref, hyp) for ref, hyp in zip(data.texts, texts)) / n
        else:
            a, b = judge.embed(wavs), judge.embed(rebuilt)
            other = torch.roll(a[0::2], 1, dims=0)
            scores |= {f"{name}_same": (a[0::2] * a[1::2]).sum(1).mean().item(),
                       f"{name}_other": (a[0::2] * other).sum(1).mean().item(),
                       f"{name}_vae": (a * b).sum(1).mean().item()}
    return scores


def load_judges(run):
    """The four frozen judges of a finished stage: name -> judge."""
    return judges_from(run.load("judges")[0], run.find("judges"))
