"""What rewards.py promises: text normalisation and WER, bad rollouts, judges and streams."""
import random
import subprocess
import sys
import types
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soundfile
import torch

import rewards
from audio import read_wav
from rewards import (RewardConfig, SIMReward, WERReward, cer, check_judges, is_bad, lang_of,
                     load_asr, load_speaker, normalize, score, wer, word_errors)


@pytest.fixture
def no_zhconv(monkeypatch):
    monkeypatch.setitem(sys.modules, "zhconv", None)  # import zhconv now fails


@pytest.fixture
def fake_zhconv(monkeypatch):
    def convert(text, locale):
        assert locale == "zh-cn"
        return text.translate(str.maketrans("這個測試", "这个测试"))
    monkeypatch.setitem(sys.modules, "zhconv", types.SimpleNamespace(convert=convert))


# ---- stub judges -------------------------------------------------------------------------------

class StubASR:
    """Hears the words that the wav's first sample indexes."""
    def __init__(self, words):
        self.words, self.seen = words, []

    def transcribe(self, wavs):
        assert not any(is_bad(wav) for wav in wavs), "a bad rollout reached the ASR"
        self.seen += wavs
        return [self.words[int(wav[0])] for wav in wavs]


class StubSpeaker:
    """A unit vector at the angle (radians) that the wav's first sample gives."""
    def __init__(self):
        self.calls = []

    def embed(self, wavs):
        assert not any(is_bad(wav) for wav in wavs), "a bad rollout reached the speaker model"
        self.calls.append(len(wavs))
        angle = torch.stack([wav[0] for wav in wavs])
        return torch.stack([angle.cos(), angle.sin()], dim=1)


def clip(first, samples=800):
    wav = torch.full((samples,), 0.1)
    wav[0] = first
    return wav


def bad_clips():
    nan, inf = clip(0.0), clip(0.0)
    nan[5], inf[5] = float("nan"), float("-inf")
    return {"empty": torch.zeros(0), "short": torch.ones(719), "nan": nan, "inf": inf,
            "zeros": torch.zeros(800), "too quiet": torch.full((800,), 9e-5)}


# ---- normalisation and WER ---------------------------------------------------------------------

@pytest.mark.parametrize("ref, hyp, lang, expected", [
    ("The primary coil has fifty turns.", "The primary coil has 50 turns.", "en", 1 / 6),
    ("A Type One error was made.", "a type 1 error was made", "en", 1 / 6),
    ("hello there", "", "en", 1.0),
    ("hello there", "...", "en", 1.0),
    ("yes", "yes yes yes", "en", 2.0),
    ("A well-known man.", "A well known man.", "en", 2 / 3),
    ("A well-known man.", "a WELL-known man", "en", 0.0),
    ("He left\u2014then came back.", "He left, then came back.", "en", 0.5),
    ("He left \u2014 then came back.", "He left, then came back.", "en", 0.0),
    ("a  b   c", " a b c ", "en", 0.0),
    ("你好", "", "zh", 1.0),
    ("你好", "。", "zh", 1.0),
    ("好", "好好好", "zh", 2.0),
    ("你好，世界！", "你好世界", "zh", 0.0),
    ("你好，世界！", "你 好 世 界", "zh", 0.0),
    ("\u201c你好\u201d\u2014\u2014他说\u2026", "你好他说", "zh", 0.0),
    ("百分之五十\uff05", "百分之五十", "zh", 0.0),
    ("今天是2024年。", "今天是二零二四年", "zh", 0.5),
    ("今天是\uff12\uff10\uff12\uff14年。", "今天是二零二四年", "zh", 0.5),
    ("我用iPhone手机。", "我 用 iphone 手 机", "zh", 0.1),
    ("我用iPhone手机。", "我 用 iPhone  手 机", "zh", 0.0),
    ("他在那儿", "她在那儿", "zh", 0.25),
])
@pytest.mark.parametrize("keep_apostrophe", [True, False])
def test_wer_gives_the_published_recipes_value(ref, hyp, lang, expected, keep_apostrophe):
    value = wer(ref, hyp, lang, keep_apostrophe)
    assert isinstance(value, float) and value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ref, hyp, kept, dropped", [
    ("Tom\u2019s dog isn\u2019t here.", "Tom's dog isn't here.", 0.5, 0.0),
    ("Tom's dog.", "Toms dog.", 0.5, 0.0),
    ("Tom's dog.", "Tom's dog", 0.0, 0.0),
])
def test_only_the_ascii_apostrophe_can_be_kept(ref, hyp, kept, dropped):
    assert wer(ref, hyp, keep_apostrophe=True) == kept
    assert wer(ref, hyp, keep_apostrophe=False) == dropped
    assert wer(ref, hyp) == dropped


