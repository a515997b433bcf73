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
speaker.embed(list of (S,)) -> (B, E) of unit norm.

Departures from the paper:
 1. A bad rollout (empty, too short, silent, non-finite) never reaches a judge: it scores 0 on
    every stream and is flagged, so that the caller can count it. The paper mentions none.
 2. clip_wer (off by default) cuts R_wer at 0. The paper calls its rewards bounded, yet inserted
    words push 1 - WER below 0, and it states no clip.
 3. error_unit "char" (off by default) rewards 1 - CER, a finer signal for small recognisers.
"""
import contextlib
import random
import string
from dataclasses import dataclass, field

import jiwer
import numpy as np
import torch

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
LANGS = ("en", "zh")

SAMPLE_RATE = 16_000
MIN_SAMPLES = 720       # 45 ms; shorter clips break the speaker network's frame pooling
SILENCE_PEAK = 1e-4     # -80 dBFS; Whisper answers silence with made-up words, never with ""
WHISPER_MAX_SAMPLES = 30 * SAMPLE_RATE  # the encoder's fixed window
WHISPER_BATCH = 16      # clips per generate call; each costs the encoder a full 30 s window


@dataclass(frozen=True)
class RewardConfig:
    weights: dict = field(default_factory=lambda: {"wer": 1.0, "sim": 1.0})  # paper's lambda_r
    asr: str = "toy"            # "toy", or the folder or hub id of a Whisper checkpoint
    speaker: str = "toy"        # only "toy" so far
    lang: str = "en"            # "en" counts words, "zh" counts characters
    max_new_tokens: int = 128   # Whisper's cap, for rewards only: a looping rollout stays cheap
    clip_wer: bool = False      # True: R_wer = max(0, 1 - WER); the paper does not clip
    error_unit: str = "word"    # "word" is the paper's WER; "char" a finer reward, never a result

    def __post_init__(self):
        check_lang(self.lang)
        if self.error_unit not in ("word", "char"):
            raise ValueError(f"error_unit={self.error_unit!r} is unknown; use 'word' or 'char'")


# ---- text ------------------------------------------------------------------------------------

def check_lang(lang):
    if lang not in LANGS:
        raise ValueError(f"lang={lang!r} is unknown; use one of {', '.join(LANGS)}")


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


def to_simplified(text):
    """Traditional to simplified Chinese characters; Whisper may write either."""
    try:
        import zhconv
    except ImportError as error:
        raise ImportError("Chinese transcripts need zhconv; run: pip install zhconv") from error
    return zhconv.convert(text, "zh-cn")


def normalize_pair(ref, hyp, lang, keep_apostrophe=False):
    """Both texts as they are compared. Raises ValueError for a reference with nothing to count."""
    if lang == "zh":  # the hypothesis only, as in both public scripts
        with contextlib.suppress(ImportError):  # Whisper refuses zh without zhconv; others may not
            hyp = to_simplified(hyp)            # need it (Paraformer writes simplified)
    ref_norm = normalize(ref, lang, keep_apostrophe)
    if not ref_norm:  # jiwer 4 would return the number of inserted words instead
        raise ValueError(f"reference text {ref!r} is empty once punctuation is deleted; remove it")
    return ref_norm, normalize(hyp, lang, keep_apostrophe)


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


# ---- judges ----------------------------------------------------------------------------------

def is_bad(wav):
    """True if there is nothing to judge in wav (S,): empty, too short, non-finite or silent."""
    return (wav.numel() < MIN_SAMPLES or not bool(torch.isfinite(wav).all())
            or bool(wav.abs().max() < SILENCE_PEAK))


class Whisper:
    """Greedy Whisper through transformers, batched. Same transcript for any batching in float32.

    name_or_path: a folder with a checkpoint in the transformers layout, or a hub id.
    max_new_tokens: None (evaluation) leaves the checkpoint's limit.
    truncated: how many clips so far were longer than 30 s and lost their end.
    Raises OSError if the checkpoint is absent, ImportError for zh without zhconv.
    """

    def __init__(self, name_or_path, device="cpu", lang="en", max_new_tokens=None):
        check_lang(lang)
        if lang == "zh":
            to_simplified("")  # fails now if zhconv is absent, not after the model has loaded
        from transformers import WhisperForConditionalGeneration, WhisperProcessor  # slow import
        # transformers 5 keeps the checkpoint's dtype, often float16, which is slow on a CPU.
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
        try:
            model = WhisperForConditionalGeneration.from_pretrained(name_or_path, dtype=dtype)
            self.processor = WhisperProcessor.from_pretrained(name_or_path)
        except OSError as error:
            raise OSError(
                f"could not load Whisper from {str(name_or_path)!r}: give a folder with "
                "config.json and weights, or, with network, a hub id") from error
        self.model = model.to(device).eval().requires_grad_(False)
        self.truncated = 0
        self.generate_args = {"num_beams": 1, "do_sample": False}
        if max_new_tokens is not None:
            self.generate_args["max_new_tokens"] = max_new_tokens
        # Without them a multilingual model guesses the language of each clip; *.en refuses them.
        if self.model.generation_config.is_multilingual:
            self.generate_args.update(language=lang, task="transcribe")
        elif lang != "en":
            raise ValueError(f"{name_or_path} knows English only, but lang={lang!r}; use a "
                             "multilingual checkpoint")

    @torch.no_grad()
    def transcribe(self, wavs):
        """wavs: list of (S,) float tensors at 16 kHz. Returns as many texts, in order."""
        for wav in wavs:
            if wav.dim() != 1:  # the processor would take (2, S) for two clips
                raise ValueError(f"a waveform has shape {tuple(wav.shape)}; wanted mono (S,)")
        self.truncated += sum(wav.numel() > WHISPER_MAX_SAMPLES for wav in wavs)
        clips = [wav[:WHISPER_MAX_SAMPLES].float().cpu().numpy() for wav in wavs]
        texts = []
        for i in range(0, len(clips), WHISPER_BATCH):
            inputs = self.processor(clips[i:i + WHISPER_BATCH], sampling_rate=SAMPLE_RATE,
                                    return_tensors="pt", return_attention_mask=True)
            features = inputs.input_features.to(self.model.device, self.model.dtype)
            ids = self.model.generate(                     # features (B, mels, 3000 frames)
                features, attention_mask=inputs.attention_mask.to(self.model.device),
                **self.generate_args)                      # (B, tokens)
            texts += self.processor.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]


# ---- reward streams --------------------------------------------------------------------------

class WERReward:
    """Algorithm 1, line 4: R_wer = 1 - WER(ASR(x_k), y), in (-inf, 1]."""

    def __init__(self, asr, config):
        self.asr, self.config = asr, config

    def __call__(self, wavs, texts, prompts):
        error_rate = cer if self.config.error_unit == "char" else wer
        hyps = self.asr.transcribe(wavs)
        rates = [error_rate(ref, hyp, self.config.lang)
                 for ref, hyp in zip(texts, hyps, strict=True)]
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
