"""Evaluation on the public test sets: speak a list, score it, put the systems into one table.

Paper: "Evaluation Metrics" and Table 1 (Seed-TTS EN and ZH, LibriSpeech-PC test-clean, NFE 32).

    python evaluate.py --ckpt out/full --lists seedtts-en=seedtts_testset/en/meta.lst \\
        seedtts-zh=seedtts_testset/zh/meta.lst librispeech-pc=librispeech_pc_test_clean.lst \\
        --librispeech-root LibriSpeech/test-clean          (also under torchrun)
    python evaluate.py --wavs DIR --lists seedtts-en=seedtts_testset/en/meta.lst \\
        --asr openai/whisper-large-v3 --speaker wavlm_large_finetune.pth       any system's wavs

out_dir/eval/SET/STAGE/ holds UTT.wav and settings.json, what shaped them; STAGE.jsonl beside it the
scores, one utterance a line. A wav that is there is not made again. An utterance's noise depends on
the seed and its name alone, so neither order, batch nor ranks matter (up to rounding).

Choices where the paper is silent:
 1. A set's WER is the mean over utterances, never clipped, as both public scripts have it; greedy
    Whisper without a token cap; the apostrophe stays in Seed-TTS and goes in LibriSpeech-PC.
 2. SIM is to the whole original prompt, though the model hears it cropped to whole patches.
 3. A bad wav (empty, silent, ...) counts: WER 1, SIM 0, UTMOS 1.
"""

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import jiwer
import numpy as np
import soundfile
import soxr
import torch
from tqdm import tqdm

import rewards
import run as runs
from audio import SAMPLE_RATE
from data import LANGS, Item, read_audio, text_lines
from evaluate import bootstrap_means, interval, read_records, speak, write_records
from judges import UTMOS, WHISPER_BATCH
from rewards import RewardConfig, is_bad

SYSTEMS = {"real": "Real", "pretrain": "Pretrain", "grow": "GROW"}
SET_SIZES = {"seedtts-en": 1_088, "seedtts-zh": 2_020, "librispeech-pc": 1_127}
METRICS = {"wer": ("WER %", 3, "down"), "sim": ("SIM", 3, "up"), "utmos": ("UTMOS", 2, "up")}


# ---------------------------------------------------------------- lists and what they need

@dataclass(frozen=True)
class ListItem:
    """One utterance of a test set: speak `text` in the voice of prompt_wav."""
    utt: str
    prompt_text: str                # "" where the list has none
    prompt_wav: str                 # "" where the list has none
    text: str
    gt_wav: str                     # a real recording of `text`, or None
    lang: str
    keep_apostrophe: bool           # of WER's text normalisation: a property of the test set


def finish_list(path, items, name):
    """Refuses duplicates and empty lists; notes an unusual number of lines."""
    twice = [utt for utt, n in Counter(item.utt for item in items).items() if n > 1]
    if twice or not items:
        raise ValueError(f"{path}: duplicate utterances {twice[:5]}; each may stand there once"
                         if twice else f"{path} has no lines")
    if len(items) != SET_SIZES[name]:
        print(f"note: {path} has {len(items)} utterances, the published {name} {SET_SIZES[name]}; "
              "its score is not comparable")
    return items


def read_seedtts(path, lang):
    """Seed-TTS's meta.lst, "|" between fields: utt|prompt_text|prompt_wav|text[|gt_wav], or
    utt|text|prompt_wav, or utt|text. Paths are relative to the list's folder; without a gt_wav it
    is wavs/UTT.wav where that exists. lang: "en" or "zh". Returns a list of ListItem. Raises
    ValueError with the number of a bad line."""
    folder, items = Path(path).absolute().parent, []
    for number, line in text_lines(path):
        fields = [field.strip() for field in line.split("|")]
        if not 2 <= len(fields) <= 5 or not all(fields):
            raise ValueError(f"{path} line {number}: wanted 2 to 5 fields, '|' between them, none "
                             f"empty (utt|prompt_text|prompt_wav|text|gt_wav), came {line!r}")
        utt = fields[0].removesuffix(".wav")
        prompt_text = fields[1] if len(fields) > 3 else ""
        prompt_wav = str(folder / fields[2]) if len(fields) > 2 else ""
        gt_wav = folder / (fields[4] if len(fields) == 5 else f"wavs/{utt}.wav")
        items.append(ListItem(utt, prompt_text, prompt_wav, fields[3 if len(fields) > 3 else 1],
                              str(gt_wav) if len(fields) == 5 or gt_wav.is_file() else None,
                              lang, True))
    return finish_list(path, items, f"seedtts-{lang}")


