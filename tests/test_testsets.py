"""What testsets.py promises: wavs made once, scores from the files alone, the paper's averages."""
import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

import evaluate
import testsets
from config import Config
from conftest import set_stop, tiny_ditar
from evaluate import EvalConfig, bootstrap, read_records
from grow import Prompt
from run import Run
from sample import SampleConfig
from testsets import (ListItem, average, differences, read_librispeech_pc, read_lists, read_seedtts,
                      report, run_lists, score, summarize)
from worlds import RandomJudge

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT.parent / "shared" / "models"
WHISPER, SPEECH = MODELS / "whisper-tiny.en", MODELS / "speech"
TEXTS = ("Tom's dog ran.", "The old man walked, slowly.", "We saw it")


def tone(hertz, samples=4_800):
    return 0.3 * np.sin(2 * np.pi * hertz * np.arange(samples) / 16_000)


def seedtts_list(folder, n=3, end="\n"):
    """A meta.lst of n items with prompts and real recordings; returns its path."""
    for name in ("prompts", "wavs"):
        (folder / name).mkdir(parents=True)
    lines = []
    for i in range(n):
        soundfile.write(folder / "prompts" / f"p{i}.wav", tone(200 + 50 * i, 4_800 + 100 * i),
                        16_000)
        soundfile.write(folder / "wavs" / f"u{i}.wav", tone(210 + 50 * i), 16_000)
        lines.append(f"u{i}|a prompt {i}|prompts/p{i}.wav|{TEXTS[i % 3]}{end}")
    path = folder / "meta.lst"
    path.write_bytes("".join(lines).encode())
    return path


def librispeech_list(folder):
    """F5-TTS's layout as it is published, CRLF: the list's path and the audio root."""
    root = folder / "test-clean"
    lines = []
    for i in range(3):
        for kind, hertz in (("1", 300), ("2", 310)):
            chapter = root / "7" / kind
            chapter.mkdir(parents=True, exist_ok=True)
            soundfile.write(chapter / f"7-{kind}-{i}.flac", tone(hertz + 40 * i), 16_000)
        lines.append("\t".join((f"7-1-{i}", "0.3", "A prompt.", f"7-2-{i}", "0.3", TEXTS[i])))
    path = folder / "pc.lst"
    path.write_bytes("".join(line + "\r\n" for line in lines).encode())
    return path, root


class TinyWorld:
    """tiny_ditar's 13 ids, D=4, P=2; a latent frame is 800 samples long."""
    half = False

    def __init__(self):
        self.spoken = []
        self.judges = {"asr": RandomJudge(), "speaker": RandomJudge()}
        self.vae = SimpleNamespace(
            latent_mean=torch.zeros(4),
            decode=lambda z, lengths: 0.1 * z.repeat_interleave(200, dim=2).flatten(1))

    def clean(self, text):
        if "{" in text:
            raise ValueError(f"cannot speak {text!r}")
        return text

    def make_prompt(self, wav, prompt_text, text):
        self.spoken.append(text)
        ids = [1 + ord(c) % 12 for c in f"{prompt_text} {text}"]
        latents = wav[:3_200].view(2, 2, 800)[:, :, ::200].float()              # (N, P, D)
        return Prompt(ids, len(text), text, wav, latents)


def tiny_run(folder, stages=("pretrain", "grow"), **changes):
    """A Run with the models of two systems, and lists; `changes` go to its EvalConfig."""
    c = Config(out_dir=str(folder), world="real", device="cpu", autocast="off",
               model=tiny_ditar().config,
               sample=SampleConfig(max_patches_per_token=0.2, max_patches_extra=3),
               evaluate=EvalConfig(**{"nfe": 2, "batch": 2, **changes}))
    run = Run(c, "a test")
    for seed, stage in enumerate(("pretrain", "grow")):
        if stage in stages and not (run.dir / f"{stage}.safetensors").exists():
            model = tiny_ditar(seed)
            g = torch.Generator().manual_seed(seed)
            set_stop(model, 3 * torch.randn(24, generator=g), 0.0)
            run.finish(stage, model.state_dict(), {}, half=False)
    return run


def wavs_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.wav"))}


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    pc, root = librispeech_list(folder / "ls")
    return {"lists": {"seedtts-en": str(seedtts_list(folder / "en")), "librispeech-pc": str(pc)},
            "librispeech_root": str(root)}