def test_word_errors_counts_each_kind_of_error_and_the_reference_words():
    assert word_errors("a b c d", "a x c d") == (1, 4)      # substitution
    assert word_errors("a b c d", "a c d") == (1, 4)        # deletion
    assert word_errors("a b c d", "a b b c d e") == (2, 4)  # insertions are not reference words
    assert word_errors("你好吗", "你坏", "zh") == (2, 3)


def test_a_set_score_is_the_mean_of_utterances_and_not_the_corpus_rate():
    refs, hyps = ["a b c d", "x"], ["a b c d", "y z"]
    assert np.mean([wer(r, h) for r, h in zip(refs, hyps)]) == 1.0
    errors, words = np.sum([word_errors(r, h) for r, h in zip(refs, hyps)], axis=0)
    assert errors / words == pytest.approx(0.4) == jiwer.wer(refs, hyps)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("keep", [True, False])
def test_normalize_is_idempotent_and_leaves_no_punctuation(lang, keep):
    text = f"  Don't {rewards.PUNCTUATION} STOP\u2019s \t好\u3000的！ iPhone\n"
    once = normalize(text, lang, keep)
    assert normalize(once, lang, keep) == once
    assert set(once) & set(rewards.PUNCTUATION) == ({"'"} if keep else set())
    assert "  " not in once and once == once.strip()


def test_normalize_lowers_english_and_splits_chinese():
    assert normalize("Hello,  \tWORLD!") == "hello world"
    assert normalize("Don't", keep_apostrophe=True) == "don't"
    assert normalize("我用 iPhone。", "zh") == "我 用 i P h o n e"


def test_the_punctuation_set_is_ascii_plus_82_cjk_marks():
    assert len(rewards.CJK_PUNCTUATION) == len(set(rewards.CJK_PUNCTUATION)) == 82
    assert len(set(rewards.PUNCTUATION)) == 32 + 82
    kept = "\uff11\uff21\u2010\u2032\u00b4\u00b0\u00e9\u20ac"  # marks the benchmarks leave alone
    assert not set(kept) & set(rewards.PUNCTUATION)


def test_the_cjk_marks_are_those_of_zhon():
    zhon = pytest.importorskip("zhon.hanzi", reason="zhon not installed")
    assert set(zhon.punctuation) == set(rewards.CJK_PUNCTUATION)


@pytest.mark.parametrize("ref, lang", [("...", "en"), ("", "en"), (" \u2019 ", "en"),
                                       ("\u3002", "zh")])
@pytest.mark.parametrize("rate", [wer, cer])
def test_an_empty_reference_is_an_error_that_names_the_text(ref, lang, rate):
    with pytest.raises(ValueError) as error:
        rate(ref, "hello there you", lang)
    assert repr(ref) in str(error.value)


def test_unknown_settings_are_refused():
    for call in (lambda: normalize("a", "de"), lambda: wer("a", "a", "EN"),
                 lambda: wer("a", "a", "auto"), lambda: RewardConfig(lang="fr")):
        with pytest.raises(ValueError, match="lang=.* is unknown; use one of en, zh"):
            call()
    for tokens in (0, 445):
        with pytest.raises(ValueError, match=f"max_new_tokens={tokens}; use 1 to 444"):
            RewardConfig(max_new_tokens=tokens)
    with pytest.raises(ValueError, match="error_unit='phone' is unknown"):
        RewardConfig(error_unit="phone")


def test_traditional_characters_count_as_errors_without_zhconv(no_zhconv):
    assert wer("这是一个测试", "這是一個測試", "zh") == pytest.approx(4 / 6)
    with pytest.raises(ImportError, match="pip install zhconv"):
        rewards.to_simplified("這")


