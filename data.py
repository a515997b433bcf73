"""Data: manifests, the layouts of public corpora, the paper's filters, RL prompts, batches.

Paper: GROW, "Datasets". Pre-training reads Emilia's English and Chinese parts, about 95K hours. RL
draws 30K prompts in equal parts from three sources: 10K English and 10K Chinese utterances of
Emilia with DNSMOS > 3.2, and 10K of LibriTTS train-clean-100, all of 1.5 to 15 s, each with a
target text sampled from the same data set.

    python data.py check SOURCE [--limit 1000]          what is wrong with it; before any training
    python data.py manifest SOURCE --out train.jsonl    list it once, with durations
    python data.py make-prompts EMILIA/EN EMILIA/ZH LibriTTS/train-clean-100 --out prompts.jsonl

A SOURCE is a manifest, a LibriTTS or LibriSpeech folder, or a folder of Emilia's webdataset tars.
A manifest has one json object a line: `audio`, `text`, `lang` ("en" or "zh"), and optionally
`speaker`, `duration` (seconds), `dnsmos`, `target_text` (RL prompts) and `at` (see Item). Audio
paths are relative to the manifest's folder; "x.tar::member" is a file inside a tar.

Choices where the paper is silent:
 1. The filters are those of RL prompts, as the paper says. Pre-training keeps all DNSMOS and
    0.4-30 s: 95K hours are nearly all that Emilia has in the two languages.
 2. An utterance without a DNSMOS is kept (LibriTTS has none; the paper filters Emilia only).
 3. A target text comes from the kept utterances of the same source and language.
"""

import argparse
import bisect
import functools
import io
import json
import math
import os
import random
import re
import sys
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch

SAMPLE_RATE = 16_000
PATCH_SAMPLES = 1_600       # waveforms that meet the model have whole patches (0.1 s)
SILENCE_PEAK = 1e-3         # -60 dBFS; nothing to learn or to clone below it
LANGS = ("en", "zh")
FORMATS = ("auto", "manifest", "libritts", "librispeech", "emilia")
WINDOW = 8_192              # items that are sorted by length together; the rest stays shuffled
MIN_TRIED = 100             # files before the share of broken ones is judged


class BrokenAudio(ValueError):
    """A file that cannot be used as speech; the message names it and says why."""


@dataclass(frozen=True)
class DataConfig:
    train: str = ""                 # SOURCE of pre-training; "" is the toy world
    prompts: str = ""               # manifest that make-prompts wrote; "" is the toy world
    format: str = "auto"            # of `train`; auto looks at the file names
    langs: tuple = LANGS            # others are left out and counted
    dnsmos_min: float = 3.2         # an RL prompt is above it (paper); P.835 OVRL, 1 to 5
    min_sec: float = 1.5            # of an RL prompt (paper)
    max_sec: float = 15.0           # of an RL prompt (paper)
    train_min_sec: float = 0.4      # of a pre-training utterance, the limits of F5-TTS
    train_max_sec: float = 30.0     # also the longest that Emilia has
    n_prompts: int = 30_000         # RL prompts over all sources (paper)
    max_batch_sec: float = 240.0    # audio seconds, padding included, per rank and step; memory
    max_broken_share: float = 0.01  # of the files tried; more is a fault of the disk or the list
    threads: int = 4                # that read and decode audio ahead of a step
    seed: int = 0                   # of the order of batches and the draw of prompts

    def __post_init__(self):
        if self.format not in FORMATS:
            raise ValueError(f"data.format={self.format!r}; use one of {', '.join(FORMATS)}")
        if not self.langs or set(self.langs) - set(LANGS):
            raise ValueError(f"data.langs={list(self.langs)}; use one or more of {list(LANGS)}")
        for low, high in (("min_sec", "max_sec"), ("train_min_sec", "train_max_sec"),
                          ("train_max_sec", "max_batch_sec")):
            if not 0 < getattr(self, low) <= getattr(self, high):
                raise ValueError(f"data.{low}={getattr(self, low)} and data.{high}="
                                 f"{getattr(self, high)}; wanted 0 < {low} <= {high}")
        for name in ("n_prompts", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)}; wanted at least 1")
        if not 0 <= self.max_broken_share < 1:
            raise ValueError(f"data.max_broken_share={self.max_broken_share}; wanted 0 up to 1")