@pytest.fixture(scope="module")
def whole(lists, tmp_path_factory):
    """A run that has evaluated both systems on both lists. Not to be written to."""
    run = tiny_run(tmp_path_factory.mktemp("run") / "out", **lists)
    run_lists(run, TinyWorld())
    return run


@pytest.fixture
def copy(whole, lists, tmp_path):
    """Such a run of one's own; keyword arguments change its EvalConfig."""
    shutil.copytree(whole.dir, tmp_path / "out")
    return lambda **changes: tiny_run(tmp_path / "out", **{**lists, **changes})


# ---- lists -------------------------------------------------------------------------------------

def write_list(path, *lines, end="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


@pytest.mark.parametrize("end", ("\n", "\r\n"))
def test_seedtts_lists_of_5_4_3_and_2_fields(tmp_path, capsys, end):
    path = write_list(tmp_path / "en/meta.lst",
                      "\ufeffu5|It's me.|prompt-wavs/p.wav|Hello.|gt/u5.wav",      # with a BOM
                      "u4|Me.|prompt-wavs/p.wav|Hello.", "g4|Me.|prompt-wavs/p.wav|Hello.",
                      "u3.wav|Hello.|prompt-wavs/p.wav", "u2|Hello.", end=end)
    (tmp_path / "en/wavs").mkdir()
    soundfile.write(tmp_path / "en/wavs/g4.wav", tone(200), 16_000)
    items = read_seedtts(path, "en")
    prompt = str(tmp_path / "en/prompt-wavs/p.wav")
    assert [(i.utt, i.prompt_text, i.prompt_wav) for i in items] == [
        ("u5", "It's me.", prompt), ("u4", "Me.", prompt), ("g4", "Me.", prompt),
        ("u3", "", prompt), ("u2", "", "")]
    assert [i.gt_wav for i in items] == [str(tmp_path / "en/gt/u5.wav"), None,
                                         str(tmp_path / "en/wavs/g4.wav"), None, None]
    assert {(i.text, i.lang, i.keep_apostrophe) for i in items} == {("Hello.", "en", True)}
    assert "has 5 utterances, the published seedtts-en 1088" in capsys.readouterr().out


def test_a_seedtts_list_of_the_published_number_is_read_without_a_note(tmp_path, capsys):
    path = write_list(tmp_path / "meta.lst", *(f"u{k}|你好|p.wav|再见" for k in range(2_020)))
    assert {(i.lang, i.text) for i in read_seedtts(path, "zh")} == {("zh", "再见")}
    assert not capsys.readouterr().out


@pytest.mark.parametrize("line", ("only", "a|b|c|d|e|f", "a||p.wav|d", "|b|p.wav|d", "a|b|p.wav| "))
def test_a_malformed_seedtts_line_is_named_by_number(tmp_path, line):
    path = write_list(tmp_path / "en/meta.lst", "u1|Me.|p.wav|Hello.", "", line)
    with pytest.raises(ValueError, match="line 3: wanted 2 to 5 fields"):
        read_seedtts(path, "en")


LS_PC = "61-70968-0000\t3.2\tHe's here.\t61-70970-0001\t5.5\tNot \"now\", he said."


def test_the_librispeech_pc_list_with_crlf_and_tabs(tmp_path, capsys):
    (item,) = read_librispeech_pc(write_list(tmp_path / "a.lst", LS_PC, end="\r\n"), tmp_path)
    assert item == ListItem("61-70970-0001", "He's here.",
                            str(tmp_path / "61/70968/61-70968-0000.flac"), 'Not "now", he said.',
                            str(tmp_path / "61/70970/61-70970-0001.flac"), "en", False)
    assert "the published librispeech-pc 1127" in capsys.readouterr().out


@pytest.mark.parametrize("line", (
    "a\tb", LS_PC.replace("\t", " "), LS_PC + "\tmore", LS_PC.replace("3.2", "x"),
    LS_PC.replace("61-70970-0001", "61_70970"), LS_PC.replace("He's here.", "")))
def test_a_malformed_librispeech_pc_line_is_named_by_number(tmp_path, line):
    path = write_list(tmp_path / "a.lst", LS_PC, line)
    with pytest.raises(ValueError, match="line 2: wanted 6 fields, TAB"):
        read_librispeech_pc(path, tmp_path)


def test_duplicates_empty_lists_and_missing_roots_are_errors(tmp_path):
    with pytest.raises(ValueError, match="duplicate utterances .*61-70970-0001"):
        read_librispeech_pc(write_list(tmp_path / "a.lst", LS_PC, LS_PC), tmp_path)
    with pytest.raises(ValueError, match="duplicate utterances .*u1"):
        read_seedtts(write_list(tmp_path / "en/meta.lst", "u1|a|p.wav|b", "u1.wav|b"), "en")
    with pytest.raises(ValueError, match="no lines"):
        read_seedtts(write_list(tmp_path / "en/meta.lst", ""), "en")
    with pytest.raises(ValueError, match="no folder"):
        read_librispeech_pc(write_list(tmp_path / "a.lst", LS_PC), tmp_path / "no")
    with pytest.raises(ValueError, match="cannot be read"):
        read_seedtts(tmp_path / "en/no.lst", "en")


# ---- speaking ----------------------------------------------------------------------------------

def test_each_system_speaks_each_utterance_of_each_list(whole):
    made = wavs_of(whole.dir / "eval")
    assert sorted(made) == sorted(
        [f"seedtts-en/{stage}/u{i}.wav" for stage in ("pretrain", "grow") for i in range(3)]
        + [f"librispeech-pc/{stage}/7-2-{i}.wav" for stage in ("pretrain", "grow")
           for i in range(3)])
    assert len(set(made.values())) == 12                    # system, text, voice, noise all count
    assert not list((whole.dir / "eval").rglob("*.tmp")) + list(whole.dir.rglob("*.part"))
    mark = json.loads((whole.dir / "eval/seedtts-en/grow/settings.json").read_text())
    assert mark["checkpoint"] == whole.digest("grow") != whole.digest("pretrain")
    assert mark["nfe"] == 2 and mark["cfg_scale"] == 1.5 and mark["sway"] == -1


def test_a_wav_that_was_lost_is_made_again_alone_and_is_the_same(copy):
    run, world = copy(batch=1), TinyWorld()
    before = wavs_of(run.dir / "eval")
    run_lists(run, world)
    assert world.spoken == [] and wavs_of(run.dir / "eval") == before   # nothing left to do
    shutil.rmtree(run.dir / "eval")
    run_lists(run, TinyWorld())                     # alone in its batch: equal up to the 16 bits
    again = wavs_of(run.dir / "eval")
    assert again.keys() == before.keys()
    for name in before:
        a, b = (np.frombuffer(x[name][-1_600:], "<i2").astype(int) for x in (again, before))
        assert np.abs(a - b).max() <= 2
    records = read_records(run.dir / "eval/seedtts-en/grow.jsonl")
    (run.dir / "eval/seedtts-en/grow/u1.wav").unlink()
    run_lists(run, world)
    assert world.spoken == [TEXTS[1]]
    assert wavs_of(run.dir / "eval") == again       # bit for bit
    assert read_records(run.dir / "eval/seedtts-en/grow.jsonl") == records


@pytest.mark.parametrize("changes, message", (
    ({"nfe": 3}, "nfe 2 there, 3 now"), ({"seed": 1}, "seed 0 there, 1 now")))
def test_wavs_of_other_settings_are_an_error_that_names_the_field(copy, changes, message):
    run, world = copy(**changes), TinyWorld()
    before = wavs_of(run.dir / "eval")
    with pytest.raises(ValueError, match=f"holds wavs of other settings: {message}; set them back "
                                         "to go on, or remove the folder"):
        run_lists(run, world)
    assert world.spoken == [] and wavs_of(run.dir / "eval") == before


def test_another_model_list_or_guidance_and_strange_wavs_are_refused_too(copy, lists, tmp_path):
    run = copy()
    run.config = replace(run.config, sample=replace(run.config.sample, cfg_scale=2.0))
    with pytest.raises(ValueError, match="cfg_scale 1.5 there, 2.0 now"):
        run_lists(run, TinyWorld())
    run = copy(lists={"seedtts-en": str(seedtts_list(tmp_path / "en", 2))})
    with pytest.raises(ValueError, match="list '.*' there"):
        run_lists(run, TinyWorld())
    run = copy()
    (run.dir / "grow.safetensors").unlink()
    run.finish("grow", tiny_ditar(5).state_dict(), {}, half=False)
    with pytest.raises(ValueError, match="grow holds wavs of other settings: checkpoint"):
        run_lists(run, TinyWorld())
    (run.dir / "eval/seedtts-en/pretrain/settings.json").unlink()
    with pytest.raises(ValueError, match="pretrain holds wavs of other settings"):
        run_lists(run, TinyWorld())


def test_two_ranks_make_and_score_together_what_one_does(whole, lists, tmp_path):
    meet, worlds = threading.Barrier(2, timeout=100), (TinyWorld(), TinyWorld())
    ranks = [tiny_run(tmp_path / "out", **lists) for _ in worlds]
    for rank, run in enumerate(ranks):              # threads in place of processes
        run.rank, run.ranks, run.main, run.barrier = rank, 2, rank == 0, meet.wait
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_lists, ranks, worlds))
    # 2 and 1 of 3 utterances, in 2 lists, 2 systems
    assert [len(world.spoken) for world in worlds] == [8, 4]
    one, two = wavs_of(whole.dir / "eval"), wavs_of(run.dir / "eval")
    assert one.keys() == two.keys()
    for name in one:
        a, b = (np.frombuffer(x[name][-1_600:], "<i2").astype(int) for x in (one, two))
        assert len(one[name]) == len(two[name]) and np.abs(a - b).max() <= 2
    for name in ("seedtts-en/real", "seedtts-en/grow", "librispeech-pc/pretrain"):
        a, b = (read_records(r.dir / f"eval/{name}.jsonl") for r in (whole, run))
        assert [r["utt"] for r in a] == [r["utt"] for r in b]
        for x, y in zip(a, b):
            assert x["sim"] == pytest.approx(y["sim"], abs=1e-3) and x["wer"] == y["wer"]
    assert not list(run.dir.rglob("*.part"))


