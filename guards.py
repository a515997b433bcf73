"""Guards of a long RL run: what the rollouts sound like beside the start, and how far a reward can
be believed.

A policy that games a judge mostly does so audibly: it slows down, falls silent, shouts, or runs
into the length cap. The panel puts these into every line of the log, and a warning is printed once
when one has moved by more than its bound from the first steps, where the policy was the reference.
"""

from dataclasses import dataclass

import torch

from checks import at_least

FRAME_SAMPLES = 400             # 25 ms
QUIET = 0.03                    # of a clip's loudest frame, -30 dB: such a frame is silence


@dataclass(frozen=True)
class GuardConfig:
    """How far each number may move from the first `warm_steps` steps before a warning; 0 is off."""
    warm_steps: int = 3
    seconds: float = 0.25       # of speech, relative
    rate: float = 0.25          # characters a second, relative
    silence: float = 0.15       # share of silent frames, absolute
    loudness: float = 6.0       # dB
    caps: float = 0.1           # share of rollouts that the length cap ended, absolute
    bad: float = 0.1            # share of rollouts with nothing to judge, absolute
    anchor: float = 0.2         # ‖v - v_ref‖² per latent dim, absolute; the toy diverges beyond it
    probe_every: int = 0        # steps between held-out scores, which decide the best; 0 is off
    probe_n: int = 64           # prompts of a probe
    probe_nfe: int = 10

    def __post_init__(self):
        at_least("guards", self, warm_steps=1, seconds=0, rate=0, silence=0, loudness=0, caps=0,
                 bad=0, anchor=0, probe_every=0, probe_n=2, probe_nfe=1)


RELATIVE = ("seconds", "rate")
PANEL = ("seconds", "rate", "silence", "loudness", "caps", "bad", "anchor")


def panel(wavs, texts):
    """Means over rollouts. wavs: list of (S,), S > 0; texts: what each was to say.
    Returns seconds of speech, characters a second, share of silent frames, loudness in dBFS."""
    totals = dict.fromkeys(("seconds", "rate", "silence", "loudness"), 0.0)
    for wav, text in zip(wavs, texts, strict=True):
        seconds = len(wav) / 16_000
        whole = wav[:len(wav) // FRAME_SAMPLES * FRAME_SAMPLES]
        frames = whole.view(-1, FRAME_SAMPLES).square().mean(dim=1).sqrt()
        totals["seconds"] += seconds
        totals["rate"] += len(text) / seconds
        totals["silence"] += (frames < QUIET * frames.amax()).float().mean().item()
        totals["loudness"] += 20 * wav.square().mean().clamp_min(1e-12).sqrt().log10().item()
    return {name: total / len(wavs) for name, total in totals.items()}


class Drift:
    """Compares each step's panel with the first steps'. first: the log's records of those steps
    that an earlier start of this run already took."""

    def __init__(self, config, first=()):
        self.config, self.first, self.warned = config, list(first)[:config.warm_steps], set()

    def check(self, logs):
        """Returns the warnings that this step's numbers give for the first time."""
        if "seconds" not in logs:                       # no group was left in this step
            return []
        if len(self.first) < self.config.warm_steps:
            self.first.append(dict(logs))
            return []
        warnings = []
        for name in (n for n in PANEL if n in logs):    # GRPO has no anchor
            bound = getattr(self.config, name)
            start = sum(r[name] for r in self.first) / len(self.first)
            moved = logs[name] - start
            if name in RELATIVE:
                moved /= max(abs(start), 1e-6)
            if bound and abs(moved) > bound and name not in self.warned:
                self.warned.add(name)
                by = f"{100 * moved:+.0f} %" if name in RELATIVE else f"{moved:+.3g}"
                warnings.append(f"{name} was {start:.3g} at the start and is {logs[name]:.3g} "
                                f"({by}, bound {bound:g}); listen to rollouts, and raise "
                                "grow.beta_w2 or lower grow.lr if it goes on")
        return warnings


def noise_floor(streams, score, wavs, texts, prompts, generator):
    """How much of a reward is the judge's own noise: the same waveforms again with white noise
    60 dB below them. score: rewards.score. Returns name -> standard deviation of one reading."""
    nudged = [wav + 1e-3 * wav.square().mean().sqrt() * torch.randn(wav.shape, generator=generator)
              for wav in wavs]
    a, _ = score(streams, wavs, texts, prompts)
    b, _ = score(streams, nudged, texts, prompts)
    return {name: (a[name] - b[name]).square().mean().div(2).sqrt().item() for name in streams}
