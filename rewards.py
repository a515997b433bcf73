"""Rewards of a group of rollouts: intelligibility (1 - WER) and speaker similarity.

Paper: GROW, Algorithm 1 line 4 and section "On-Policy Rollouts and Multi-Objective Rewards":

    R_wer(k) = 1 - WER(ASR(x_k), y)        y is the target text, never the prompt's text
    R_sim(k) = cos(SPK(x_k), SPK(x_ref))   x_k is the generated part only, the prompt cut off

A reward stream is any callable (wavs, texts, prompts) -> (B,), higher is better: B waveforms (S,),
B target texts, B prompt waveforms, all 16 kHz. The streams stay apart here; grow.py standardizes
each inside its group (Eq. (9)) and adds them with their weights lambda_r. Your own reward:

    def loudness(wavs, texts, prompts):
        return torch.stack([wav.square().mean().sqrt() for wav in wavs])          # (B,)
    streams["loudness"] = loudness     # and a weight `loudness: 0.5` in RewardConfig.weights

A judge behind a stream is any object with asr.transcribe(list of (S,)) -> list of str, or with
speaker.embed(list of (S,)) -> (B, E) of unit norm: those of judges.py, or the toy world's. Judge
some recordings from the command line, with whichever judges you have:

    python rewards.py a.wav b.wav --text "what they say" --asr WHISPER_FOLDER
        [--speaker wavlm_large_finetune.pth --prompt voice.wav] [--utmos FILE] [--lang zh]

Departures from the paper:
 1. A bad rollout (empty, too short, silent, non-finite) never reaches a judge: it scores 0 on
    every stream and is flagged, so that the caller can count it. The paper mentions none.
 2. clip_wer (off by default) cuts R_wer at 0. The paper calls its rewards bounded, yet inserted
    words push 1 - WER below 0, and it states no clip.
 3. error_unit "char" (off by default) rewards 1 - CER, a finer signal for small recognisers.
"""
import argparse
import contextlib
import random
import re
import string
from dataclasses import dataclass, field
from pathlib import Path

import jiwer
import numpy as np
import torch

from audio import read_wav
from checks import run_main
from judges import (LANGS, MAX_NEW_TOKENS, MIN_SAMPLES, UTMOS, Paraformer, RoutedASR,
                    SpeakerVerifier, Whisper, check_lang, funasr_model, to_simplified)

# Deleted, not replaced by a blank ("well-known" -> "wellknown"), as both public WER scripts do:
# ASCII plus the 82 CJK marks of zhon.hanzi.punctuation. Full-width digits and letters stay.
CJK_PUNCTUATION = (
    "\uff02\uff03\uff04\uff05\uff06\uff07\uff08\uff09\uff0a\uff0b\uff0c\uff0d\uff0f\uff1a\uff1b"
    "\uff1c\uff1d\uff1e\uff20\uff3b\uff3c\uff3d\uff3e\uff3f\uff40\uff5b\uff5c\uff5d\uff5e\uff5f"
    "\uff60\uff62\uff63\uff64\u3000\u3001\u3003\u3008\u3009\u300a\u300b\u300c\u300d\u300e\u300f"
    "\u3010\u3011\u3014\u3015\u3016\u3017\u3018\u3019\u301a\u301b\u301c\u301d\u301e\u301f\u3030"
    "\u303e\u303f\u2013\u2014\u2018\u2019\u201b\u201c\u201d\u201e\u201f\u2026\u2027\ufe4f\ufe51"
    "\ufe54\u00b7\uff0e\uff01\uff1f\uff61\u3002")
PUNCTUATION = string.punctuation + CJK_PUNCTUATION
CJK_IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(?<!\.pth)(?<!\.pt)")  # org/name
NO_TOY_ASR = ("the toy recogniser serves the toy world's English only; name the folder or hub id "
              "of a Whisper")
NO_TOY_SPEAKER = "speaker='toy' serves the toy world only; name wavlm_large_finetune.pth"
SILENCE_PEAK = 1e-4     # -80 dBFS; Whisper answers silence with made-up words, never with ""