def test_limit_takes_the_first_of_each_list_and_one_system_needs_no_other(lists, tmp_path, capsys):
    run, world = tiny_run(tmp_path / "out", stages=("pretrain",), **lists), TinyWorld()
    run_lists(run, world, limit=1)
    assert sorted(wavs_of(run.dir / "eval")) == ["librispeech-pc/pretrain/7-2-0.wav",
                                                 "seedtts-en/pretrain/u0.wav"]
    out = capsys.readouterr().out
    assert "| Pretrain |" in out and "GROW" not in out
    (run.dir / "pretrain.safetensors").unlink()
    with pytest.raises(ValueError, match="no pretrain.safetensors in .*run stages=pretrain first"):
        run_lists(run, world)


def test_what_was_cut_at_the_cap_is_known_from_the_wav(copy):
    run = copy(batch=1)
    model = tiny_ditar(0)                           # never stops by itself
    (run.dir / "pretrain.safetensors").unlink()
    run.finish("pretrain", model.state_dict(), {}, half=False)
    shutil.rmtree(run.dir / "eval/seedtts-en")
    shutil.rmtree(run.dir / "eval/librispeech-pc")
    run_lists(run, TinyWorld(), limit=2)
    rows = read_records(run.dir / "eval/seedtts-en/pretrain.jsonl")
    assert [r["stopped"] for r in rows] == [False, False] and summarize(rows)["cut"] == 2
    cap = run.config.sample.cap(len(TEXTS[0]))
    assert rows[0]["seconds"] == pytest.approx(0.1 * cap)
    real = read_records(run.dir / "eval/seedtts-en/real.jsonl")
    assert [r["stopped"] for r in real] == [None, None] and summarize(real)["cut"] == 0


