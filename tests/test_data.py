"""What data.py promises: manifests, corpora, filters, audio, RL prompts, batches."""
import contextlib
import io
import json
import random
import string
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import data
from data import Batches, BrokenAudio, DataConfig, Item, Loader, plan_epoch, read_audio
from rewards import CJK_PUNCTUATION, normalize

needs_mp3 = pytest.mark.skipif("MP3" not in soundfile.available_formats(),
                               reason="this libsndfile has no mp3")


def tone(sec, rate=16_000, hz=440.0, level=0.3):
    return level * np.sin(2 * np.pi * hz * np.arange(round(sec * rate)) / rate)


def encoded(sec, rate=24_000, kind="mp3", hz=440.0):
    file = io.BytesIO()
    soundfile.write(file, tone(sec, rate, hz), rate, format=kind.upper())
    return file.getvalue()


def write_wav(path, samples, rate=16_000, subtype="FLOAT"):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, subtype=subtype)
    return Item(str(path), "some words", "en")


def write_tar(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, raw in files:
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return path


def emilia(name, sec=2.0, kind="wav", **changes):
    """The pair of files of one utterance, as Emilia's tars have them."""
    record = {"id": name, "wav": f"{name}.mp3", "text": f" Text of {name}.", "duration": sec,
              "speaker": name[:8], "language": "en", "dnsmos": 3.3} | changes
    return [(f"{name}.{kind}", encoded(sec, kind=kind)),
            (f"{name}.json", json.dumps(record).encode())]


def libritts(root, n=4, sec=2.0):
    for k in range(n):
        wav = root / "84" / "121123" / f"84_121123_{k:06d}_000000.wav"
        write_wav(wav, tone(sec, 24_000), 24_000, "PCM_16")
        wav.with_suffix(".normalized.txt").write_text(f"Mister {k} said so.\n")
    return root


def items_of(n, lang="en", sec=3.0, **fields):
    return [Item(f"{lang}{k:03d}.wav", f"text {lang} {k}", lang, duration=sec, **fields)
            for k in range(n)]


# ---- config and manifests --------------------------------------------------------------------

def test_a_default_config_is_valid_and_has_the_papers_numbers():
    c = DataConfig()
    assert (c.dnsmos_min, c.min_sec, c.max_sec, c.n_prompts) == (3.2, 1.5, 15.0, 30_000)
    assert (data.SAMPLE_RATE, data.PATCH_SAMPLES) == (16_000, 1_600)


@pytest.mark.parametrize("field", [
    {"format": "wavs"}, {"langs": ("en", "de")}, {"langs": ()}, {"min_sec": 20.0}, {"min_sec": 0.0},
    {"max_batch_sec": 20.0}, {"n_prompts": 0}, {"threads": 0}, {"max_broken_share": 1.0}])
def test_a_wrong_config_field_is_named(field):
    with pytest.raises(ValueError, match=f"data.*{next(iter(field))}="):
        DataConfig(**field)


def test_a_manifest_reads_back_what_was_written(tmp_path):
    items = [Item(str(tmp_path / "a/x.wav"), "He said “so”.", "en", "s1", 2.5, 3.4),
             Item("/elsewhere/y.tar::n.mp3", "你好", "zh", target_text="再见", at=[512, 9]),
             Item(str(tmp_path / "z.wav"), "", "en", dnsmos=0.0)]
    data.write_manifest(tmp_path / "m.jsonl", items)
    assert data.read_manifest(tmp_path / "m.jsonl") == items
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["audio"] for line in lines] == ["a/x.wav", "/elsewhere/y.tar::n.mp3", "z.wav"]
    assert "speaker" not in lines[1] and "target_text" not in lines[0]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]      # no scratch file is left


def test_manifest_paths_are_relative_to_its_own_folder(tmp_path, monkeypatch):
    write_wav(tmp_path / "corpus/a.wav", tone(1))
    (tmp_path / "corpus/m.jsonl").write_text('{"audio": "a.wav", "text": "a", "lang": "en"}\n')
    monkeypatch.chdir(tmp_path)
    (item,) = data.read_manifest("corpus/m.jsonl")
    assert len(read_audio(item)) == 16_000
    (tmp_path / "corpus").rename(tmp_path / "moved")
    assert len(read_audio(data.read_manifest("moved/m.jsonl")[0])) == 16_000