def read_librispeech_pc(path, root):
    """F5-TTS's LibriSpeech-PC test-clean list: TAB between ref_utt, ref_sec, ref_text, gen_utt,
    gen_sec, gen_text. root: LibriSpeech's test-clean folder. Returns and raises as
    read_seedtts."""
    if not os.path.isdir(root):
        raise ValueError(f"{root} is no folder; give LibriSpeech's test-clean")

    def flac(utt):
        speaker, chapter, _ = utt.split("-")
        return os.path.join(root, speaker, chapter, f"{utt}.flac")

    items = []
    for number, line in text_lines(path):
        fields = [field.strip() for field in line.split("\t")]
        try:
            prompt, prompt_sec, prompt_text, utt, gen_sec, text = fields
            if min(float(prompt_sec), float(gen_sec)) <= 0 or not (prompt_text and text):
                raise ValueError
            items.append(ListItem(utt, prompt_text, flac(prompt), text, flac(utt), "en", False))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: wanted 6 fields, TAB between them (prompt's "
                             "SPEAKER-CHAPTER-N, seconds, text, then the target's), came "
                             f"{line!r}") from error
    return finish_list(path, items, "librispeech-pc")


def read_list(name, path, librispeech_root=""):
    """The ListItems of one test set. Raises ValueError for an unknown name or a bad line."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{name}: no list file {path}")
    if name == "librispeech-pc":
        if not librispeech_root:
            raise ValueError("librispeech-pc needs its audio: name LibriSpeech's test-clean by "
                             "--librispeech-root (evaluate.librispeech_root)")
        return read_librispeech_pc(path, librispeech_root)
    if not name.endswith(("-en", "-zh")):
        raise ValueError(f"unknown test set {name!r}; wanted seedtts-en, seedtts-zh, librispeech-pc"
                         ", or NAME-en or NAME-zh for another list in Seed-TTS's layout")
    return read_seedtts(path, name[-2:])


def read_lists(lists, librispeech_root="", limit=None, clean=lambda text: text):
    """Set name -> its first `limit` items. clean: raises ValueError for what cannot be spoken."""
    sets = {name: read_list(name, path, librispeech_root)[:limit] for name, path in lists.items()}
    for name, items in sets.items():
        for item in items:
            try:
                if Path(item.utt).name != item.utt:
                    raise ValueError("an utterance's name is to be a file's name")
                rewards.normalize_ref(item.text, item.lang, item.keep_apostrophe)
                for text in filter(None, (item.text, item.prompt_text)):
                    clean(text)
            except ValueError as error:
                raise ValueError(f"{name}, utterance {item.utt}: {error}") from error
    return sets


def require(paths, what):
    """Raises FileNotFoundError that lists some of the missing files and counts them."""
    gone = [str(path) for path in paths if not os.path.isfile(path)]
    if gone:
        raise FileNotFoundError(f"{what}: {len(gone)} of {len(paths)} files are missing:\n  "
                                + "\n  ".join(gone[:5]))


def require_prompts(name, items, spoken):
    """Each item has a prompt wav; for speaking, its text too."""
    gone = [i.utt for i in items if not i.prompt_wav or spoken and not i.prompt_text]
    if gone:
        need = ("speaking needs both: use a list with 4 or 5 fields" if spoken else
                "SIM needs the wav: leave out --speaker")
        raise ValueError(f"{name}: {len(gone)} of {len(items)} utterances have no prompt wav or no "
                         f"prompt text; {need}. First: {', '.join(gone[:5])}")
    require([i.prompt_wav for i in items], f"{name}, prompts")


# ---------------------------------------------------------------- speaking

def settings(run, stage, path):
    """What shapes a stage's wavs of a list, beside the audio of the prompts."""
    c, s = run.config.evaluate, run.config.sample
    return {"checkpoint": run.digest(stage), "vae": run.digest("vae"),
            "list": hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16], "nfe": c.nfe,
            "cfg_scale": s.cfg_scale, "sway": s.sway, "seed": c.seed,
            "max_patches_per_token": s.max_patches_per_token,
            "max_patches_extra": s.max_patches_extra, "dtype": "bf16" if run.bf16 else "fp32"}