# ---- scoring -----------------------------------------------------------------------------------

class Hears:
    """An ASR that says these texts, one after the other; UTMOS that counts."""
    def __init__(self, *texts):
        self.texts, self.clips = texts, 0

    def transcribe(self, wavs):
        start, self.clips = self.clips, self.clips + len(wavs)
        return list(self.texts[start:self.clips])

    def score(self, wavs):
        return torch.tensor([4.0] * len(wavs))


def items_of(texts, folder, keep_apostrophe=True, lang="en"):
    soundfile.write(folder / "voice.wav", tone(200), 16_000)
    return [ListItem(f"u{i}", "a prompt", str(folder / "voice.wav"), text, None, lang,
                          keep_apostrophe) for i, text in enumerate(texts)]


def write_clips(folder, n):
    paths = [folder / f"u{i}.wav" for i in range(n)]
    for i, path in enumerate(paths):
        soundfile.write(path, tone(200 + 30 * i), 16_000)
    return paths


def judges_of(*texts, lang="en", speaker=None, utmos=None):
    return SimpleNamespace(asr={lang: Hears(*texts)} if texts else {}, speaker=speaker, utmos=utmos)


def test_the_apostrophe_belongs_to_the_set(tmp_path, lists):
    paths = write_clips(tmp_path, 1)
    for keep, norm, wer in ((True, "tom's dog ran", 1 / 3), (False, "toms dog ran", 0)):
        record, = score(items_of(TEXTS[:1], tmp_path, keep), paths, judges_of("Toms dog ran"))
        assert record["ref_norm"] == norm and record["wer"] == pytest.approx(wer)
    sets = read_lists(lists["lists"], lists["librispeech_root"])
    assert [sets[name][0].keep_apostrophe for name in ("seedtts-en", "librispeech-pc")] == [
        True, False]