@dataclass(frozen=True)
class RewardConfig:
    weights: dict = field(default_factory=lambda: {"wer": 1.0, "sim": 1.0})  # paper's lambda_r
    asr: str = "toy"            # "toy", or the folder or hub id of a Whisper checkpoint
    zh_asr: str = "paraformer"  # for zh only: "paraformer" (the paper's), "whisper" (that of asr),
    #                             or a folder or hub id: funasr's if "paraformer" is in the name
    speaker: str = "toy"        # "toy", or the path of wavlm_large_finetune.pth
    utmos: str = ""             # path of utmos22_strong_step7459_v1.pt; evaluation only
    lang: str = "en"            # "en" counts words, "zh" characters; "auto": each text as it looks
    max_new_tokens: int = 128   # cap of the reward's Whisper: a looping rollout stays cheap
    clip_wer: bool = False      # True: R_wer = max(0, 1 - WER); the paper does not clip
    error_unit: str = "word"    # "word" is the paper's WER; "char" a finer reward, never a result

    def __post_init__(self):
        check_lang(self.lang, (*LANGS, "auto"))
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}; use 1 to {MAX_NEW_TOKENS}")
        if self.error_unit not in ("word", "char"):
            raise ValueError(f"error_unit={self.error_unit!r} is unknown; use 'word' or 'char'")
        if not any(self.weights.values()):
            raise ValueError(f"rewards.weights={self.weights} leave nothing to reward; give one "
                             "stream a weight at least")


# ---- text ------------------------------------------------------------------------------------

def lang_of(text):
    """"zh" if the text holds a Chinese character, else "en"."""
    return "zh" if CJK_IDEOGRAPH.search(text) else "en"


def normalize(text, lang="en", keep_apostrophe=False):
    """Text as WER sees it: punctuation deleted; en lower-cased, zh split into characters.

    keep_apostrophe: True is Seed-TTS's own script, False is F5-TTS's (also for LibriSpeech-PC).
        Only the ASCII apostrophe is ever kept.
    Numbers and spelling stay as written: "50" is not "fifty".
    Returns words (en) or characters (zh, not lower-cased) joined by single blanks. Idempotent.
    Raises ValueError for an unknown lang.
    """
    check_lang(lang)
    delete = PUNCTUATION.replace("'", "") if keep_apostrophe else PUNCTUATION
    text = text.translate(str.maketrans("", "", delete))
    text = " ".join(text) if lang == "zh" else text.lower()
    return " ".join(text.split())


def normalize_ref(ref, lang, keep_apostrophe=False):
    """A reference as it is compared. Raises ValueError if nothing is left to count."""
    ref_norm = normalize(ref, lang, keep_apostrophe)
    if not ref_norm:  # jiwer 4 would return the number of inserted words instead
        raise ValueError(f"reference text {ref!r} is empty once punctuation is deleted; remove it")
    return ref_norm


def normalize_pair(ref, hyp, lang, keep_apostrophe=False):
    """Both texts as they are compared. Raises ValueError for a reference with nothing to count."""
    if lang == "zh":  # the hypothesis only, as in both public scripts
        with contextlib.suppress(ImportError):  # Whisper refuses zh without zhconv; others may not
            hyp = to_simplified(hyp)            # need it (Paraformer writes simplified)
    return normalize_ref(ref, lang, keep_apostrophe), normalize(hyp, lang, keep_apostrophe)


def word_errors(ref, hyp, lang="en", keep_apostrophe=False):
    """(substitutions + deletions + insertions, reference words); in zh a word is a character."""
    out = jiwer.process_words(*normalize_pair(ref, hyp, lang, keep_apostrophe))
    errors = out.substitutions + out.deletions + out.insertions
    return errors, out.hits + out.substitutions + out.deletions


def wer(ref, hyp, lang="en", keep_apostrophe=False):
    """Word error rate of one utterance, in [0, inf): inserted words can push it above 1.

    An empty hyp gives 1. A set's score is the plain mean of this over utterances, as Seed-TTS and
    F5-TTS do, not sum of errors / sum of words. Raises ValueError for an empty reference.
    """
    errors, ref_words = word_errors(ref, hyp, lang, keep_apostrophe)
    return errors / ref_words


def cer(ref, hyp, lang="en"):
    """Character error rate, in [0, inf); a blank between en words counts as a character.
    In zh it equals wer. Raises ValueError for an empty reference.
    """
    ref, hyp = normalize_pair(ref, hyp, lang)
    if lang == "zh":
        ref, hyp = ref.replace(" ", ""), hyp.replace(" ", "")
    return float(jiwer.process_characters(ref, hyp).cer)


# ---- audio and judges ------------------------------------------------------------------------

def is_bad(wav):
    """True if there is nothing to judge in wav (S,): empty, too short, non-finite or silent."""
    return (wav.numel() < MIN_SAMPLES or not bool(torch.isfinite(wav).all())
            or bool(wav.abs().max() < SILENCE_PEAK))