def check_settings(folder, now):
    """Wavs that are there serve on only if the same settings made them."""
    path = folder / "settings.json"
    then = json.loads(path.read_text()) if path.is_file() else {}
    if then != now and (then or any(folder.glob("*.wav"))):
        raise ValueError(f"{folder} holds wavs of other settings: {runs.differences(then, now)}; "
                         "set them back to go on, or remove the folder to make its wavs again")


def write_wav(path, wav, stopped):
    """16 bit, under a temporary name, renamed. Whether it stopped by itself is in the comment."""
    scratch = path.with_name(path.name + ".tmp")
    wav = wav if torch.isfinite(wav).all() else torch.zeros(1)      # a bad wav, to be counted
    with soundfile.SoundFile(scratch, "w", SAMPLE_RATE, 1, "PCM_16", format="WAV") as file:
        file.comment = f"stopped={stopped}"
        file.write(wav.numpy())
    os.replace(scratch, path)


def speak_list(run, world, model, items, folder, title):
    """Writes folder/UTT.wav for each item; those of like length share a batch."""
    c, items = run.config.evaluate, sorted(items, key=lambda item: len(item.text))
    for k in tqdm(range(0, len(items), c.batch), title, disable=None if run.main else True):
        part = items[k:k + c.batch]
        voices = [Item(item.prompt_wav, item.prompt_text, item.lang) for item in part]
        prompts = [world.make_prompt(read_audio(voice), world.clean(item.prompt_text),
                                     world.clean(item.text)) for voice, item in zip(voices, part)]
        seeds = [int.from_bytes(hashlib.sha256(repr((c.seed, item.utt)).encode()).digest()[:7],
                                "little") for item in part]
        wavs, utterances = speak(model, world.vae, prompts, c, run.config.sample, seeds)
        for item, wav, u in zip(part, wavs, utterances):
            write_wav(folder / f"{item.utt}.wav", wav, u.stopped)


def speak_sets(run, world, sets, stages, root):
    """All that has no wav yet, this rank's share of it. Refuses wavs of other settings first."""
    from train import load_ditar
    marks = {(stage, name): settings(run, stage, run.config.evaluate.lists[name])
             for stage in stages for name in sets}
    for (stage, name), mark in marks.items():
        check_settings(root / name / stage, mark)
    for (stage, name), mark in marks.items() if run.main else ():
        path = root / name / stage / "settings.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_text(json.dumps(mark, indent=1) + "\n")
        os.replace(path.with_suffix(".tmp"), path)
    run.barrier()                       # no rank writes a wav that has no settings beside it
    for stage in stages:
        model = None
        for name, items in sets.items():
            folder = root / name / stage
            todo = [item for item in items[run.rank::run.ranks]
                    if not (folder / f"{item.utt}.wav").exists()]
            if todo:
                model = model or run.fast(load_ditar(run, stage))
                speak_list(run, world, model, todo, folder, f"{stage} {name}")


# ---------------------------------------------------------------- scoring

def judge_names(config, sets):
    """What judges whom: metric or language -> the name in the config; "" is left out."""
    asr = {"en": config.asr, "zh": config.zh_asr}
    langs = sorted({items[0].lang for items in sets.values()})
    names = {lang: asr[lang] for lang in langs} | {"SIM": config.speaker, "UTMOS": config.utmos}
    return {what: name for what, name in names.items() if name}