def test_records_hold_texts_errors_and_scores_by_hand(tmp_path):
    texts = ("we ran to her", "yes", "he was old")
    items, paths = items_of(texts, tmp_path), write_clips(tmp_path, 3)
    judges = judges_of("We ran two her!", "yes yes yes", "he", speaker=RandomJudge(),
                       utmos=Hears())
    out = score(items, paths, judges)
    assert [(r["S"], r["D"], r["I"]) for r in out] == [(1, 0, 0), (0, 0, 2), (0, 2, 0)]
    assert [r["wer"] for r in out] == pytest.approx([0.25, 2.0, 2 / 3])     # never clipped
    assert out[0]["hyp"] == "We ran two her!" and out[0]["hyp_norm"] == "we ran two her"
    assert [r["utt"] for r in out] == ["u0", "u1", "u2"] and out[0]["lang"] == "en"
    assert out[0]["sim"] == pytest.approx(1, abs=1e-3) and out[2]["sim"] < 0.99
    assert [r["utmos"] for r in out] == [4, 4, 4] and out[0]["stopped"] is None
    s = summarize(out)
    assert s["wer"] == pytest.approx(100 * (0.25 + 2 + 2 / 3) / 3)
    assert s["wer_corpus"] == pytest.approx(100 * 5 / 8)
    assert (s["n"], s["over_100"], s["bad"], s["cut"]) == (3, 1, 0, 0)
    assert s["sim"] == pytest.approx(np.mean([r["sim"] for r in out])) and s["utmos"] == 4


def test_bad_wavs_count_with_the_worst_scores_and_no_judge_hears_them(tmp_path):
    items, paths = items_of(("one two", "three four", "five six", "seven"), tmp_path), write_clips(
        tmp_path, 4)
    soundfile.write(paths[0], np.zeros(8_000), 16_000)
    soundfile.write(paths[1], np.zeros(0), 16_000)
    soundfile.write(paths[2], np.full(8_000, np.nan), 16_000, subtype="FLOAT")
    judges = judges_of("seven", speaker=RandomJudge(), utmos=Hears())
    out = score(items, paths, judges)
    assert [r["bad"] for r in out] == [True, True, True, False] and judges.asr["en"].clips == 1
    assert [r["wer"] for r in out] == [1, 1, 1, 0] and [r["D"] for r in out] == [2, 2, 2, 0]
    assert [r["sim"] for r in out][:3] == [0, 0, 0]
    assert [r["utmos"] for r in out] == [1, 1, 1, 4]
    assert summarize(out)["bad"] == 3 and summarize(out)["over_100"] == 0
    only_bad = score(items[:2], paths[:2], judges)
    assert summarize(only_bad)["wer"] == 100


def test_chinese_counts_characters_and_its_own_recogniser(tmp_path):
    items, paths = items_of(("你好，世界！",), tmp_path, lang="zh"), write_clips(tmp_path, 1)
    record, = score(items, paths, judges_of("你好世", lang="zh"))
    assert record["wer"] == 0.25 and record["ref_norm"] == "你 好 世 界"
    assert "wer" not in score(items, paths, judges_of("hello"))[0]      # nobody for zh