def test_a_failed_write_leaves_the_old_manifest(tmp_path):
    path = tmp_path / "m.jsonl"
    data.write_manifest(path, items_of(1))
    before = path.read_text()
    with pytest.raises(AttributeError):
        data.write_manifest(path, [*items_of(3), None])
    assert path.read_text() == before


@pytest.mark.parametrize("line, wanted", [
    ("{nope", "no json"),
    ("[1, 2]", "wanted a json object"),
    ('{"text": "a", "lang": "en"}', "wanted 'audio' as a string, came None"),
    ('{"audio": "a.wav", "lang": "en"}', "wanted 'text' as a string"),
    ('{"audio": "a.wav", "text": 7, "lang": "en"}', "wanted 'text' as a string, came 7"),
    ('{"audio": "a.wav", "text": "a"}', "wanted 'lang' as a string"),
    ('{"audio": "a.wav", "text": "a", "lang": "en", "duration": "2"}', "'duration' as a number"),
    ('{"audio": "a.wav", "text": "a", "lang": "en", "duration": NaN}', "'duration' as a number"),
    ('{"audio": "a.wav", "text": "a", "lang": "en", "dnsmos": true}', "'dnsmos' as a number"),
    ('{"audio": "a.wav", "text": "a", "lang": "en", "speaker": 3}', "'speaker' as a string"),
    ('{"audio": "a.wav", "text": "a", "lang": "en", "at": [1]}', "'at' as"),
    (b"\xff\xfe", "wanted UTF-8"),
])
def test_a_bad_manifest_line_is_named_by_number_and_by_what_was_wanted(tmp_path, line, wanted):
    good = b'{"audio": "a.wav", "text": "a", "lang": "en"}\r\n\r\n'
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "m.jsonl").write_bytes(b"\xef\xbb\xbf" + good + line + b"\n")
    with pytest.raises(ValueError, match="line 3") as error:
        data.read_manifest(tmp_path / "m.jsonl")
    assert wanted in str(error.value)