def check_judges(config, sets):
    """Before any slow step: is each judge that the sets need there?"""
    langs = [lang for lang in judge_names(config, sets) if lang in LANGS]
    for lang in langs or ["en"]:
        rewards.check_judges(replace(config, lang=lang))


def load_judges(config, sets, device, toy):
    """toy: what "toy" stands for. A judge without a name is left out."""
    names = judge_names(config, sets)
    return SimpleNamespace(
        asr={lang: rewards.load_asr(replace(config, lang=lang), device, toy.get("asr"), cap=False)
             for lang in names if lang in LANGS},
        speaker=config.speaker and rewards.load_speaker(config, device, toy.get("speaker")),
        utmos=config.utmos and UTMOS.load(config.utmos, device))


def read(path):
    """(S,) float32 at 16 kHz, as it is, and what write_wav noted (None: not known)."""
    try:
        with soundfile.SoundFile(path) as file:
            wav, rate = file.read(dtype="float32", always_2d=True).mean(axis=1), file.samplerate
            stopped = {"stopped=True": True, "stopped=False": False}.get(file.comment)
    except (OSError, soundfile.LibsndfileError) as error:
        raise ValueError(f"{path}: no readable audio file ({error}); remove it to have it made "
                         "again, or export it again") from error
    if rate != SAMPLE_RATE and len(wav):
        wav = soxr.resample(wav, rate, SAMPLE_RATE)
    return torch.from_numpy(np.ascontiguousarray(wav, dtype=np.float32)), stopped


def read_voice(item):
    wav, _ = read(item.prompt_wav)
    if is_bad(wav):
        raise ValueError(f"{item.prompt_wav} is empty, silent or not finite: no voice to compare")
    return wav


def score(items, paths, judges):
    """A record for each utterance of one language; paths[i] is what a system made of items[i]."""
    wavs, stopped = zip(*map(read, paths))
    records = [{"utt": item.utt, "lang": item.lang, "ref": item.text, "bad": is_bad(wav),
                "stopped": s, "seconds": len(wav) / SAMPLE_RATE}
               for item, wav, s in zip(items, wavs, stopped)]
    good = [i for i, record in enumerate(records) if not record["bad"]]
    audio, asr = [wavs[i] for i in good], judges.asr.get(items[0].lang)
    with rewards.rng_untouched():
        if asr:
            heard = dict(zip(good, asr.transcribe(audio) if good else (), strict=True))
            for i, (item, record) in enumerate(zip(items, records)):
                hyp = heard.get(i, "")
                ref_norm, hyp_norm = rewards.normalize_pair(item.text, hyp, item.lang,
                                                            item.keep_apostrophe)
                out = jiwer.process_words(ref_norm, hyp_norm)
                record |= {"hyp": hyp, "ref_norm": ref_norm, "hyp_norm": hyp_norm,
                           "wer": float(out.wer), "S": out.substitutions, "D": out.deletions,
                           "I": out.insertions}
        for metric, judge, worst, values in (
                ("sim", judges.speaker, 0.0, lambda: rewards.SIMReward(judges.speaker)(
                    audio, None, [read_voice(items[i]) for i in good])),
                ("utmos", judges.utmos, 1.0, lambda: judges.utmos.score(audio))):
            if judge:
                found = dict(zip(good, map(float, values() if good else ()), strict=True))
                for i, record in enumerate(records):
                    record[metric] = found.get(i, worst)
    return records


def score_list(items, paths, judges, out, rank=0, ranks=1):
    """Scores this rank's share; its records stand in a file beside `out` until `gather`."""
    items, paths, records = items[rank::ranks], paths[rank::ranks], []
    for k in tqdm(range(0, len(items), WHISPER_BATCH), f"scoring {out.parent.name}/{out.stem}",
                  disable=True if rank else None):
        records += score(items[k:k + WHISPER_BATCH], paths[k:k + WHISPER_BATCH], judges)
    write_records(out.with_suffix(f".{rank}.part"), records)