def check_judges(config, toy=True):
    """Raises FileNotFoundError or ImportError if a judge that the config names is not there, and
    ValueError for "toy" without toy, the toy world. Cheap: for the start of a run, hours before its
    first reward."""
    names, files = {}, {"speaker": config.speaker, "utmos": config.utmos}
    if config.lang != "zh" or config.zh_asr == "whisper":
        names["asr"] = config.asr
    if config.lang != "en" and config.zh_asr not in ("paraformer", "whisper"):
        names["zh_asr"] = config.zh_asr
    if names.get("asr") == "toy" and not (toy and config.lang == "en"):
        raise ValueError(f"asr='toy' with lang={config.lang!r}: {NO_TOY_ASR}")
    if config.speaker == "toy" and not toy:
        raise ValueError(NO_TOY_SPEAKER)
    for field_name, name in names.items():
        if not (name == "toy" or Path(name).exists() or HUB_ID.fullmatch(name)):
            raise FileNotFoundError(f"{field_name}={name!r} is no folder here and no hub id "
                                    "(org/name)")
    for field_name, name in files.items():
        if name not in ("", "toy") and not Path(name).is_file():
            raise FileNotFoundError(f"{field_name}={name!r} is no file here")
    if config.lang != "en":
        if "paraformer" in config.zh_asr.lower():
            funasr_model()
        else:
            to_simplified("")


def load_asr(config, device="cpu", toy=None, cap=True):
    """The recogniser that the config names; for lang "auto" its transcribe takes (wavs, langs).
    toy: what "toy" stands for, English only. cap: False (public test sets) lifts max_new_tokens.
    Raises as check_judges does, and as the judges do.
    """
    check_judges(config)
    if config.asr == "toy" and (config.lang != "zh" or config.zh_asr == "whisper"):
        if config.lang == "en" and toy is not None:
            return toy
        raise ValueError(f"asr='toy' with lang={config.lang!r}: {NO_TOY_ASR}")
    limit = config.max_new_tokens if cap else None
    with rng_untouched():   # funasr seeds every generator when it loads
        if config.lang == "en" or config.zh_asr == "whisper":
            return Whisper(config.asr, device, config.lang, limit)
        if config.zh_asr == "paraformer":
            zh = Paraformer(device=device)
        elif "paraformer" in config.zh_asr.lower():
            zh = Paraformer(config.zh_asr, device)
        else:
            zh = Whisper(config.zh_asr, device, "zh", limit)
        if config.lang == "zh":
            return zh
        return RoutedASR({"en": Whisper(config.asr, device, "en", limit), "zh": zh})


def load_speaker(config, device="cpu", toy=None):
    """The speaker encoder that the config names; toy: what "toy" stands for."""
    check_judges(config)
    if config.speaker != "toy":
        return SpeakerVerifier.load(config.speaker, device)
    if toy is None:
        raise ValueError(NO_TOY_SPEAKER)
    return toy


# ---- reward streams --------------------------------------------------------------------------

class WERReward:
    """Algorithm 1, line 4: R_wer = 1 - WER(ASR(x_k), y), in (-inf, 1]."""

    def __init__(self, asr, config):
        self.asr, self.config = asr, config

    def __call__(self, wavs, texts, prompts):
        error_rate = cer if self.config.error_unit == "char" else wer
        auto = self.config.lang == "auto"
        langs = [lang_of(text) if auto else self.config.lang for text in texts]
        for text, lang in zip(texts, langs, strict=True):
            normalize_ref(text, lang)   # refuse an empty text before the slow part
        hyps = self.asr.transcribe(wavs, langs) if auto else self.asr.transcribe(wavs)
        rates = [error_rate(*item) for item in zip(texts, hyps, langs, strict=True)]
        reward = 1 - torch.tensor(rates, dtype=torch.float32)                     # (B,)
        return reward.clamp(min=0) if self.config.clip_wer else reward


class SIMReward:
    """Algorithm 1, line 4: R_sim = cos(SPK(x_k), SPK(x_ref)), in [-1, 1]."""

    def __init__(self, speaker):
        self.speaker = speaker

    def __call__(self, wavs, texts, prompts):
        # A group shares one prompt tensor: embed it once. Never cached between calls, where a new
        # tensor may get an old one's id.
        distinct = {id(prompt): prompt for prompt in prompts}
        row = {key: i for i, key in enumerate(distinct)}
        prompt_emb = self.speaker.embed(list(distinct.values()))                  # (distinct, E)
        prompt_emb = prompt_emb[[row[id(prompt)] for prompt in prompts]]          # (B, E)
        return (self.speaker.embed(wavs) * prompt_emb).sum(dim=-1).float()        # (B,)


@contextlib.contextmanager
def rng_untouched():
    """Puts every random generator back: a judge that draws must not change the rollouts' noise."""
    saved = torch.get_rng_state(), np.random.get_state(), random.getstate()
    saved_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        torch.set_rng_state(saved[0])
        np.random.set_state(saved[1])
        random.setstate(saved[2])
        torch.cuda.set_rng_state_all(saved_cuda)