def test_only_the_hypothesis_becomes_simplified(fake_zhconv):
    assert wer("这是一个测试", "這是一個測試", "zh") == 0
    assert cer("这是一个测试", "這是一個測試", "zh") == 0
    assert wer("這是一個測試", "這是一個測試", "zh") == pytest.approx(4 / 6)


def test_real_zhconv_simplifies():
    pytest.importorskip("zhconv", reason="zhconv not installed")
    assert wer("这是一个测试", "這是一個測試", "zh") == 0.0


def test_cer_agrees_with_hand_counts():
    assert cer("abcd", "abxd") == 1 / 4
    assert cer("Cat sat.", "cat sit") == pytest.approx(1 / 7)   # c a t _ s a t
    assert cer("cat sat", "catsat") == pytest.approx(1 / 7)     # the blank counts
    assert cer("ab", "") == 1.0
    assert cer("a", "abc") == 2.0
    assert cer("你好，世界", "你坏世", "zh") == 2 / 4 == wer("你好，世界", "你坏世", "zh")


# ---- bad rollouts ------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", bad_clips())
def test_each_kind_of_bad_rollout_is_bad(kind):
    assert is_bad(bad_clips()[kind]) is True


def test_a_just_long_and_just_loud_enough_rollout_is_good():
    assert is_bad(torch.full((720,), 1.1e-4)) is False
    assert is_bad(-clip(0.0)) is False


def streams_of(words):
    asr, speaker = StubASR(words), StubSpeaker()
    return {"wer": WERReward(asr, RewardConfig()), "sim": SIMReward(speaker)}, asr


def test_a_bad_rollout_scores_zero_is_flagged_and_never_reaches_a_judge():
    streams, asr = streams_of(["a b", "a x"])
    kinds = list(bad_clips().values())
    good, half = clip(0.0), clip(1.0)
    wavs = [kinds[0], good, *kinds[1:], half]
    B = len(wavs)
    prompt = clip(0.0)
    out, bad = score(streams, wavs, ["a b"] * B, [prompt] * B)
    assert bad.dtype == torch.bool and bad.tolist() == [True, False] + [True] * 5 + [False]
    assert out["wer"].tolist() == [0, 1.0] + [0] * 5 + [0.5]
    cos_1 = pytest.approx(np.cos(1.0), abs=1e-6)
    assert out["sim"].tolist() == [0, 1.0] + [0] * 5 + [cos_1]
    assert asr.seen[0] is good and asr.seen[1] is half and len(asr.seen) == 2
    for values in out.values():
        assert values.shape == (B,) and values.dtype == torch.float32
        assert torch.isfinite(values).all()


def test_a_group_of_only_bad_rollouts_gives_zeros_and_calls_nothing():
    def forbidden(wavs, texts, prompts):
        raise AssertionError("called")
    wavs = list(bad_clips().values())
    out, bad = score({"x": forbidden}, wavs, ["a"] * 6, [clip(0.0)] * 6)
    assert bad.all() and out["x"].tolist() == [0.0] * 6


# ---- streams -----------------------------------------------------------------------------------

def test_rewards_follow_a_permutation_of_the_rollouts():
    streams, _ = streams_of(["a b", "a x", "x y", "a b c d e"])
    wavs = [clip(0.0), torch.zeros(800), clip(1.0), clip(2.0), clip(3.0)]
    texts, prompts = ["a b", "a b", "x y", "x y", "a b"], [clip(0.3), clip(0.8)]
    prompts = [prompts[0], prompts[0], prompts[1], prompts[1], prompts[0]]
    order = [3, 1, 4, 0, 2]
    out, bad = score(streams, wavs, texts, prompts)
    out_p, bad_p = score(streams, *[[items[k] for k in order] for items in (wavs, texts, prompts)])
    assert out["wer"].tolist() == [1.0, 0.0, 0.0, 1.0, -0.5]
    assert len(set(out["sim"].tolist())) == 5
    assert torch.equal(bad[order], bad_p)
    for name in out:
        assert torch.equal(out[name][order], out_p[name])