def gather(items, out, ranks=1):
    """All ranks' records in the list's order, in the file `out`."""
    parts = [out.with_suffix(f".{rank}.part") for rank in range(ranks)]
    by_utt = {record["utt"]: record for part in parts for record in read_records(part)}
    write_records(out, [by_utt[item.utt] for item in items])
    for part in parts:
        part.unlink()
    return read_records(out)


# ---------------------------------------------------------------- summary and table

def summarize(records):
    """A set's scores from its records alone. WER and corpus WER are percentages."""
    out = {"n": len(records), "bad": sum(r["bad"] for r in records),
           "cut": sum(r["stopped"] is False for r in records)}
    if "wer" in records[0]:
        errors = sum(r["S"] + r["D"] + r["I"] for r in records)
        out |= {"wer": 100 * np.mean([r["wer"] for r in records]),
                "wer_corpus": 100 * errors / sum(len(r["ref_norm"].split()) for r in records),
                "over_100": sum(r["wer"] > 1 for r in records)}
    return out | {name: np.mean([r[name] for r in records]) for name in ("sim", "utmos")
                  if name in records[0]}


def average(summaries):
    """The paper's average: the plain mean over sets, whatever their sizes."""
    return {metric: np.mean([s[metric] for s in summaries]) for metric in METRICS
            if all(metric in s for s in summaries)}


def differences(before, after):
    """Set (or "average") -> metric -> (difference, low, high). before, after: set -> records."""
    out = {}
    for metric in METRICS:
        measured, means = {}, []
        for seed, (name, rows) in enumerate(before.items()):
            assert [r["utt"] for r in rows] == [r["utt"] for r in after[name]], "paired"
            if metric in rows[0]:
                factor = 100 if metric == "wer" else 1
                d = factor * np.array([a[metric] - b[metric] for a, b in zip(after[name], rows)])
                means.append(bootstrap_means(d, seed=seed))         # sets are drawn independently
                measured[name] = (d.mean(), *interval(means[-1]))
        if len(means) == len(before) > 1:
            measured["average"] = (np.mean([m[0] for m in measured.values()]),
                                   *interval(np.mean(means, axis=0)))
        for name, values in measured.items():
            out.setdefault(name, {})[metric] = values
    return out


def markdown(header, rows):
    return "\n".join("| " + " | ".join(line) + " |"
                     for line in (header, ["---"] * len(header), *rows))


def difference_cell(metric, d, low, high):
    _, digits, better = METRICS[metric]
    sure = "" if low * high <= 0 else " better" if (d < 0) == (better == "down") else " worse"
    return f"{d:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]{sure}"


def report(systems):
    """Table 1's rows, the paired differences and the counts. systems: label -> set -> records."""
    scores = {label: {name: summarize(records) for name, records in by_set.items()}
              for label, by_set in systems.items()}
    counts = [[f"{label}, {name}", str(s["n"]), f"{s['wer_corpus']:.3f}" if "wer" in s else "",
               str(s.get("over_100", "")), str(s["bad"]), str(s["cut"])]
              for label, by_set in scores.items() for name, s in by_set.items()]
    sets = list(max(scores.values(), key=len))      # real speech may lack some
    for by_set in scores.values():
        if len(by_set) == len(sets) > 1:
            by_set["average"] = average(list(by_set.values()))
    columns = [(place, metric) for place in (*sets, "average") for metric in METRICS
               if any(metric in by_set.get(place, ()) for by_set in scores.values())]
    rows = [[label, *(f"{by_set[place][metric]:.{METRICS[metric][1]}f}"
                      if metric in by_set.get(place, ()) else "" for place, metric in columns)]
            for label, by_set in scores.items()]
    parts = [markdown(["", *(f"{place} {METRICS[m][0]}" for place, m in columns)], rows)]
    if "Pretrain" in systems and "GROW" in systems:
        rows = [[place, *(difference_cell(m, *found[m]) if m in found else "" for m in METRICS)]
                for place, found in differences(systems["Pretrain"], systems["GROW"]).items()]
        parts.append(markdown(["GROW - Pretrain, 95 % intervals",
                               *(heading for heading, _, _ in METRICS.values())], rows))
    parts.append(markdown(["", "utterances", "WER % of the corpus", "WER over 100 %", "bad wavs",
                           "cut at the cap"], counts))
    return "\n\n".join(parts)