@dataclass(slots=True)
class Item:
    """One utterance."""
    audio: str                      # path, or "x.tar::member"
    text: str
    lang: str
    speaker: str = ""
    duration: float = 0.0           # seconds; 0 is not known yet
    dnsmos: float = None            # None is not known
    target_text: str = ""           # what an RL prompt's voice is to say
    at: list = None                 # [offset, size] in the tar, so that it need not be searched


# ---------------------------------------------------------------- manifests

def text_lines(path):
    """(line number, text) of each line that is not blank; LF or CRLF, with or without a BOM."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = raw.decode("utf-8-sig").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise ValueError(f"{path} line {number}: {error}; wanted UTF-8") from error
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a text file") from error


def parse_json(text):
    """A json object as a dict. Raises ValueError."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no json ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"wanted a json object, came {text!r}")
    return record


def make_item(record, folder):
    """The dict of a manifest line -> Item, audio relative to folder. Raises ValueError that says
    what was wanted; keys that Item does not have are ignored."""
    known = {k: record[k] for k in Item.__slots__ if record.get(k) is not None}
    for key in ("audio", "text", "lang", "speaker", "target_text"):
        if not isinstance(known.get(key, None if key in ("audio", "text", "lang") else ""), str):
            raise ValueError(f"wanted {key!r} as a string, came {record.get(key)!r}")
    for key in ("duration", "dnsmos"):
        value = known.get(key, 0)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"wanted {key!r} as a number from 0, came {value!r}")
    at = known.get("at", [512, 0])
    if not isinstance(at, list) or [type(v) for v in at] != [int, int] or at[0] < 512 or at[1] < 0:
        raise ValueError(f"wanted 'at' as [offset, size] in bytes, came {at!r}")
    known["audio"] = os.path.join(folder, known["audio"])
    for key in ("speaker", "lang"):                     # millions of lines, few different strings
        known[key] = sys.intern(known.get(key, ""))
    return Item(**known)


def read_manifest(path, targets=False):
    """All Items of a manifest. targets: each line must have a `target_text` (RL prompts).
    Raises ValueError that names the first few bad lines by number."""
    folder, items, bad = os.path.dirname(path), [], []
    for number, line in text_lines(path):
        try:
            items.append(make_item(parse_json(line), folder))
            if targets and not items[-1].target_text.strip():
                raise ValueError("wanted 'target_text'; make RL prompts by "
                                 "python data.py make-prompts")
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    if bad:
        raise ValueError(f"{path}: {len(bad)} bad lines\n  " + "\n  ".join(bad[:5]))
    if not items:
        raise ValueError(f"{path} has no lines; wanted a json object a line")
    return items


def write_manifest(path, items):
    """Paths below the manifest's folder are written relative to it, others absolute, so that a
    corpus and its manifest can move together."""
    folder = os.path.abspath(os.path.dirname(path))
    os.makedirs(folder, exist_ok=True)
    scratch = f"{path}.{os.getpid()}.tmp"
    with open(scratch, "w", encoding="utf-8") as file:
        for item in items:
            record = {key: getattr(item, key) for key in Item.__slots__}
            record["audio"] = os.path.abspath(item.audio)
            if record["audio"].startswith(folder + os.sep):
                record["audio"] = os.path.relpath(record["audio"], folder)
            record = {key: value for key, value in record.items()
                      if value is not None and (value != "" or key == "text")}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(scratch, path)


# ---------------------------------------------------------------- corpora

def detect_format(source):
    """Which of FORMATS a SOURCE is, by its file names."""
    if os.path.isfile(source):
        return "emilia" if str(source).endswith(".tar") else "manifest"
    if not os.path.isdir(source):
        raise ValueError(f"{source} does not exist; give a manifest or a corpus folder")
    for _, _, names in os.walk(source):
        for end, name in ((".tar", "emilia"), (".normalized.txt", "libritts"),
                          (".trans.txt", "librispeech")):
            if any(n.endswith(end) for n in names):
                return name
    raise ValueError(f"{source} has no *.tar (Emilia), *.normalized.txt (LibriTTS) or *.trans.txt "
                     "(LibriSpeech) file; write a manifest of it instead")