def test_similarity_is_the_cosine_to_ones_own_prompt_and_embeds_each_prompt_once():
    speaker = StubSpeaker()
    first, second = clip(0.0), clip(1.0)
    wavs = [clip(0.0), clip(0.0), clip(1.0), clip(2.0)]
    prompts = [first, second, first, second]
    values = SIMReward(speaker)(wavs, ["t"] * 4, prompts)
    expected = torch.tensor([0.0, 1.0, 1.0, 1.0]).cos()
    torch.testing.assert_close(values, expected)
    assert sorted(speaker.calls) == [2, 4]


def test_wer_reward_is_one_minus_wer_and_clips_only_when_told():
    words, wavs = ["yes", "yes yes yes", "no"], [clip(0.0), clip(1.0), clip(2.0)]
    args = wavs, ["Yes!"] * 3, [clip(0.0)] * 3
    assert WERReward(StubASR(words), RewardConfig())(*args).tolist() == [1.0, -1.0, 0.0]
    clipped = WERReward(StubASR(words), RewardConfig(clip_wer=True))(*args)
    assert clipped.tolist() == [1.0, 0.0, 0.0]


def test_char_unit_rewards_one_minus_cer():
    reward = WERReward(StubASR(["cat sit"]), RewardConfig(error_unit="char"))
    values = reward([clip(0.0)], ["Cat sat."], [clip(0.0)])
    assert values.tolist() == pytest.approx([6 / 7])


def test_wer_reward_counts_in_the_configured_language():
    reward = WERReward(StubASR(["她在那儿"]), RewardConfig(lang="zh"))
    assert reward([clip(0.0)], ["他在那儿"], [clip(0.0)]).tolist() == [0.75]


def test_an_asr_that_loses_a_transcript_is_an_error():
    class LosesOne:
        def transcribe(self, wavs):
            return ["a"] * (len(wavs) - 1)
    with pytest.raises(ValueError):
        score({"wer": WERReward(LosesOne(), RewardConfig())}, [clip(0.0)] * 2, ["a"] * 2,
              [clip(0.0)] * 2)


def test_a_custom_reward_takes_three_lines():
    def loudness(wavs, texts, prompts):
        return torch.stack([wav.square().mean().sqrt() for wav in wavs])
    streams = {"loudness": loudness}
    wavs = [torch.full((800,), 0.5), torch.zeros(800)]
    out, _ = score(streams, wavs, ["a"] * 2, [clip(0.0)] * 2)
    assert out["loudness"].tolist() == [0.5, 0.0]


def rng_states():
    return torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()


@pytest.mark.parametrize("fails", [False, True])
def test_random_generators_are_untouched_even_when_a_judge_draws_or_fails(fails):
    def draws(wavs, texts, prompts):
        np.random.seed(0)
        values = torch.rand(len(wavs)) + np.random.rand() + random.random()
        return values * float("nan") if fails else values
    before = rng_states()
    try:
        score({"draws": draws}, [clip(0.0)], ["a"], [clip(0.0)])
    except RuntimeError:
        assert fails
    after = rng_states()
    assert torch.equal(before[0], after[0]) and before[2] == after[2]
    assert np.array_equal(before[1], after[1])


def test_judges_run_without_gradients():
    weight = torch.nn.Parameter(torch.tensor(2.0))
    out, _ = score({"x": lambda w, t, p: weight * torch.ones(1)}, [clip(0.0)], ["a"], [clip(0.0)])
    assert not out["x"].requires_grad and out["x"].tolist() == [2.0]


@pytest.mark.parametrize("value", [torch.tensor([1.0, float("nan")]),
                                   torch.tensor([1.0, float("inf")]), torch.ones(3),
                                   torch.ones(2, 1), torch.tensor(1.0)])
def test_a_non_finite_or_misshapen_reward_raises_and_names_its_stream(value):
    with pytest.raises(RuntimeError, match="reward stream 'odd'"):
        score({"odd": lambda *_: value}, [clip(0.0)] * 2, ["a"] * 2, [clip(0.0)] * 2)


def test_unequal_lists_and_stereo_are_refused():
    with pytest.raises(ValueError, match="2 wavs, 1 texts and 2 prompts"):
        score({}, [clip(0.0)] * 2, ["a"], [clip(0.0)] * 2)
    with pytest.raises(ValueError, match=r"shape \(2, 800\)"):
        score({}, [torch.ones(2, 800)], ["a"], [clip(0.0)])