def test_other_rates_and_channels_are_read_and_what_is_no_audio_is_named(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.stack([tone(200, 4_800)] * 2, 1), 24_000)
    wav, stopped = testsets.read(tmp_path / "a.wav")
    assert wav.shape == (3_200,) and stopped is None
    (tmp_path / "b.wav").write_bytes(b"RIFFxxxx")
    with pytest.raises(ValueError, match="b.wav: no readable audio file"):
        testsets.read(tmp_path / "b.wav")


# ---- summary and table -------------------------------------------------------------------------

PAPER = {   # Table 1: LibriSpeech-PC, Seed-TTS EN, Seed-TTS ZH
    "Pretrain": ((2.373, 0.648, 4.30), (2.406, 0.663, 3.95), (1.269, 0.717, 3.14)),
    "GROW": ((1.927, 0.701, 4.33), (1.763, 0.702, 4.00), (0.983, 0.742, 3.12))}


def test_the_average_of_the_papers_rows_is_the_papers_average():
    means = {name: average([dict(zip(testsets.METRICS, row)) for row in rows])
             for name, rows in PAPER.items()}
    assert [f"{means[name]['wer']:.3f}" for name in PAPER] == ["2.016", "1.558"]
    assert [f"{means[name]['sim']:.3f}" for name in PAPER] == ["0.676", "0.715"]
    d = {m: means["GROW"][m] - means["Pretrain"][m] for m in testsets.METRICS}
    assert (f"{d['wer']:.3f}", f"{d['sim']:.3f}", f"{d['utmos']:.2f}") == ("-0.458", "0.039",
                                                                         "0.02")


def made_up(n, wer, sim, seed=0, **more):
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 0.01, n)
    return [{"utt": f"u{i}", "bad": False, "stopped": True, "ref_norm": "a b", "S": 0, "D": 0,
             "I": 0, "wer": wer + e, "sim": sim + e, **more}
            for i, e in enumerate(noise - noise.mean())]


def test_the_difference_of_a_set_is_paired_and_the_average_weighs_sets_equally():
    before = {"x-en": made_up(100, 0.02, 0.6), "y-zh": made_up(50, 0.04, 0.6, 1)}
    after = {"x-en": made_up(100, 0.01, 0.7, 2), "y-zh": made_up(50, 0.01, 0.6, 3)}
    out = differences(before, after)
    assert out["x-en"]["wer"][0] == pytest.approx(-1) and out["y-zh"]["wer"][0] == pytest.approx(-3)
    assert out["average"]["wer"][0] == pytest.approx(-2)
    assert out["average"]["sim"][0] == pytest.approx(0.05)
    d = np.array([100 * (a["wer"] - b["wer"]) for a, b in zip(after["x-en"], before["x-en"])])
    assert out["x-en"]["wer"][1:] == bootstrap(d)
    _, low, high = out["average"]["wer"]
    widths = [out[name]["wer"][2] - out[name]["wer"][1] for name in before]
    assert low < -2 < high                              # independent sets: widths add in squares
    assert high - low == pytest.approx(np.hypot(*widths) / 2, rel=0.1)


def test_the_report_rounds_as_the_paper_does_and_marks_what_is_sure():
    before = {"x-en": made_up(100, 0.02373, 0.6484, utmos=4.3),
              "y-zh": made_up(50, 0.01269, 0.717, 1, utmos=3.14)}
    after = {"x-en": made_up(100, 0.01927, 0.70, 2, utmos=4.2),
             "y-zh": made_up(50, 0.05, 0.717, 3, utmos=3.14)}
    real = {"x-en": made_up(100, 0.02, 0.69)}
    table, diffs, counts = report({"Real": real, "Pretrain": before, "GROW": after}).split("\n\n")
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["", "x-en WER %", "x-en SIM", "x-en UTMOS", "y-zh WER %", "y-zh SIM",
                       "y-zh UTMOS", "average WER %", "average SIM", "average UTMOS"]
    assert rows[2] == ["Real", "2.000", "0.690"] + [""] * 7
    assert rows[3] == ["Pretrain", "2.373", "0.648", "4.30", "1.269", "0.717", "3.14", "1.821",
                       "0.683", "3.72"]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in diffs.splitlines()]
    assert rows[2][0] == "x-en" and rows[2][1].startswith("-0.446 [-")
    assert rows[2][1].endswith("better") and rows[2][2].endswith("better")
    assert rows[2][3] == "-0.10 [-0.10, -0.10] worse"
    assert rows[3][1].endswith("worse") and rows[3][2].endswith("]")
    assert rows[4][0] == "average" and rows[4][1].startswith("+1.643")
    assert "| GROW, y-zh | 50 | 0.000 | 0 | 0 | 0 |" in counts