def list_folder(folder, format):
    """LibriTTS: SPEAKER/CHAPTER/NAME.wav with NAME.normalized.txt beside it. LibriSpeech:
    SPEAKER/CHAPTER/NAME.flac, with a chapter's texts in one *.trans.txt; these are all upper case,
    and are lower-cased, because a text tokenizer breaks capitals into letters."""
    kind, end = {"libritts": (".wav", ".normalized.txt"), "librispeech": (".flac", ".trans.txt")}[
        format]
    texts = {}                                          # audio path -> text
    for path in sorted(map(str, Path(folder).rglob("*" + end))):
        if format == "libritts":
            texts[path.removesuffix(end) + kind] = " ".join(s.strip() for _, s in text_lines(path))
            continue
        for _, line in text_lines(path):
            name, _, text = line.partition(" ")
            texts[os.path.join(os.path.dirname(path), name + kind)] = text.strip().lower()
    items = [Item(path, text, "en", re.split("[-_]", os.path.basename(path))[0])
             for path, text in texts.items()]
    return items, [f"{path}: no text for it" for path in sorted(
        map(str, Path(folder).rglob("*" + kind))) if path not in texts]


def list_tar(path):
    """One Emilia tar: NAME.mp3 and NAME.json side by side. Walks the headers and reads the json
    files only; nothing is unpacked."""
    items, problems, audio, records = [], [], {}, {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                stem, _, kind = member.name.rpartition(".")
                if member.isfile() and kind == "json":
                    records[stem] = tar.extractfile(member).read()
                elif member.isfile() and kind in ("mp3", "flac", "wav"):
                    audio[stem] = (member.name, [member.offset_data, member.size])
    except (OSError, tarfile.TarError) as error:        # what came before the fault still counts
        problems.append(f"{path}: {error}; a half-downloaded or compressed tar? download it again")
    for stem in sorted(audio.keys() | records.keys()):
        try:
            if stem not in audio or stem not in records:
                raise ValueError(f"no {'json' if stem in audio else 'audio'} file of this name")
            record, (name, at) = parse_json(records[stem]), audio[stem]
            item = make_item(record | {"audio": f"{path}::{name}", "at": at,
                                       "lang": record.get("language")}, "")
            item.text, item.lang = item.text.strip(), sys.intern(item.lang.lower())
            items.append(item)
        except ValueError as error:
            problems.append(f"{path}::{stem}: {error}")
    return items, problems


def list_items(source, format="auto"):
    """Every utterance of a SOURCE in a fixed order, durations filled in from the files' headers
    where they are missing. Returns items, and problems: a list of lines that name what could not
    be used. Raises ValueError for a bad manifest and for a source that holds nothing."""
    format = detect_format(source) if format == "auto" else format
    items, problems = [], []
    if format == "manifest":
        items = read_manifest(source)
    elif format == "emilia":
        tars = [source] if os.path.isfile(source) else sorted(Path(source).rglob("*.tar"))
        for number, tar in enumerate(map(str, tars), 1):
            more, wrong = list_tar(tar)
            items += more
            problems += wrong
            if number % 100 == 0:
                print(f"{source}: {number} of {len(tars)} tars, {len(items)} utterances")
    else:
        items, problems = list_folder(source, format)
    with ThreadPoolExecutor(8) as pool:
        unknown = [item for item in items if not item.duration]
        problems += [message for message in pool.map(fill_duration, unknown) if message]
    items = [item for item in items if item.duration]
    if not items:
        raise ValueError(f"{source} ({format}) holds no usable utterance: "
                         f"{'; '.join(problems[:3]) or 'no file of that layout in it'}")
    return items, problems


def fill_duration(item):
    """Sets item.duration from the header; returns what went wrong, or None."""
    try:
        file = io.BytesIO(read_bytes(item)) if "::" in item.audio else item.audio
        item.duration = soundfile.info(file).duration
        return None if item.duration > 0 else f"{item.audio}: empty"
    except BrokenAudio as error:
        return str(error)
    except (soundfile.LibsndfileError, OSError):
        return f"{item.audio}: {'unreadable' if os.path.exists(item.audio) else 'missing'}"


def has_words(text):
    """Whether anything is left once punctuation is deleted (rewards.normalize deletes no letter
    or digit)."""
    return any(c.isalnum() for c in text)


def keep(items, langs, min_sec, max_sec, dnsmos_min=None):
    """The paper's filters: dnsmos > dnsmos_min (kept where unknown), min_sec <= duration <=
    max_sec; a language of langs and a text with words. Returns kept items, Counter of reasons."""
    kept, dropped = [], Counter()
    for item in items:
        if item.lang not in langs:
            dropped[f"language {item.lang!r}"] += 1
        elif not has_words(item.text):
            dropped["empty text"] += 1
        elif item.duration < min_sec:
            dropped[f"under {min_sec:g} s"] += 1
        elif item.duration > max_sec:
            dropped[f"over {max_sec:g} s"] += 1
        elif dnsmos_min is not None and item.dnsmos is not None and item.dnsmos <= dnsmos_min:
            dropped[f"DNSMOS up to {dnsmos_min:g}"] += 1
        else:
            kept.append(item)
    return kept, dropped


def print_kept(source, kept, dropped, problems):
    total = len(kept) + dropped.total()
    reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(dropped.items())) or "none"
    print(f"{source}: kept {len(kept)} of {total} utterances, "
          f"{sum(i.duration for i in kept) / 3600:.2f} h; left out: {reasons}", flush=True)
    for problem in problems[:3]:
        print(f"  note: {problem}")
    if len(problems) > 3:
        print(f"  note: {len(problems) - 3} more such; python data.py check {source}")