def test_the_default_weights_are_the_papers_and_not_shared():
    assert RewardConfig().weights == {"wer": 1.0, "sim": 1.0}
    RewardConfig().weights["wer"] = 5.0
    assert RewardConfig().weights["wer"] == 1.0


# ---- languages ---------------------------------------------------------------------------------

@pytest.mark.parametrize("text, lang", [
    ("Hello, world!", "en"), ("", "en"), ("“Café” — 50 ％，。", "en"), ("你好", "zh"),
    ("OK 吗?", "zh"), ("㐀", "zh"), ("\U00020000", "zh"), ("豈", "zh"), ("カナ", "en"),
])
def test_a_text_with_a_chinese_character_is_chinese(text, lang):
    assert lang_of(text) == lang


class StubMixedASR:
    """Hears the word that the first sample indexes, and remembers the languages."""
    def __init__(self, words):
        self.words, self.langs = words, []

    def transcribe(self, wavs, langs):
        self.langs.append(list(langs))
        return [self.words[int(wav[0])] for wav in wavs]


def test_auto_counts_each_text_in_its_language_and_tells_the_recogniser(no_zhconv):
    asr = StubMixedASR(["the cat", "她在那儿"])
    wavs, texts = [clip(0.0), clip(1.0), clip(0.0)], ["The dog.", "他在那儿。", "The cat!"]
    streams = {"wer": WERReward(asr, RewardConfig(lang="auto"))}
    out, _ = score(streams, wavs, texts, [clip(0.0)] * 3)
    assert out["wer"].tolist() == [0.5, 0.75, 1.0]
    assert asr.langs == [["en", "zh", "en"]]


def test_a_forced_language_wins_over_what_the_text_looks_like():
    reward = WERReward(StubASR(["ab"]), RewardConfig(lang="zh"))
    assert reward([clip(0.0)], ["a b"], [clip(0.0)]).tolist() == [1.0]


def test_an_empty_target_text_is_refused_before_the_recogniser_works():
    class Forbidden:
        def transcribe(self, wavs):
            raise AssertionError("called")
    with pytest.raises(ValueError, match="reference text '...' is empty"):
        score({"wer": WERReward(Forbidden(), RewardConfig())}, [clip(0.0)] * 2, ["a", "..."],
              [clip(0.0)] * 2)


# ---- judges by name ----------------------------------------------------------------------------

def test_toy_judges_are_the_ones_handed_in_and_english_only():
    asr, speaker = object(), object()
    assert load_asr(RewardConfig(), "cpu", asr) is asr
    assert load_speaker(RewardConfig(), "cpu", speaker) is speaker
    for config, toy in ((RewardConfig(), None), (RewardConfig(lang="zh", zh_asr="whisper"), asr)):
        with pytest.raises((ValueError, ImportError), match="toy recogniser serves|zhconv"):
            load_asr(config, "cpu", toy)
    with pytest.raises(ValueError, match="toy world only; name wavlm_large_finetune.pth"):
        load_speaker(RewardConfig())


@pytest.mark.parametrize("settings, message", [
    ({"asr": "absent"}, "asr='absent' is no folder here and no hub id"),
    ({"asr": "./absent/whisper"}, "asr='./absent/whisper' is no folder"),
    ({"asr": "a/b/c"}, "asr='a/b/c' is no folder"),
    ({"asr": "models/whisper.pt"}, "asr='models/whisper.pt' is no folder"),
    ({"lang": "zh", "zh_asr": "paraformer-zh"}, "zh_asr='paraformer-zh' is no folder"),
    ({"speaker": "org/name"}, "speaker='org/name' is no file here"),
    ({"speaker": "wavlm_large_finetune.pth"}, "is no file here"),
    ({"utmos": "utmos.pt"}, "utmos='utmos.pt' is no file here"),
])
def test_a_missing_judge_is_an_error_that_names_its_field(settings, message, fake_zhconv):
    with pytest.raises(FileNotFoundError, match=message):
        check_judges(RewardConfig(**settings))