def finish(systems, names, judges, path, how=()):
    """Prints the report with what judged, and writes it."""
    cut = sum(getattr(asr, "truncated", 0) for asr in judges.asr.values())
    notes = [f"{'WER ' * (what in LANGS)}{what} by {Path(name).name}"
             for what, name in names.items()] + list(how)
    notes += [f"{cut} clips were longer than 30 s and lost their end"] * bool(cut)
    text = report(systems) + "\n\n" + "; ".join(notes)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\ntable and records: {path.parent}/", flush=True)


# ---------------------------------------------------------------- entry points

def run_lists(run, world, limit=None):
    """The evaluate stage on config.evaluate.lists, called on all ranks: each system speaks what has
    no wav yet, and all are scored. limit: only the first utterances of each list."""
    c, judged, root = run.config.evaluate, run.config.rewards, run.dir / "eval"
    sets = read_lists(c.lists, c.librispeech_root, limit, world.clean)
    for name, items in sets.items():
        require_prompts(name, items, spoken=True)
    check_judges(judged, sets)
    stages = [stage for stage in ("pretrain", "grow") if run.digest(stage)]
    if not stages:
        run.find("pretrain")                        # raises, and says how to go on
    speak_sets(run, world, sets, stages, root)
    judges = load_judges(judged, sets, run.device,
                         world.judges if "toy" in (judged.asr, judged.speaker) else {})
    run.barrier()       # with another number of ranks than before, others made some of these wavs
    made = {}
    for stage in ("real", *stages):
        for name, items in sets.items():
            paths = ([item.gt_wav or "" for item in items] if stage == "real" else
                     [root / name / stage / f"{item.utt}.wav" for item in items])
            if stage != "real" or all(map(os.path.isfile, paths)):
                out = root / name / f"{stage}.jsonl"
                score_list(items, paths, judges, out, run.rank, run.ranks)
                made.setdefault(stage, {})[name] = out
    run.barrier()
    if run.main:
        systems = {SYSTEMS[stage]: {name: gather(sets[name], out, run.ranks)
                                    for name, out in outs.items()} for stage, outs in made.items()}
        finish(systems, judge_names(judged, sets), judges, root / "table.md",
               (f"NFE {c.nfe}", f"guidance {run.config.sample.cfg_scale:g}", f"seed {c.seed}"))


def score_wavs(folder, lists, judges, librispeech_root="", limit=None):
    """Scores any system's folder/UTT.wav, or folder/SET/UTT.wav; needs no model of ours.
    judges: names of RewardConfig's fields asr, zh_asr, speaker, utmos -> values; at least one."""
    folder = Path(folder)
    if not judges:
        raise ValueError("no judge given; add --asr, --speaker or --utmos")
    if not folder.is_dir():
        raise FileNotFoundError(f"--wavs {folder} is no folder")
    config = RewardConfig(**{"asr": "", "zh_asr": "paraformer" if "asr" in judges else "",
                             "speaker": "", **judges})
    sets = read_lists(lists, librispeech_root, limit)
    paths = {name: [(folder / name if (folder / name).is_dir() else folder) / f"{item.utt}.wav"
                    for item in items] for name, items in sets.items()}
    for name, items in sets.items():
        require(paths[name], f"{name}, wavs")
        if config.speaker:
            require_prompts(name, items, spoken=False)
    check_judges(config, sets)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    judges, records = load_judges(config, sets, device, {}), {}
    for name, items in sets.items():
        out = folder / f"{name}.jsonl"
        score_list(items, paths[name], judges, out)
        records[name] = gather(items, out)
    finish({folder.resolve().name: records}, judge_names(config, sets), judges,
           folder / "table.md")