def training_items(config):
    """The utterances of pre-training. Raises ValueError when the filters leave none."""
    items, problems = list_items(config.train, config.format)
    kept, dropped = keep(items, config.langs, config.train_min_sec, config.train_max_sec)
    print_kept(config.train, kept, dropped, problems)
    if not kept:
        raise ValueError(f"the filters leave nothing of {config.train}: {dict(dropped)}")
    return kept


# ---------------------------------------------------------------- audio

@functools.lru_cache(maxsize=256)
def open_tar(path):
    return open(path, "rb")             # closed when it falls out of the cache and nobody reads


@functools.lru_cache(maxsize=8)
def tar_index(path):
    """name -> (offset, size) of a tar's members, for items that do not know where they lie."""
    with tarfile.open(path, "r:") as tar:
        return {m.name: (m.offset_data, m.size) for m in tar if m.isfile()}


def read_bytes(item):
    """The encoded file. pread has no file position, so threads may share one handle."""
    path, _, member = item.audio.partition("::")
    try:
        if not member:
            return Path(path).read_bytes()
        tar, at = open_tar(path).fileno(), item.at
        # Another tar may lie there now: the member's name stands 512 bytes before its data.
        if not at or os.pread(tar, 100, at[0] - 512).rstrip(b"\0") != member.encode():
            at = tar_index(path)[member]
        data = os.pread(tar, at[1], at[0])
    except KeyError as error:
        raise BrokenAudio(f"{item.audio}: no such member in this tar") from error
    except (OSError, tarfile.TarError) as error:
        what = f"unreadable ({error})" if os.path.exists(path) else "missing"
        raise BrokenAudio(f"{item.audio}: {what}") from error
    if len(data) < at[1]:
        raise BrokenAudio(f"{item.audio}: the tar ends in it; download the tar again")
    return data