def test_a_judge_that_is_there_passes_and_the_other_languages_judge_is_not_asked_for(
        tmp_path, no_zhconv, fake_zhconv):
    checkpoint = tmp_path / "x.pth"
    checkpoint.write_bytes(b"")
    check_judges(RewardConfig(asr=str(tmp_path), speaker=str(checkpoint), utmos=str(checkpoint),
                              zh_asr="absent"))
    check_judges(RewardConfig(asr="openai/whisper-large-v3"))
    check_judges(RewardConfig(asr="absent", lang="zh", zh_asr="openai/whisper-large-v3"))
    check_judges(RewardConfig(asr="openai/whisper-large-v3", lang="auto", zh_asr="whisper"))


def test_chinese_without_its_packages_is_refused_at_the_start(no_zhconv, monkeypatch):
    monkeypatch.setitem(sys.modules, "funasr", None)  # import funasr now fails
    with pytest.raises(ImportError, match="pip install zhconv"):
        check_judges(RewardConfig(lang="auto", asr="a/b", zh_asr="whisper"))
    with pytest.raises(ImportError, match="(?s)pip install funasr.*zh_asr: whisper"):
        check_judges(RewardConfig(lang="zh", asr="a/b"))


class Recorded:
    """Stands for a judge class and remembers what it was made with."""
    def __init__(self, *args, **kwargs):
        self.args = args, kwargs
        torch.manual_seed(1)    # as funasr does


@pytest.mark.parametrize("settings, cap, expected", [
    ({}, True, ("W", "o/en", "en", 128)),
    ({"max_new_tokens": 9}, True, ("W", "o/en", "en", 9)),
    ({}, False, ("W", "o/en", "en", None)),
    ({"lang": "zh", "zh_asr": "whisper"}, True, ("W", "o/en", "zh", 128)),
    ({"lang": "auto", "zh_asr": "whisper"}, True, ("W", "o/en", "auto", 128)),
    ({"lang": "zh"}, True, ("P", None)),
    ({"lang": "zh", "zh_asr": "o/Paraformer-x"}, True, ("P", "o/Paraformer-x")),
    ({"lang": "zh", "zh_asr": "o/zh"}, True, ("W", "o/zh", "zh", 128)),
    ({"lang": "auto"}, True, {"en": ("W", "o/en", "en", 128), "zh": ("P", None)}),
    ({"lang": "auto", "zh_asr": "o/zh"}, False,
     {"en": ("W", "o/en", "en", None), "zh": ("W", "o/zh", "zh", None)}),
])
def test_the_config_names_the_recognisers(settings, cap, expected, monkeypatch, fake_zhconv):
    class W(Recorded):
        def __init__(self, name, device, lang, limit):
            super().__init__()
            self.name = "W", name, lang, limit

    class P(Recorded):
        def __init__(self, name=None, device="cpu"):
            super().__init__()
            self.name = "P", name
    monkeypatch.setattr(rewards, "Whisper", W)
    monkeypatch.setattr(rewards, "Paraformer", P)
    monkeypatch.setitem(sys.modules, "funasr", types.SimpleNamespace(AutoModel=None))
    before = rng_states()
    asr = load_asr(RewardConfig(asr="o/en", **settings), cap=cap)
    assert torch.equal(before[0], rng_states()[0])
    if isinstance(expected, dict):
        assert {lang: judge.name for lang, judge in asr.judges.items()} == expected
    else:
        assert asr.name == expected


# ---- audio files and the command line ----------------------------------------------------------

def write(path, data, rate=16_000):
    soundfile.write(path, np.asarray(data, dtype=np.float32), rate, subtype="FLOAT")
    return str(path)


def tone(rate, sec=0.5, hz=1000, gain=0.5):
    return gain * np.sin(2 * np.pi * hz * np.arange(int(rate * sec)) / rate)


def test_read_wav_leaves_16_khz_mono_as_it_is(tmp_path, capsys):
    wav = read_wav(write(tmp_path / "a.wav", tone(16_000)))
    assert wav.dtype == torch.float32 and wav.shape == (8000,) and capsys.readouterr().out == ""
    np.testing.assert_array_equal(wav.numpy(), tone(16_000).astype(np.float32))