def test_the_printed_table_is_that_of_the_files(whole):
    systems = {label: {name: read_records(whole.dir / f"eval/{name}/{stage}.jsonl")
                       for name in ("seedtts-en", "librispeech-pc")}
               for stage, label in testsets.SYSTEMS.items()}
    text = (whole.dir / "eval/table.md").read_text()
    assert text == (report(systems)
                    + "\n\nWER en by toy; SIM by toy; NFE 2; guidance 1.5; seed 0\n")
    s = summarize(systems["GROW"]["seedtts-en"])
    assert f"| GROW | {s['wer']:.3f} | {s['sim']:.3f} |" in text


# ---- bad input, before any slow step -----------------------------------------------------------

@pytest.mark.parametrize("name, lines, message", (
    ("seedtts-en", "u0|a|p.wav|Hello\nu1|b\n|c", "line 3"),
    ("seedtts-en", "u0|a|p.wav|Hello\nu0|a|p.wav|Hello", "duplicate"),
    ("seedtts-en", "u0|a|p.wav|...", "utterance u0: .*empty once punctuation"),
    ("seedtts-en", "u0|a|p.wav|a {b", "utterance u0: cannot speak"),
    ("seedtts-en", "u0|{a|p.wav|a b", "utterance u0: cannot speak"),
    ("seedtts-en", "x/u0|a|p.wav|Hello", "utterance x/u0: .*a file's name"),
    ("seedtts-en", "u0|Hello\nu1|You", "2 of 2 utterances have no prompt .*First: u0, u1"),
    ("seedtts-en", "u0|Hello|p.wav", "1 of 1 utterances have no prompt .*4 or 5 fields"),
    ("seedtts-en", "", "has no lines"),
    ("librispeech-pc", "1-2-3\t0.3", "needs its audio.*--librispeech-root"),
    ("ljspeech", "u0|a|p.wav|Hello", "unknown test set 'ljspeech'; wanted seedtts-en")))
def test_bad_lists_are_refused_before_anything_is_made(name, lines, message, tmp_path):
    soundfile.write(tmp_path / "p.wav", tone(200), 16_000)
    (tmp_path / "meta.lst").write_text(lines)
    run = tiny_run(tmp_path / "out", lists={name: str(tmp_path / "meta.lst")})
    with pytest.raises(ValueError, match=message):
        run_lists(run, TinyWorld())
    assert not (run.dir / "eval").exists()


def test_missing_files_are_counted_and_some_listed(lists, tmp_path):
    path = seedtts_list(tmp_path / "en", 7)
    for i in range(6):
        (tmp_path / "en" / "prompts" / f"p{i}.wav").unlink()
    run = tiny_run(tmp_path / "out", lists={"seedtts-en": str(path)})
    with pytest.raises(FileNotFoundError, match="prompts: 6 of 7 files are missing") as error:
        run_lists(run, TinyWorld())
    assert str(error.value).count("\n") == 5 and not (run.dir / "eval").exists()
    run = tiny_run(tmp_path / "out", lists={"seedtts-en": "nowhere.lst"})
    with pytest.raises(FileNotFoundError, match="no list file nowhere.lst"):
        run_lists(run, TinyWorld())


def test_a_missing_judge_is_found_before_anything_is_made(lists, tmp_path):
    run = tiny_run(tmp_path / "out", **lists)
    run.config = replace(run.config, rewards=replace(run.config.rewards, utmos="nowhere.pt"))
    with pytest.raises(FileNotFoundError, match="nowhere.pt"):
        run_lists(run, TinyWorld())
    assert not (run.dir / "eval").exists()


# ---- the command line --------------------------------------------------------------------------