def decode(item):
    """Returns (S,) float32 at 16 kHz, a whole number of patches; the file's rate; its channels.
    Raises BrokenAudio that names the file."""
    data = read_bytes(item)
    riff = int.from_bytes(data[4:8], "little")          # 0 or all ones: written as a stream
    if data[:4] == b"RIFF" and len(data) < riff + 8 < 0xFFFF_FF00:
        raise BrokenAudio(f"{item.audio}: {len(data)} of {riff + 8} bytes; download it again")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, said = file.samplerate, file.frames
            wav = file.read(dtype="float32", always_2d=True)        # (S, channels)
    except soundfile.LibsndfileError as error:
        raise BrokenAudio(f"{item.audio}: no readable audio ({error.error_string})") from error
    sec, channels = len(wav) / rate, wav.shape[1]
    if len(wav) == 0:
        raise BrokenAudio(f"{item.audio}: empty")
    if len(wav) < 0.9 * said:                   # an mp3 that was cut still says its full length
        raise BrokenAudio(f"{item.audio}: {sec:.2f} of {said / rate:.2f} s; download it again")
    if item.duration and abs(sec - item.duration) > 0.1 + 0.1 * item.duration:
        raise BrokenAudio(f"{item.audio}: lasts {sec:.2f} s, but the list says {item.duration:.2f} "
                          "s; list the source again")           # batches trust the list
    wav = wav.mean(axis=1)
    if not np.isfinite(wav).all():
        raise BrokenAudio(f"{item.audio}: NaN or infinite samples")
    if rate != SAMPLE_RATE:
        wav = soxr.resample(wav, rate, SAMPLE_RATE)
    if len(wav) < PATCH_SAMPLES:
        raise BrokenAudio(f"{item.audio}: lasts {sec:.3f} s; wanted a patch of 0.1 s at least")
    if np.abs(wav).max() < SILENCE_PEAK:
        raise BrokenAudio(f"{item.audio}: silent")
    wav = wav[len(wav) % PATCH_SAMPLES:]        # at the start: the end is what goes on in a prompt
    return torch.from_numpy(wav.copy()), rate, channels


def read_audio(item):
    """(S,) float32 at 16 kHz mono, cropped at its start to a multiple of 1,600 samples.
    Raises BrokenAudio."""
    return decode(item)[0]


# ---------------------------------------------------------------- RL prompts

def draw_prompts(sources, n, seed, langs=LANGS):
    """The paper's balanced prompt set. sources: list of lists of Items, already filtered.
    Each (source, language) that has items is one part and gives n / parts prompts, drawn without
    replacement; the target text is another item's of the part, never the same text. A function
    of seed and the parts, not of the order of their lines.
    Raises ValueError if n does not divide over the parts or a part is too small."""
    parts = [(f"{number}-{lang}", sorted((i for i in items if i.lang == lang),
                                         key=lambda i: (i.audio, i.text)))
             for number, items in enumerate(sources, 1) for lang in langs]
    parts = [(name, pool) for name, pool in parts if pool]
    if not parts:
        raise ValueError("no source has an utterance left; see the counts above")
    share, rest = divmod(n, len(parts))
    if rest or not share:
        raise ValueError(f"n={n} does not divide over {len(parts)} parts (source and language); "
                         f"use {max(share, 1) * len(parts)} or {(share + 1) * len(parts)}")
    out = []
    for name, pool in parts:
        if len(pool) < share or len({i.text for i in pool}) < 2:
            raise ValueError(f"source {name} has {len(pool)} utterances with "
                             f"{len({i.text for i in pool})} different texts left and is to give "
                             f"{share}; lower n to {min(len(p) for _, p in parts) * len(parts)} "
                             "or add data")
        rng = random.Random(f"{seed}-prompts-{name}")
        for item in rng.sample(pool, share):
            target = rng.choice(pool)
            while target.text == item.text:
                target = rng.choice(pool)
            out.append(replace(item, target_text=target.text))
    return out


def make_prompts(sources, n, seed, config=DataConfig()):
    """List, filter and draw. sources: paths."""
    if len(set(map(os.path.abspath, sources))) < len(sources):
        raise ValueError("a source is named twice; name each once")
    pools = []
    for source in sources:
        items, problems = list_items(source)
        kept, dropped = keep(items, config.langs, config.min_sec, config.max_sec,
                             config.dnsmos_min)
        print_kept(source, kept, dropped, problems)
        if not kept:
            raise ValueError(f"the filters leave nothing of {source}: {dict(dropped)}")
        pools.append(kept)
    prompts = draw_prompts(pools, n, seed, config.langs)
    length = np.percentile([len(p.target_text) for p in prompts], (0, 50, 100)).astype(int)
    print(f"{len(prompts)} prompts ({dict(Counter(p.lang for p in prompts))}); target texts of "
          f"{length[0]} to {length[2]} characters, median {length[1]}")
    return prompts


# ---------------------------------------------------------------- batches