def test_read_wav_averages_channels_and_resamples_with_a_note(tmp_path, capsys):
    stereo = np.stack([2 * tone(24_000), 0 * tone(24_000)], axis=1)
    wav = read_wav(write(tmp_path / "b.wav", stereo, 24_000))
    assert wav.shape == (8000,)
    middle = slice(1000, 7000)
    np.testing.assert_allclose(wav[middle].numpy(), tone(16_000)[middle], atol=5e-3)
    out = capsys.readouterr().out
    assert "b.wav has 2 channels; their mean is used" in out
    assert "b.wav is at 24000 Hz; resampled to 16000 Hz" in out


@pytest.mark.parametrize("kind, message", [
    ("absent", "no readable audio file"), ("text", "no readable audio file"),
    ("cut", "no readable audio file|is empty"), ("nan", "holds NaN or infinite samples"),
    ("empty", "is empty"),
])
def test_read_wav_names_the_file_that_it_cannot_use(tmp_path, kind, message):
    path = tmp_path / "x.wav"
    if kind == "text":
        path.write_text("hello")
    elif kind == "cut":
        write(path, tone(16_000))
        path.write_bytes(path.read_bytes()[:30])
    elif kind != "absent":
        write(path, [0.1, float("nan")] if kind == "nan" else [])
    with pytest.raises(ValueError, match=message) as error:
        read_wav(str(path))
    assert str(path) in str(error.value)


@pytest.fixture
def stub_judges(monkeypatch):
    class Scores:
        def score(self, wavs):
            return torch.tensor([3.0 + i for i in range(len(wavs))])
    monkeypatch.setattr(rewards, "load_asr", lambda *a, **k: StubASR(["hello there"]))
    monkeypatch.setattr(rewards, "load_speaker", lambda *a, **k: StubSpeaker())
    monkeypatch.setattr(rewards.UTMOS, "load", lambda *a, **k: Scores())
    monkeypatch.setattr(rewards, "check_judges", lambda config: None)


def test_the_command_line_prints_each_score_of_each_file(tmp_path, capsys, stub_judges):
    a, b = (write(tmp_path / f"{name}.wav", clip(first).numpy())
            for name, first in (("a", 0.0), ("b", 0.5)))
    rewards.main([a, b, "--text", "Hello, Tom!", "--asr", "x", "--speaker", "y", "--utmos", "z"])
    score_lines = ["    transcript  hello there", "    WER         50.00 %  (1 errors in 2 words)"]
    assert capsys.readouterr().out.splitlines() == [
        a, *score_lines, f"    SIM         0.878  to {b}", "    UTMOS       3.00",
        b, *score_lines, f"    SIM         0.878  to {a}", "    UTMOS       4.00"]
    rewards.main([b, "--prompt", b, "--speaker", "y"])      # only what was asked for
    assert capsys.readouterr().out.splitlines() == [b, f"    SIM         1.000  to {b}"]


@pytest.mark.parametrize("words, message", [
    ([], "no judge given; add --asr, --speaker or --utmos"),
    (["--asr", "x", "--text", "..."], "reference text '...' is empty"),
    (["--utmos", "x", "--text", "a"], "--text is for WER, which needs --asr"),
    (["--speaker", "x"], "--speaker compares with --prompt, or two files"),
])
def test_the_command_line_refuses_nonsense_before_it_reads_anything(words, message):
    with pytest.raises(ValueError, match=message):
        rewards.main(["absent.wav", *words])


def test_the_command_line_refuses_silence_and_absent_judges(tmp_path):
    silent, good = (write(tmp_path / f"{i}.wav", np.full(800, i * 0.1)) for i in range(2))
    with pytest.raises(ValueError, match="0.wav is silent or shorter than 45 ms"):
        rewards.main([silent, "--asr", "x"])
    with pytest.raises(FileNotFoundError, match="asr='x' is no folder here"):
        rewards.main([good, "--asr", "x"])
    with pytest.raises(FileNotFoundError, match="speaker='x.pth' is no file here"):
        rewards.main([good, "--prompt", good, "--speaker", "x.pth", "--lang", "zh"])


def test_the_script_runs_by_itself():
    script = Path(rewards.__file__)
    done = subprocess.run([sys.executable, script.name, "--help"], cwd=script.parent,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "--speaker" in done.stdout
