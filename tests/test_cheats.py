"""Cheats: ways to please a judge without speaking well, scored by the toy judges that give the
reward. None may rank above honest speech, whichever of the repository's rewards is configured.

Honest is a text of the held-out grammar spoken by eSpeak NG in the voice of the prompt, which says
another one; each at four calm rates, as the rollouts of a group differ too.
"""
import random
from pathlib import Path

import numpy as np
import pytest
import soxr
import torch

import rewards
import toy
from grow import weights
from rewards import RewardConfig
from run import load_tensors
from toy_judges import judges_from
from worlds import weighted_streams

WEIGHTS = Path(__file__).resolve().parents[1] / "weights" / "judges.safetensors"
RATES = (134, 138, 142, 146)    # words per minute of a text's four readings
PROMPTS = 5
LOUDNESS = 0.08                 # toy.ESpeak's, root mean square

pytestmark = pytest.mark.skipif(not WEIGHTS.exists(), reason="no weights/judges.safetensors; "
                                "python train.py --config toy.yaml stages=all makes it")


@pytest.fixture(scope="module")
def judges():
    return judges_from(load_tensors(WEIGHTS)[0])


@pytest.fixture(scope="module")
def spoken():
    """Five prompts in unheard voices, each with four honest readings of another text and the same
    readings in another voice, in a voice of pre-training and half as fast again."""
    config, espeak, rng = toy.CorpusConfig(), toy.ESpeak(), random.Random(5)

    def say(text, voice, rate=140):
        wav = espeak.speak(text, *voice, rate, config.word_gap)
        return torch.from_numpy(wav.astype(np.float32) / 32_768)

    def text():
        while not toy.held_out(t := toy.sentence(rng)):
            pass
        return t
    per = config.speakers_per_variant
    voices = [voice for _, *voice in toy.speakers_of("eval", config)[::2 * per]][:PROMPTS]
    heard = [voice for _, *voice in toy.speakers_of("pretrain", config)[::per]]
    rows = []
    for i, voice in enumerate(voices):
        prompt, target = say(text(), voice), text()
        rows.append({"text": target, "prompt": prompt} | {
            name: [say(target, by, int(rate * speed)) for rate in RATES]
            for name, by, speed in (("honest", voice, 1), ("fast", voice, 1.5),
                                    ("other", voices[i - 1], 1), ("heard", heard[7 * i], 1))})
    return rows


def noise(wav, seed):
    return LOUDNESS * torch.randn(len(wav), generator=torch.Generator().manual_seed(seed))


def resampled(wav, factor):
    """Played `factor` times as fast, which lifts the voice too."""
    return torch.from_numpy(soxr.resample(wav.numpy(), 16_000 * factor, 16_000))