def test_missing_and_empty_manifests_are_errors(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        data.read_manifest(tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no lines"):
        data.read_manifest(tmp_path / "empty.jsonl")


def test_rl_prompts_without_a_target_text_are_refused(tmp_path):
    data.write_manifest(tmp_path / "m.jsonl", items_of(2))
    with pytest.raises(ValueError, match="2 bad lines\n  line 1: wanted 'target_text'"):
        data.read_manifest(tmp_path / "m.jsonl", targets=True)


# ---- corpora ---------------------------------------------------------------------------------

def test_libritts_takes_the_normalized_text_and_names_wavs_without_one(tmp_path):
    libritts(tmp_path, 2)
    (tmp_path / "84/121123/84_121123_000000_000000.original.txt").write_text("Mr. 0 said so.")
    write_wav(tmp_path / "84/121123/84_121123_000009_000000.wav", tone(1))
    assert data.detect_format(tmp_path) == "libritts"
    items, problems = data.list_items(tmp_path)
    assert [(i.text, i.lang, i.speaker, i.duration, i.dnsmos) for i in items] == [
        ("Mister 0 said so.", "en", "84", 2.0, None), ("Mister 1 said so.", "en", "84", 2.0, None)]
    assert len(problems) == 1 and "84_121123_000009_000000.wav: no text" in problems[0]


def test_librispeech_is_lower_cased(tmp_path):
    folder = tmp_path / "1089/134686"
    folder.mkdir(parents=True)
    for k in range(2):
        soundfile.write(folder / f"1089-134686-000{k}.flac", tone(2), 16_000)
    (folder / "1089-134686.trans.txt").write_text(
        "1089-134686-0000 HE'S HERE\r\n1089-134686-0001 NOT NOW\n1089-134686-0002 GONE\n")
    items, problems = data.list_items(tmp_path)
    assert [(i.text, i.speaker, i.duration) for i in items] == [("he's here", "1089", 2.0),
                                                                ("not now", "1089", 2.0)]
    assert len(problems) == 1 and "0002.flac: missing" in problems[0]
    assert len(read_audio(items[0])) == 32_000


def test_emilia_tars_are_read_in_place(tmp_path):
    write_tar(tmp_path / "EN/EN-B000001.tar", emilia("EN_B1_S0", 3.0)[::-1])    # json first
    write_tar(tmp_path / "EN/EN-B000000.tar", [
        *emilia("EN_B0_S0"), *emilia("EN_B0_S1", language="ZH", text="你好", dnsmos=3.1)])
    items, problems = data.list_items(tmp_path)
    assert data.detect_format(tmp_path) == "emilia" and not problems
    assert [(Path(i.audio).name, i.text, i.lang, i.speaker, i.duration, i.dnsmos) for i in items] \
        == [("EN-B000000.tar::EN_B0_S0.wav", "Text of EN_B0_S0.", "en", "EN_B0_S0", 2.0, 3.3),
            ("EN-B000000.tar::EN_B0_S1.wav", "你好", "zh", "EN_B0_S1", 2.0, 3.1),
            ("EN-B000001.tar::EN_B1_S0.wav", "Text of EN_B1_S0.", "en", "EN_B1_S0", 3.0, 3.3)]
    assert [len(read_audio(i)) for i in items] == [32_000, 32_000, 48_000]
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        "EN-B000000.tar", "EN-B000001.tar"]                         # nothing was unpacked


@needs_mp3
def test_mp3_in_a_tar_decodes_to_the_tone_that_was_encoded(tmp_path):
    tar = write_tar(tmp_path / "a.tar", emilia("EN_B0_S0", 2.0, "mp3"))
    wav = read_audio(data.list_items(tar)[0][0])
    assert wav.dtype == torch.float32 and len(wav) == 32_000
    spectrum = torch.fft.rfft(wav).abs()
    assert spectrum.argmax() / 2.0 == pytest.approx(440, abs=1)     # bins of 0.5 Hz
    assert wav[8_000:24_000].abs().max() == pytest.approx(0.3, rel=0.06)


def test_a_tar_member_is_found_with_and_without_its_offset_and_after_the_tar_changed(tmp_path):
    path = write_tar(tmp_path / "a.tar", emilia("S0", 1.0) + emilia("S1", 3.0))
    items, _ = data.list_items(path)
    for item in items:
        assert torch.equal(read_audio(item), read_audio(Item(item.audio, "a", "en")))
    other = write_tar(tmp_path / "b.tar", emilia("S1", 3.0) + emilia("S0", 1.0))
    stale = Item(f"{other}::S0.wav", "a", "en", at=items[0].at)     # where S1 lies now
    assert len(read_audio(stale)) == 16_000
    with pytest.raises(BrokenAudio, match="no such member"):
        read_audio(Item(f"{path}::S7.wav", "a", "en"))
    with pytest.raises(BrokenAudio, match="missing"):
        read_audio(Item(f"{tmp_path}/no.tar::S0.wav", "a", "en"))


def test_members_without_a_partner_and_bad_json_are_named(tmp_path):
    tar = write_tar(tmp_path / "a.tar", [
        *emilia("S0"), ("S1.wav", encoded(1, kind="wav")), ("S2.json", b"{}"),
        ("S3.json", b"{"), ("S3.wav", b""), *emilia("S4", text=None), ("S5.json", b"[]"),
        ("S5.wav", b""), ("notes.txt", b"x")])
    items, problems = data.list_items(tar)
    assert [i.text for i in items] == ["Text of S0."]
    for problem, wanted in zip(problems, ("S1: no json file", "S2: no audio file", "S3: ",
                                          "S4: wanted 'text'", "S5: "), strict=True):
        assert f"{tar}::{wanted}" in problem


def test_a_half_downloaded_tar_is_named_and_its_first_part_is_used(tmp_path):
    whole = write_tar(tmp_path / "a.tar", [f for k in range(6) for f in emilia(f"S{k}")])
    raw = whole.read_bytes()
    whole.write_bytes(raw[:len(raw) // 2])
    items, problems = data.list_items(whole)
    assert 1 <= len(items) < 6 and "half-downloaded" in problems[0]
    assert all(len(read_audio(item)) == 32_000 for item in items[:-1])
    whole.write_bytes(b"")
    with pytest.raises(ValueError, match="empty file"):
        data.list_items(whole)


def test_a_source_of_no_known_layout_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        data.list_items(tmp_path / "no")
    write_wav(tmp_path / "a.wav", tone(1))
    with pytest.raises(ValueError, match=r"no \*.tar"):
        data.list_items(tmp_path)
    with pytest.raises(ValueError, match="no usable utterance"):
        data.list_items(tmp_path, "emilia")


def test_a_missing_duration_is_read_from_the_header(tmp_path):
    items = [write_wav(tmp_path / "a.wav", tone(1.25, 48_000), 48_000),
             Item(str(tmp_path / "gone.wav"), "a", "en")]
    data.write_manifest(tmp_path / "m.jsonl", items)
    (item,), problems = data.list_items(tmp_path / "m.jsonl")
    assert item.duration == 1.25 and "gone.wav: missing" in problems[0]


# ---- filters ---------------------------------------------------------------------------------

def test_the_papers_filters_are_strict_for_dnsmos_and_inclusive_for_length():
    cases = {"kept": Item("", "a", "en", "", 3.0, 3.21), "unknown": Item("", "a", "en", "", 3.0),
             "short": Item("", "a", "zh", "", 1.5, 3.3), "long": Item("", "a", "en", "", 15.0, 3.3)}
    out = [Item("", "a", "en", "", 3.0, 3.2), Item("", "a", "en", "", 1.49, 3.3),
           Item("", "a", "en", "", 15.01, 3.3), Item("", "a", "fr", "", 3.0, 3.3),
           Item("", " ... ", "en", "", 3.0, 3.3)]
    kept, dropped = data.keep([*cases.values(), *out], data.LANGS, 1.5, 15.0, 3.2)
    assert kept == list(cases.values())
    assert dropped == {"DNSMOS up to 3.2": 1, "under 1.5 s": 1, "over 15 s": 1,
                       "language 'fr'": 1, "empty text": 1}


def test_pretraining_keeps_every_dnsmos_and_reports_counts(tmp_path, capsys):
    items = items_of(3, dnsmos=3.0) + items_of(1, sec=31.0) + items_of(1, lang="de")
    data.write_manifest(tmp_path / "m.jsonl", items)
    config = DataConfig(train=str(tmp_path / "m.jsonl"))
    assert len(data.training_items(config)) == 3
    out = capsys.readouterr().out
    assert "kept 3 of 5" in out and "language 'de' 1, over 30 s 1" in out
    with pytest.raises(ValueError, match="leave nothing"):
        data.training_items(DataConfig(train=str(tmp_path / "m.jsonl"), langs=("zh",)))


def test_a_text_has_words_exactly_when_it_does_not_normalise_to_nothing():
    assert not any(c.isalnum() for c in string.punctuation + CJK_PUNCTUATION)
    for text, lang in (("...", "en"), ("。！", "zh"), (" ", "en"), ("a", "en"), ("7", "en"),
                       ("你。", "zh"), ("é!", "en")):
        assert data.has_words(text) == bool(normalize(text, lang))


# ---- audio -----------------------------------------------------------------------------------

@pytest.mark.parametrize("rate", (16_000, 22_050, 24_000, 44_100, 48_000))
def test_every_rate_becomes_16_khz_with_the_same_tone(tmp_path, rate):
    wav = read_audio(write_wav(tmp_path / "a.wav", tone(1.0, rate), rate))
    assert wav.shape == (16_000,) and wav.dtype == torch.float32
    assert int(torch.fft.rfft(wav).abs().argmax()) == 440           # bins of 1 Hz
    assert wav[4_000:12_000].abs().max() == pytest.approx(0.3, rel=0.01)


def test_audio_is_cropped_at_its_start_to_whole_patches(tmp_path):
    samples = np.linspace(0.1, 0.9, 5_000).astype(np.float32)
    wav = read_audio(write_wav(tmp_path / "a.wav", samples))
    assert torch.equal(wav, torch.from_numpy(samples[200:]))


def test_stereo_becomes_the_mean_of_its_channels(tmp_path):
    left, right = tone(0.2, hz=300), tone(0.2, hz=700)
    wav = read_audio(write_wav(tmp_path / "a.wav", np.stack([left, right], 1)))
    assert np.allclose(wav, (left + right) / 2, atol=1e-6)


def test_unusable_audio_raises_and_is_named(tmp_path):
    nan = tone(1)
    nan[77] = np.nan
    cases = {"nan": (nan, "NaN"), "infinite": (np.full(8_000, np.inf), "infinite"),
             "empty": (np.zeros(0), "empty"), "silent": (np.full(16_000, 1e-4), "silent"),
             "short": (tone(0.09), "0.1 s at least")}
    for name, (samples, wanted) in cases.items():
        with pytest.raises(BrokenAudio, match=f"{name}.wav.*{wanted}"):
            read_audio(write_wav(tmp_path / f"{name}.wav", samples))
    (tmp_path / "page.wav").write_text("<html>not found</html>")
    (tmp_path / "folder.wav").mkdir()
    for name, wanted in (("page", "no readable audio"), ("folder", "unreadable"),
                         ("gone", "missing")):
        with pytest.raises(BrokenAudio, match=f"{name}.wav.*{wanted}"):
            read_audio(Item(str(tmp_path / f"{name}.wav"), "a", "en"))
    assert issubclass(BrokenAudio, ValueError)


@pytest.mark.parametrize("kind", ("wav", "flac", pytest.param("mp3", marks=needs_mp3)))
def test_a_half_downloaded_file_is_broken(tmp_path, kind):
    file = io.BytesIO()
    noise = np.random.default_rng(0).standard_normal(48_000) * 0.1
    soundfile.write(file, noise, 24_000, format=kind.upper())
    path = tmp_path / f"a.{kind}"
    path.write_bytes(file.getvalue())
    assert len(read_audio(Item(str(path), "a", "en"))) == 32_000
    path.write_bytes(file.getvalue()[:len(file.getvalue()) // 2])
    with pytest.raises(BrokenAudio, match="a\\." + kind):
        read_audio(Item(str(path), "a", "en"))


def test_a_length_that_the_list_did_not_promise_is_broken(tmp_path):
    item = write_wav(tmp_path / "a.wav", tone(4))
    for sec, fine in ((0.0, True), (4.3, True), (3.8, True), (8.0, False), (1.0, False)):
        item.duration = sec
        wrong = pytest.raises(BrokenAudio, match="the list says")
        with contextlib.nullcontext() if fine else wrong:
            read_audio(item)


# ---- RL prompts ------------------------------------------------------------------------------

def test_prompts_come_in_equal_parts_with_another_text_of_the_same_source_and_language():
    sources = [items_of(50) + items_of(40, "zh"),
               [Item(f"b{k}", f"other {k % 9}", "en") for k in range(30)]]
    prompts = data.draw_prompts(sources, 60, seed=0)
    parts = [prompts[:20], prompts[20:40], prompts[40:]]
    pools = [sources[0][:50], sources[0][50:], sources[1]]
    for part, pool in zip(parts, pools):
        assert len({p.audio for p in part}) == 20                   # nobody twice
        texts = {i.text for i in pool}
        assert all(p.target_text in texts and p.target_text != p.text for p in part)
        assert {p.audio for p in part} <= {i.audio for i in pool}
        assert len({p.target_text for p in part}) > 5
    assert not any(i.target_text for pool in pools for i in pool)   # the sources stay as they were


def test_prompts_depend_on_the_seed_and_not_on_the_order_of_lines():
    items = items_of(50)
    first = data.draw_prompts([items], 20, seed=0)
    shuffled = random.Random(1).sample(items, 50)
    assert data.draw_prompts([shuffled], 20, seed=0) == first
    assert data.draw_prompts([items], 20, seed=1) != first


def test_prompts_that_cannot_be_drawn_are_an_error_that_says_what_would_do():
    with pytest.raises(ValueError, match="use 9 or 12"):
        data.draw_prompts([items_of(20), items_of(20), items_of(20)], 10, 0)
    with pytest.raises(ValueError, match="1-zh has 3 utterances.*lower n to 6"):
        data.draw_prompts([items_of(20) + items_of(3, "zh")], 20, 0)
    with pytest.raises(ValueError, match="1 different texts"):
        data.draw_prompts([[Item(f"a{k}", "same", "en") for k in range(9)]], 3, 0)
    with pytest.raises(ValueError, match="no source has"):
        data.draw_prompts([[]], 3, 0)


def test_make_prompts_writes_filtered_prompts_of_every_kind_of_source(tmp_path, capsys):
    write_tar(tmp_path / "emilia/ZH.tar", [f for k in range(8) for f in emilia(
        f"ZH_{k}", language="zh", text=f"第{k}句", dnsmos=3.2 + 0.01 * k)])
    libritts(tmp_path / "LibriTTS", 6)
    write_wav(tmp_path / "LibriTTS/84/121123/84_1_0.wav", tone(1.0, 24_000), 24_000)
    (tmp_path / "LibriTTS/84/121123/84_1_0.normalized.txt").write_text("Too short.")
    sources = [str(tmp_path / "emilia"), str(tmp_path / "LibriTTS")]
    words = ["make-prompts", *sources, "--n", "12", "--seed", "3", "--out"]
    for name in ("p.jsonl", "again.jsonl"):
        assert data.main([*words, str(tmp_path / name)]) == 0
    assert (tmp_path / "p.jsonl").read_bytes() == (tmp_path / "again.jsonl").read_bytes()
    out = capsys.readouterr().out
    assert "DNSMOS up to 3.2 1" in out and "under 1.5 s 1" in out
    prompts = data.read_manifest(tmp_path / "p.jsonl", targets=True)
    assert [p.lang for p in prompts] == ["zh"] * 6 + ["en"] * 6
    assert all(p.lang == "en" or p.dnsmos > 3.2 for p in prompts)
    assert all(len(read_audio(p)) == 32_000 for p in prompts)
    assert "Too short." not in {p.text for p in prompts} | {p.target_text for p in prompts}
    assert data.main([*words, str(tmp_path / "no.jsonl"), "--n", "13"]) == 1
    assert "use 12 or 14" in capsys.readouterr().err
    twice = ["make-prompts", sources[0], sources[0], "--out", str(tmp_path / "x.jsonl")]
    assert data.main(twice) == 1
    assert "named twice" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert data.main(["manifest", sources[1], "--out", str(tmp_path / "file/m.jsonl")]) == 1
    assert "error: " in capsys.readouterr().err


# ---- batches ---------------------------------------------------------------------------------

DURATIONS = np.random.default_rng(0).uniform(1.5, 15.0, 1_000).tolist()


@pytest.mark.parametrize("world", (1, 2, 3, 8))
def test_an_epoch_has_every_item_once_and_every_rank_a_batch_in_every_step(world):
    plan = plan_epoch(DURATIONS, 60.0, world, seed=0, epoch=0)
    assert all(len(step) == world and all(step) for step in plan)
    assert sorted(i for step in plan for batch in step for i in batch) == list(range(1_000))
    for step in plan:
        for batch in step:
            assert len(batch) * max(DURATIONS[i] for i in batch) <= 60.0    # with padding


def test_batches_are_full_and_hold_like_lengths():
    plan = plan_epoch(DURATIONS, 60.0, 1, seed=0, epoch=0)
    seconds = [[DURATIONS[i] for i in batch] for (batch,) in plan]
    assert np.mean([sum(s) for s in seconds]) > 50
    assert np.mean([max(s) - min(s) for s in seconds]) < 1


def test_two_ranks_share_the_batches_of_one():
    def batches(world):
        return sorted(tuple(b) for step in plan_epoch(DURATIONS, 60.0, world, 0, 0) for b in step)
    one = batches(1)
    assert len(one) == 155 and batches(5) == one            # they divide: the very same batches
    assert len(set(one) - set(batches(2))) == 1             # else the fullest one is halved
    assert len(set(batches(2)) - set(one)) == 2


def test_the_order_is_a_function_of_seed_and_epoch():
    same, again, other, later = (plan_epoch(DURATIONS, 60.0, 2, *key)
                                 for key in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert same == again and same != other and same != later


def test_windows_keep_the_shuffle_in_large_sets(monkeypatch):
    monkeypatch.setattr(data, "WINDOW", 100)
    plans = [plan_epoch(DURATIONS, 60.0, 1, 0, epoch) for epoch in (0, 1)]
    mates = [{frozenset(p) for (b,) in plan for p in zip(b, b[1:])} for plan in plans]
    assert len(mates[0] & mates[1]) < 0.1 * len(mates[0])
    assert sorted(i for (b,) in plans[0] for i in b) == list(range(1_000))


def test_too_long_an_item_and_too_few_items_are_errors():
    with pytest.raises(ValueError, match="item 1 lasts 61.00 s, longer than max_batch_sec=60"):
        plan_epoch([3.0, 61.0], 60.0, 1, 0, 0)
    with pytest.raises(ValueError, match="1 items cannot feed 2 ranks"):
        plan_epoch([3.0], 60.0, 2, 0, 0)
    assert plan_epoch([60.0], 60.0, 1, 0, 0) == [[[0]]]
    (step,) = plan_epoch([50.0, 50.0, 50.0], 60.0, 2, 0, 0)     # nothing to halve: one sits out
    assert [len(batch) for batch in step] == [1, 1]


def test_the_cursor_resumes_exactly_in_any_epoch_and_in_any_order():
    args = (DURATIONS[:50], 60.0, 2, 7)
    walking = Batches(*args)
    straight = [walking.batch(step) for step in range(40)]
    assert len(walking.starts) > 4                                  # several epochs
    for step in (0, 39, 5, 23, 6):
        assert Batches(*args).batch(step) == straight[step]         # a new run
        assert walking.batch(step) == straight[step]                # going back
    first = walking.starts[1]
    assert sorted(i for s in straight[:first] for b in s for i in b) == list(range(50))
    assert sorted(i for s in straight[first:walking.starts[2]] for b in s for i in b) \
        == list(range(50))
    assert straight[:first] != straight[first:2 * first]


# ---- loader ----------------------------------------------------------------------------------

@pytest.fixture
def corpus(tmp_path):
    items = [write_wav(tmp_path / f"{k}.wav", tone(0.1 * (k + 1))) for k in range(6)]
    return items + [Item(str(tmp_path / "gone.wav"), "a", "en"),
                    write_wav(tmp_path / "silent.wav", np.zeros(8_000))]


def test_the_loader_keeps_the_order_and_reads_ahead(corpus, monkeypatch):
    read = []
    monkeypatch.setattr(data, "read_audio", lambda i: read.append(i.audio) or read_audio(i))
    with contextlib.closing(Loader(corpus)) as loader:
        out = loader.load([4, 0, 2], then=[1, 4])
        assert [i for i, _ in out] == [4, 0, 2]
        assert [len(wav) for _, wav in out] == [8_000, 1_600, 4_800]
        assert [i for i, _ in loader.load([1, 4])] == [1, 4]
    assert len(read) == 4                                           # nothing was read twice
    assert not loader.pending


def test_a_broken_file_is_skipped_counted_and_named_once(corpus, capsys):
    with contextlib.closing(Loader(corpus)) as loader:
        for _ in range(3):
            assert [i for i, _ in loader.load([1, 6, 3])] == [1, 3]
        assert loader.load([6, 7]) == []                            # all broken: an empty batch
    assert (loader.tried, loader.failed, sorted(loader.broken)) == (11, 5, [6, 7])
    out = capsys.readouterr().out
    assert out.count("gone.wav") == 1 and out.count("silent.wav") == 1


def test_more_broken_files_than_the_set_share_stop_the_run(corpus, monkeypatch):
    monkeypatch.setattr(data, "MIN_TRIED", 10)
    with contextlib.closing(Loader(corpus, max_broken_share=0.2)) as loader:
        for _ in range(2):
            loader.load([0, 1, 2, 3, 6])                            # 1 in 5 is not more than 0.2
        with pytest.raises(RuntimeError, match="4 of 12 audio files were broken") as error:
            loader.load([6, 7])
    assert "gone.wav" in str(error.value) and "silent.wav: silent" in str(error.value)


def test_other_errors_than_broken_audio_are_not_swallowed(corpus, monkeypatch):
    def fail(item):
        raise MemoryError("no memory")
    monkeypatch.setattr(data, "read_audio", fail)
    with contextlib.closing(Loader(corpus)) as loader, pytest.raises(MemoryError):
        loader.load([0])


# ---- the command line ------------------------------------------------------------------------

def test_check_passes_a_sound_source_with_notes(tmp_path, capsys):
    libritts(tmp_path, 3)
    write_wav(tmp_path / "84/121123/84_1_1.wav", np.stack([tone(1.0)] * 2, 1))
    (tmp_path / "84/121123/84_1_1.normalized.txt").write_text("A short one.")
    assert data.main(["check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "note: 3 at 24000 Hz, resampled to 16000" in out
    assert "note: 1 of several channels" in out
    assert "note: 1 outside 1.5-15 s, left out of RL prompts" in out
    assert "decoded 4 of 4 files; nothing broken" in out
    row = next(line for line in out.splitlines() if line.startswith("en ")).split()
    assert row == ["en", "4", "0.00", "1", "1.00", "s", "2.00", "s"]


def test_check_finds_everything_that_is_broken(tmp_path, capsys):
    good = write_wav(tmp_path / "good.wav", tone(2))
    items = [good, good, Item(str(tmp_path / "gone.wav"), "a", "en"),
             write_wav(tmp_path / "silent.wav", np.zeros(32_000)),
             Item(str(tmp_path / "good2.wav"), "?!", "en"),
             Item(str(tmp_path / "good3.wav"), "a", "English")]
    for k in (2, 3):
        write_wav(tmp_path / f"good{k}.wav", tone(2))
    data.write_manifest(tmp_path / "m.jsonl", items)
    assert data.main(["check", str(tmp_path / "m.jsonl")]) == 1
    out = capsys.readouterr().out
    for wanted in ("2 x missing or unreadable", "gone.wav: missing", "silent.wav: silent",
                   "1 x unknown language", "'English'", "1 x text without words", "1 x duplicate",
                   "5 broken"):
        assert wanted in out
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert data.main(["check", str(tmp_path / "bad.jsonl")]) == 1
    assert "line 1: wanted 'audio'" in capsys.readouterr().err


def test_check_limit_decodes_a_spread_sample(tmp_path, capsys):
    libritts(tmp_path, 9)
    assert data.main(["check", str(tmp_path), "--limit", "3"]) == 0
    assert "decoded 3 of 9" in capsys.readouterr().out
    assert data.main(["check", str(tmp_path), "--limit", "0"]) == 1


def test_a_manifest_of_a_folder_of_tars_loads_without_looking_at_the_tars(tmp_path, monkeypatch):
    write_tar(tmp_path / "e/a.tar", emilia("S0") + emilia("S1"))
    assert data.main(["manifest", str(tmp_path / "e"), "--out", str(tmp_path / "m.jsonl")]) == 0
    listed = data.list_items(tmp_path / "e")[0]
    monkeypatch.setattr(tarfile, "open", None)                      # nobody walks a tar from here
    items, problems = data.list_items(tmp_path / "m.jsonl")
    assert items == listed and not problems
    assert [len(read_audio(item)) for item in items] == [32_000, 32_000]


def test_the_command_runs_and_reports_an_error_without_a_traceback(tmp_path):
    script = Path(data.__file__)
    done = subprocess.run([sys.executable, script, "check", tmp_path / "no"], text=True,
                          capture_output=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in \
        done.stderr