def plan_epoch(durations, max_batch_sec, world, seed, epoch):
    """One pass over the data: a list of steps, each a list of `world` lists of item indices.

    The items are shuffled by (seed, epoch), sorted by length inside windows of WINDOW items and
    cut into batches whose seconds stay within max_batch_sec with padding (count x longest).
    Batches of like length make one step, so that no rank waits long; the steps are shuffled. Each
    item comes once: where the batches do not divide over the ranks, the fullest are halved. (Only
    where no batch has two items left to halve, up to world - 1 items sit the epoch out.)
    Raises ValueError if an item is longer than max_batch_sec or there are fewer items than ranks.
    """
    durations = np.asarray(durations, dtype=np.float64)
    if len(durations) < world:
        raise ValueError(f"{len(durations)} items cannot feed {world} ranks; add data")
    if durations.max() > max_batch_sec:
        i = int(durations.argmax())
        raise ValueError(f"item {i} lasts {durations[i]:.2f} s, longer than max_batch_sec="
                         f"{max_batch_sec:g}; raise it, or lower train_max_sec")
    rng = np.random.default_rng([seed, epoch])
    order, batches = rng.permutation(len(durations)), []
    for start in range(0, len(order), WINDOW):
        window = order[start:start + WINDOW]
        window = window[np.argsort(durations[window], kind="stable")]
        seconds, indices, first = durations[window].tolist(), window.tolist(), 0
        for last, longest in enumerate(seconds):
            if (last + 1 - first) * longest > max_batch_sec:
                batches.append(indices[first:last])
                first = last
        batches.append(indices[first:])
    while len(batches) % world:
        k = max(range(len(batches)), key=lambda k: len(batches[k]))
        if len(batches[k]) == 1:
            batches = batches[:len(batches) // world * world]
            break
        batches[k:k + 1] = [batches[k][::2], batches[k][1::2]]
    steps = [batches[k:k + world] for k in range(0, len(batches), world)]
    return [steps[k] for k in rng.permutation(len(steps))]


class Batches:
    """The endless sequence of steps. batch(step) depends on (durations, max_batch_sec, world,
    seed, step) alone, so a run resumes exactly from its step number."""

    def __init__(self, durations, max_batch_sec, world, seed):
        self.args = (durations, max_batch_sec, world, seed)
        self.starts = [0]               # first step of each epoch planned so far, and of the next
        self.epoch, self.plan = -1, []  # the last plan; epochs differ a little in their steps

    def _load(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.plan = epoch, plan_epoch(*self.args, epoch)

    def batch(self, step):
        """List of `world` lists of item indices."""
        while self.starts[-1] <= step:
            self._load(len(self.starts) - 1)
            self.starts.append(self.starts[-1] + len(self.plan))
        epoch = bisect.bisect_right(self.starts, step) - 1
        self._load(epoch)
        return self.plan[step - self.starts[epoch]]


class Loader:
    """Reads audio in threads, the next step's while this one trains. A broken file is skipped,
    counted and named once; `broken` is {index: message}."""

    def __init__(self, items, max_broken_share=0.01, threads=4):
        self.items, self.max_broken_share = items, max_broken_share
        self.pool, self.pending = ThreadPoolExecutor(threads), {}
        self.tried, self.failed, self.broken = 0, 0, {}

    def load(self, indices, then=()):
        """List of (index, (S,) waveform) in the order of indices, without broken ones: it may be
        empty. then: the indices of the next call, read in the background.
        Raises RuntimeError once more than max_broken_share of all files tried were broken."""
        self.pending = {i: self.pending.get(i) or self.pool.submit(read_audio, self.items[i])
                        for i in dict.fromkeys((*indices, *then))}
        out = []
        for i in indices:
            self.tried += 1
            try:
                out.append((i, self.pending[i].result()))
            except BrokenAudio as error:
                self.failed += 1
                if i not in self.broken:
                    print(f"note: skipped {error}", flush=True)
                self.broken[i] = str(error)
        for i in set(indices) - set(then):
            del self.pending[i]
        if self.tried >= MIN_TRIED and self.failed > self.max_broken_share * self.tried:
            raise RuntimeError(
                f"{self.failed} of {self.tried} audio files were broken, more than "
                f"max_broken_share={self.max_broken_share:g}; run python data.py check. First:\n  "
                + "\n  ".join(list(self.broken.values())[:5]))
        return out

    def close(self):
        self.pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------- check and the command line

def check(source, limit=None, config=DataConfig()):
    """Prints what is wrong with a SOURCE and a table of what it holds; returns how much is broken.
    limit: decode that many files only, spread evenly; texts are always all looked at."""
    items, problems = list_items(source)
    broken = [("missing or unreadable", p) for p in problems]
    broken += [("unknown language", f"{i.audio}: {i.lang!r}; wanted one of {LANGS}")
               for i in items if i.lang not in LANGS]
    broken += [("text without words", f"{i.audio}: {i.text!r} {i.target_text!r}") for i in items
               if not has_words(i.text) or not has_words(i.target_text or i.text)]
    broken += [("duplicate", f"{audio}: {n} times") for audio, n in
               Counter(i.audio for i in items).items() if n > 1]
    n = min(limit or len(items), len(items))
    some, notes = [items[k * len(items) // n] for k in range(n)], Counter()

    def decode_or_message(item):
        try:
            return decode(item)[1:]
        except BrokenAudio as error:
            return str(error)

    with ThreadPoolExecutor(config.threads) as pool:
        for result in pool.map(decode_or_message, some):
            if isinstance(result, str):
                broken.append(("missing or unreadable", result))
                continue
            notes[f"at {result[0]} Hz, resampled to {SAMPLE_RATE}"] += result[0] != SAMPLE_RATE
            notes["of several channels; their mean is used"] += result[1] > 1
    for low, high, use in ((config.min_sec, config.max_sec, "RL prompts"),
                           (config.train_min_sec, config.train_max_sec, "pre-training")):
        notes[f"outside {low:g}-{high:g} s, left out of {use}"] += sum(
            not low <= item.duration <= high for item in items)
    notes[f"of DNSMOS up to {config.dnsmos_min:g}, left out of RL prompts"] += sum(
        item.dnsmos is not None and item.dnsmos <= config.dnsmos_min for item in items)
    print("language  utterances     hours  speakers  shortest   longest")
    for lang in sorted({item.lang for item in items}):
        part = [item for item in items if item.lang == lang]
        sec, speakers = [i.duration for i in part], {i.speaker for i in part} - {""}
        print(f"{lang:8}{len(part):12}{sum(sec) / 3600:10.2f}{len(speakers):10}"
              f"{min(sec):8.2f} s{max(sec):8.2f} s")
    for what, n in notes.items():
        if n:
            print(f"note: {n} {what}")
    for kind, n in Counter(kind for kind, _ in broken).items():
        print(f"broken: {n} x {kind}")
        for message in [m for k, m in broken if k == kind][:5]:
            print(f"  {message}")
    print(f"decoded {len(some)} of {len(items)} files; {len(broken) or 'nothing'} broken")
    return len(broken)


def main(words=None):
    """Returns the exit status: 1 when something is broken."""
    defaults = DataConfig()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("check", help="report what is broken in a source")
    p.add_argument("source")
    p.add_argument("--limit", type=int, help="decode this many files only")
    p = commands.add_parser("manifest", help="list a source once, with durations")
    p.add_argument("source")
    p.add_argument("--out", required=True)
    p = commands.add_parser("make-prompts", help="draw the RL prompt set")
    p.add_argument("sources", nargs="+", metavar="source")
    p.add_argument("--n", type=int, default=defaults.n_prompts)
    p.add_argument("--seed", type=int, default=defaults.seed)
    p.add_argument("--out", required=True)
    args = parser.parse_args(words)
    try:
        if args.command != "check":
            os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)    # fails before the work
        if args.command == "check":
            if args.limit is not None and args.limit < 1:
                raise ValueError(f"--limit {args.limit}; wanted at least 1")
            return int(check(args.source, args.limit) > 0)
        if args.command == "manifest":
            items, problems = list_items(args.source)
            print_kept(args.source, items, Counter(), problems)
        else:
            items = make_prompts(args.sources, args.n, args.seed)
        write_manifest(args.out, items)
        print(f"wrote {args.out}")
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