def test_the_command_line_speaks_a_runs_lists(copy, lists, monkeypatch, capsys):
    run = copy()
    (run.dir / "config.json").write_text("{}")
    opened = []
    monkeypatch.setattr("train.open_run", lambda folder: opened.append(folder) or run)
    monkeypatch.setattr("worlds.make_world", lambda run: TinyWorld())
    shutil.rmtree(run.dir / "eval")
    words = [f"{name}={path}" for name, path in lists["lists"].items()]
    evaluate.main(["--ckpt", str(run.dir), "--lists", *words, "--limit", "1",
                   "--librispeech-root", lists["librispeech_root"]])
    assert opened == [str(run.dir)] and len(wavs_of(run.dir / "eval")) == 4
    assert "| GROW | " in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="asr='nowhere'"):
        evaluate.main(["--ckpt", str(run.dir), "--lists", words[0], "--asr", "nowhere"])


@pytest.mark.parametrize("words, message", (
    (["--lists", "a-en=x"], "give either --ckpt.*or --wavs"),
    (["--ckpt", "a", "--wavs", "b"], "give either --ckpt"),
    (["--wavs", "b"], "go with --lists"),
    (["--ckpt", "b", "--asr", "x"], "go with --lists"),
    (["--ckpt", "b", "--lists", "a-en=x", "--whisper", "x"], "--whisper do not"),
    (["--wavs", "b", "--lists", "a-en=x"], "no judge given; add --asr, --speaker or --utmos"),
    (["--wavs", "b", "--lists", "meta.lst", "--asr", "x"], "not of the form NAME=FILE"),
    (["--wavs", "b", "--lists", "a-en=x", "a-en=y", "--asr", "x"], "names a test set twice"),
    (["--wavs", "b", "--lists", "a-en=x", "--limit", "0"], "--limit 0; wanted at least 1")))
def test_wrong_words_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        evaluate.main(words)


def test_missing_wavs_and_judges_are_named(tmp_path, capsys):
    path = seedtts_list(tmp_path / "en")
    words = ["--lists", f"seedtts-en={path}", "--asr", "nowhere"]
    with pytest.raises(FileNotFoundError, match="--wavs .*none is no folder"):
        evaluate.main(["--wavs", str(tmp_path / "none"), *words])
    (tmp_path / "w").mkdir()
    soundfile.write(tmp_path / "w" / "u1.wav", tone(200), 16_000)
    with pytest.raises(FileNotFoundError, match="wavs: 2 of 3 files are missing:\n.*u0.wav\n"
                                                ".*u2.wav"):
        evaluate.main(["--wavs", str(tmp_path / "w"), *words])
    with pytest.raises(FileNotFoundError, match="asr='nowhere'"):
        evaluate.main(["--wavs", str(tmp_path / "en" / "wavs"), *words])
    (tmp_path / "en" / "meta.lst").write_text("u0|Hello\n")
    with pytest.raises(ValueError, match="no prompt .*leave out --speaker"):
        evaluate.main(["--wavs", str(tmp_path / "en" / "wavs"), *words, "--speaker", "x.pth"])


@pytest.mark.skipif(not (WHISPER.is_dir() and SPEECH.is_dir()),
                    reason=f"needs {WHISPER} and {SPEECH}")
def test_any_systems_wavs_are_scored_without_a_model(tmp_path):
    texts = {p.stem: p.read_text().strip() for p in sorted(SPEECH.glob("*.txt"))}
    for name in texts:
        (tmp_path / "w" / "my-en").mkdir(parents=True, exist_ok=True)
        shutil.copy(SPEECH / f"{name}.wav", tmp_path / "w" / "my-en")
    (tmp_path / "meta.lst").write_bytes("".join(f"{n}|{t}\r\n" for n, t in texts.items()).encode())
    out = subprocess.run(
        [sys.executable, str(ROOT / "evaluate.py"), "--wavs", "w", "--lists", "my-en=meta.lst",
         "--asr", str(WHISPER)], cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    records = read_records(tmp_path / "w" / "my-en.jsonl")
    assert [r["utt"] for r in records] == list(texts)
    assert {r["utt"]: r["wer"] for r in records}["quick_brown_fox"] <= 0.2
    assert f"| w | {summarize(records)['wer']:.3f} |" in out.stdout
    assert out.stdout.count("|") and "WER en by whisper-tiny.en" in out.stdout