# name -> (an honest reading, its row, its number) -> what the cheat would hand in
CHEATS = {
    "the prompt replayed": lambda wav, row, k: row["prompt"] + 0.01 * noise(row["prompt"], k),
    "the prompt, then the text": lambda wav, row, k: torch.cat((row["prompt"], wav)),
    "the text doubled": lambda wav, row, k: torch.cat((wav, wav)),
    "half as fast again": lambda wav, row, k: row["fast"][k],
    "played half as fast again": lambda wav, row, k: resampled(wav, 1.5),
    "noise": lambda wav, row, k: noise(wav, k),
    "speech under noise": lambda wav, row, k: wav + noise(wav, k),
    "loud until it clips": lambda wav, row, k: (20 * wav).clamp(-1, 1),
    "another speaker": lambda wav, row, k: row["other"][k],
    "a voice of pre-training": lambda wav, row, k: row["heard"][k],
    "a higher voice": lambda wav, row, k: resampled(wav, 1.2),
    "half of it": lambda wav, row, k: wav[:len(wav) // 2],
    "all but the last third": lambda wav, row, k: wav[:len(wav) * 2 // 3],
    "backwards": lambda wav, row, k: wav.flip(0),
    "silence": lambda wav, row, k: torch.zeros(len(wav)),
    "nothing": lambda wav, row, k: wav[:0],
}
CONFIGS = {"the paper's": RewardConfig(), "clipped": RewardConfig(clip_wer=True),
           "characters": RewardConfig(error_unit="char")}
CLEAR = 0.2                     # of 1 - WER or SIM, between means over all prompts


@pytest.fixture(scope="module")
def score(spoken, judges):
    """(config, cheat or "honest") -> stream -> (prompts, 4) rewards. The honest ones are kept."""
    kept = {}

    def of(config, name):
        if (config, name) not in kept:
            make = CHEATS.get(name, lambda wav, row, k: wav)
            wavs = [make(wav, row, k) for row in spoken for k, wav in enumerate(row["honest"])]
            streams = weighted_streams(CONFIGS[config], judges)
            texts, prompts = ([row[key] for row in spoken for _ in RATES]
                              for key in ("text", "prompt"))
            given, bad = rewards.score(streams, wavs, texts, prompts)
            assert bool(bad.all()) == bool(bad.any()) == (name in ("silence", "nothing"))
            kept[config, name] = {k: v.view(PROMPTS, len(RATES)) for k, v in given.items()}
        return kept[config, name]
    return of


@pytest.mark.parametrize("config", CONFIGS)
def test_honest_speech_is_understood_and_recognised(config, score):
    honest = score(config, "honest")
    assert honest["wer"].mean() > 0.95 and honest["sim"].mean() > 0.6


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_clearly_below_honest_speech_on_a_stream(cheat, config, score):
    honest, cheating = score(config, "honest"), score(config, cheat)
    below = {name: (honest[name] - cheating[name]).mean().item() for name in honest}
    assert max(below.values()) > CLEAR, below


def margin(honest, cheating, lambdas):
    """Eq. (9) on groups of four honest rollouts and four cheats: how far the mean weight of the
    honest is above that of the cheats, in the mean over groups. 4 is the most with two streams."""
    group = {name: torch.cat((honest[name], cheating[name]), dim=1) for name in honest}
    w = weights(group, lambdas)                                     # (prompts, 8)
    return (w[:, :4].mean(dim=1) - w[:, 4:].mean(dim=1)).mean().item()


TIES = ("the prompt replayed", "the prompt, then the text")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("cheat", [pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=(
    "a tie: it gains 0.10 SIM and loses 0.96 to 1.83 of 1 - WER, but each stream is standardised "
    "by itself, and two clusters lie at +1 and -1 whatever their distance"))) if name in TIES else name
    for name in CHEATS])
def test_a_group_s_weights_favour_honest_speech_over_a_cheat(cheat, config, score):
    assert margin(score(config, "honest"), score(config, cheat), CONFIGS[config].weights) > 1


@pytest.mark.parametrize("cheat", TIES)
def test_replaying_the_prompt_wins_nothing_and_loses_once_wer_weighs_more(cheat, score):
    honest, cheating = score("the paper's", "honest"), score("the paper's", cheat)
    assert (cheating["sim"] > honest["sim"]).all()
    assert 0 <= margin(honest, cheating, {"wer": 1.0, "sim": 1.0}) < 0.1
    assert margin(honest, cheating, {"wer": 1.5, "sim": 1.0}) > 0.9


def test_rollouts_with_nothing_to_judge_score_0_on_every_stream_and_are_flagged(spoken, judges):
    row, g = spoken[0], torch.Generator().manual_seed(0)
    broken = row["honest"][0].clone()
    broken[99] = float("nan")
    wavs = [row["honest"][0], torch.zeros(0), torch.zeros(16_000), row["honest"][0][:700], broken,
            broken.nan_to_num(nan=float("inf")), 1e-5 * torch.randn(16_000, generator=g)]
    streams = weighted_streams(RewardConfig(), judges)
    given, bad = rewards.score(streams, wavs, [row["text"]] * 7, [row["prompt"]] * 7)
    assert bad.tolist() == [False] + [True] * 6
    for stream in given.values():
        assert stream[0] > 0.5 and (stream[1:] == 0).all()