@torch.no_grad()
def score(streams, wavs, texts, prompts):
    """All reward streams of B rollouts (several prompts' groups may share one call).

    streams: name -> callable (wavs, texts, prompts) -> (B,).
    wavs, prompts: lists of (S,) float tensors at 16 kHz; texts: list of target texts.
    Returns (rewards, bad): name -> (B,) finite float32 on the CPU, and (B,) bool. A bad rollout
        (is_bad) has 0 in every stream and no judge sees it.
    Raises ValueError for lists of unequal length or a waveform that is not (S,), RuntimeError when
        a stream returns a wrong shape or a non-finite number: never a silent 0.
    """
    if not len(wavs) == len(texts) == len(prompts):
        raise ValueError(f"{len(wavs)} wavs, {len(texts)} texts and {len(prompts)} prompts; "
                         "wanted one of each per rollout")
    for wav in (*wavs, *prompts):
        if wav.dim() != 1:
            raise ValueError(f"a waveform has shape {tuple(wav.shape)}; wanted mono (S,)")
    bad = torch.tensor([is_bad(wav) for wav in wavs], dtype=torch.bool)           # (B,)
    rewards = {name: torch.zeros(len(wavs)) for name in streams}
    good = [k for k in range(len(wavs)) if not bad[k]]
    if not good:
        return rewards, bad
    picked = [[items[k] for k in good] for items in (wavs, texts, prompts)]
    with rng_untouched():
        for name, stream in streams.items():
            values = stream(*picked).float().cpu()                                # (good,)
            if values.shape != (len(good),) or not torch.isfinite(values).all():
                raise RuntimeError(f"reward stream {name!r} returned {values.tolist()}; wanted "
                                   f"{len(good)} finite numbers")
            rewards[name][good] = values
    return rewards, bad


# ---- command line ----------------------------------------------------------------------------

def main(words=None):
    parser = argparse.ArgumentParser(description="Judge recordings: transcript, WER, SIM, UTMOS.")
    parser.add_argument("wavs", nargs="+", help="audio files")
    parser.add_argument("--text", help="what all of them should say, for WER")
    parser.add_argument("--lang", choices=LANGS, default="en")
    parser.add_argument("--asr", help="folder or hub id of a Whisper; for zh also 'paraformer'")
    parser.add_argument("--speaker", help="path of wavlm_large_finetune.pth")
    parser.add_argument("--utmos", help="path of utmos22_strong_step7459_v1.pt")
    parser.add_argument("--prompt", help="the voice for SIM; default: the other of two files")
    args = parser.parse_args(words)
    if not (args.asr or args.speaker or args.utmos):
        raise ValueError("no judge given; add --asr, --speaker or --utmos")
    if args.text is not None:
        normalize_ref(args.text, args.lang)
        if not args.asr:
            raise ValueError("--text is for WER, which needs --asr")
    if args.speaker and not args.prompt and len(args.wavs) != 2:
        raise ValueError("--speaker compares with --prompt, or two files with each other")
    config = RewardConfig(asr=args.asr or "toy", zh_asr=args.asr or "whisper",
                          lang=args.lang if args.asr else "en",
                          speaker=args.speaker or "toy", utmos=args.utmos or "")
    wavs = {path: read_wav(path) for path in (*args.wavs, *filter(None, [args.prompt]))}
    for path, wav in wavs.items():
        if is_bad(wav):
            raise ValueError(f"{path} is silent or shorter than 45 ms: nothing to judge")
    check_judges(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    audio = [wavs[path] for path in args.wavs]
    asr, speaker, utmos = (
        args.asr and load_asr(config, device, cap=False),
        args.speaker and load_speaker(config, device),
        args.utmos and UTMOS.load(args.utmos, device))
    heard = asr.transcribe(audio) if asr else []
    if getattr(asr, "truncated", 0):
        print(f"note: {asr.truncated} of the files are longer than 30 s; Whisper heard their first "
              "30 s only")
    scores = utmos.score(audio).tolist() if utmos else []
    others = [args.prompt] * len(audio) if args.prompt else args.wavs[::-1]
    sims = SIMReward(speaker)(audio, None, [wavs[path] for path in others]) if speaker else []
    for i, path in enumerate(args.wavs):
        print(path)
        if asr:
            print(f"    transcript  {heard[i]}")
        if args.text is not None:
            errors, n = word_errors(args.text, heard[i], args.lang)
            unit = "words" if args.lang == "en" else "characters"
            print(f"    WER         {100 * errors / n:.2f} %  ({errors} errors in {n} {unit})")
        if speaker:
            print(f"    SIM         {sims[i]:.3f}  to {others[i]}")
        if utmos:
            print(f"    UTMOS       {scores[i]:.2f}")


if __name__ == "__main__":
    run_main(main)
