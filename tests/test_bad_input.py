"""Bad input: each row is a command line as a user would give it and the one line that it answers.

A row must end in `error: ...` and status 2 (checks.run_main), which holds only for what a `raise`
of this repository or the disk said: a KeyError, a library's traceback or a slow step fails the row.
{name} in a command is a file or folder that MAKERS makes; {new} is a folder that is not there yet.
"""
import importlib
import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import yaml
from safetensors.torch import save_file

import checks
import judges
import model
import run
import sample
import toy
import toy_judges
import vae
from config import load_config
from worlds import RealWorld

ROOT = Path(__file__).resolve().parents[1]
RATE = 16_000
SLOW = ((toy, "_speak_alone"), (toy.ToyVAE, "encode"), (vae.SemanticVAE, "encode"),
        (toy_judges.CTCRecognizer, "forward"), (model.DiTAR, "lm_inputs"),
        (model.DiTAR, "from_qwen3"), (run.Run, "fit"), (judges.Whisper, "transcribe"),
        (judges.SpeakerVerifier, "__init__"), (judges.UTMOS, "__init__"))


# ---- what is handed in -------------------------------------------------------------------------

def hum(seconds, rate=RATE, loud=0.1):
    return loud * np.sin(2 * np.pi * 150 * np.arange(round(seconds * rate)) / rate)


def wav(samples, rate=RATE, **how):
    return lambda path: soundfile.write(path, samples, rate, **how)


def text(content):
    return lambda path: path.write_bytes(content if isinstance(content, bytes)
                                         else content.encode())


def lines(*rows):
    return text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def folder(**files):
    """A folder with files whose names have . for __."""
    def make(path):
        path.mkdir()
        for name, maker in files.items():
            maker(path / name.replace("__", "."))
    return make


def micro(**values):
    """The config.json of a run of micro.yaml."""
    return text(json.dumps(asdict(load_config(str(ROOT / "tests/micro.yaml"))) | values))


def tensors(**meta):
    return lambda path: save_file({"a": torch.ones(3)}, path, metadata={
        k: v if isinstance(v, str) else json.dumps(v) for k, v in meta.items()})


def cut(maker, size):
    def make(path):
        maker(path)
        path.write_bytes(path.read_bytes()[:size])
    return make


def copy(source):
    return lambda path: path.write_bytes(source.read_bytes())


def real(path):
    """The config of a small real world in which nothing is missing, up to the weights' contents."""
    item = {"audio": "a.wav", "text": "we ran", "lang": "en", "duration": 1.0}
    for name, rows in (("train.jsonl", [item]), ("prompts.jsonl", [item | {"target_text": "hi"}])):
        lines(*rows)(path.with_name(name))
    for name in ("v.pth", "s.pth", "lm"):
        text("")(path.with_name(name))
    path.write_text(yaml.safe_dump({
        "world": "real", "stages": ["vae", "pretrain", "grow"],
        "real": {"vae": str(path.with_name("v.pth")), "lm": str(path.with_name("lm"))},
        "data": {"train": str(path.with_name("train.jsonl")),
                 "prompts": str(path.with_name("prompts.jsonl"))},
        "rewards": {"asr": "org/whisper", "speaker": str(path.with_name("s.pth"))}}))


ITEM = {"audio": "a.wav", "text": "we ran", "lang": "en"}
MAKERS = {
    "micro.yaml": copy(ROOT / "tests" / "micro.yaml"), "real.yaml": real,
    "torn.yaml": text("grow: {lr: 1e-4\nseed: 3"), "list.yaml": text("- seed: 3\n- seed: 4"),
    "word.yaml": text("seed"), "number.yaml": text("1: 2"), "bytes.yaml": text(b"\xff\xfe\x00"),
    "good.wav": wav(hum(1)), "empty.wav": wav(hum(0)), "zero.wav": text(b""),
    "one.wav": wav(hum(1)[5:6]), "short.wav": wav(hum(0.3)),
    "long.wav": wav(hum(600, 8_000), 8_000),
    "silent.wav": wav(0 * hum(1)), "text.wav": text("this is no audio"), "folder.wav": folder(),
    "nan.wav": wav(np.where(np.arange(RATE) == 9, np.nan, hum(1)), subtype="FLOAT"),
    "inf.wav": wav(np.where(np.arange(RATE) == 9, np.inf, hum(1)), subtype="FLOAT"),
    "integers.wav": wav(32_768 * hum(1), subtype="FLOAT"), "cut.wav": cut(wav(hum(1)), 30),
    "empty-dir": folder(), "run": folder(config__json=micro()),
    "torn-json": folder(config__json=text('{"seed": 3')),
    "list-json": folder(config__json=text("[]")),
    "new-json": folder(config__json=micro(flavour=3)),
    "half-json": folder(config__json=micro(pretrain=None)),
    "cut-run": folder(config__json=micro(), grow__safetensors=cut(tensors(config={}), 40)),
    "foreign-run": folder(config__json=micro(), grow__safetensors=tensors(made="elsewhere")),
    "plain-run": folder(config__json=micro(), grow__safetensors=tensors()),
    "vae-run": folder(config__json=micro(), grow__safetensors=tensors(config={"vae": {}})),
    "odd-run": folder(config__json=micro(), grow__safetensors=tensors(config={"model": asdict(
        load_config(str(ROOT / "tests/micro.yaml")).model)})),
    "other-run": folder(vae__safetensors=tensors(config={"vae": {"dim": 64}})),
    "eval-run": folder(eval_after__jsonl=lines({"ref": "a"}, '{"ref": "b')),
    "words.pth": text("hello"), "cut.pth": cut(lambda path: torch.save({"a": torch.ones(99)}, path),
                                               200),
    "odd.pth": lambda path: torch.save({"a": torch.ones(9)}, path),
    "list.pth": lambda path: torch.save([1, 2], path),
    "cut.safetensors": cut(tensors(), 20), "odd.safetensors": tensors(),
    "qwen": folder(config__json=text('{"model_type": "qwen3"}')),
    "nothing.jsonl": text(""), "torn.jsonl": lines(ITEM, '{"audio": "b.wav'),
    "field.jsonl": lines(ITEM, {"audio": "b.wav", "lang": "en"}),
    "type.jsonl": lines(ITEM | {"text": 7}), "time.jsonl": lines(ITEM | {"duration": "long"}),
    "array.jsonl": lines("[1, 2]"), "gone.jsonl": lines(ITEM | {"audio": "gone.wav"}),
    "latin.jsonl": text('{"audio": "a.wav", "text": "na\u00efve", "lang": "en"}'.encode("latin-1")),
    "plain.jsonl": lines(ITEM | {"duration": 1.0}),
    "bad.lst": text("u1|some text|p.wav|to say\nu2|\n"),
    "twice.lst": text("u1|text\nu1|text\n"), "silent.lst": text("u1|p|p.wav|...\n"),
    "prompts.lst": text("u1|some text|gone.wav|to say\n"), "none.lst": text("\n"),
}

TRAIN = "train.py --config {micro.yaml} out_dir={new} "
REAL = "train.py --config {real.yaml} out_dir={new} "
SAY = "sample.py --ckpt {run} --out {new}.wav "
SPEAK = SAY + "--prompt {good.wav} --text "
LOAD = "sample.py --out {new}.wav --prompt {good.wav} --text 'we ran' --ckpt "
VOICE = SAY + "--text 'we ran' --prompt "
JUDGE = "rewards.py {good.wav} "
LISTS = "evaluate.py --wavs {empty-dir} --speaker s.pth --lists "

# name, command, what it answers
ROWS = [row for table in (
    (   # ---- the config file
        ("no config file", "train.py --config none.yaml",
         "no config file 'none.yaml'; toy.yaml is the one"),
        ("a folder as config", "train.py --config {empty-dir}", "no config file .*empty-dir"),
        ("yaml that does not parse", "train.py --config {torn.yaml}",
         "torn.yaml is no yaml: .*line"),
        ("yaml that is a list", "train.py --config {list.yaml}",
         "list.yaml holds a list; wanted"),
        ("yaml that is a word", "train.py --config {word.yaml}", "word.yaml holds a str; wanted"),
        ("a key that is a number", "train.py --config {number.yaml}", "unknown config key '1'"),
        ("a config that is no text", "train.py --config {bytes.yaml}", "bytes.yaml is no yaml"),
        ("an unknown key with a near one", TRAIN + "grow.lrr=1",
         "'grow.lrr'; did you mean grow.lr"),
        ("an unknown key", TRAIN + "zzz=1", "'zzz'; known are out_dir, .*seed, .*grow"),
        ("an override without =", TRAIN + "grow.lr",
         "'grow.lr' is not of the form section.field=value"),
        ("an override that is no yaml", TRAIN + "grow.lr=[", "override 'grow.lr=\\[' is no yaml"),
        ("a section as a value", TRAIN + "grow=3",
         "grow is a section; set its fields, e.g. grow.steps="),
        # ---- types and numbers
        ("a word for a number", TRAIN + "grow.steps=many",
         "grow.steps='many' is a str; wanted a int"),
        ("half a step", TRAIN + "grow.steps=1.5", "grow.steps=1.5 is a float; wanted a int"),
        ("one beta", TRAIN + "grow.betas=[0.9]", "grow.betas=.* has 1 numbers; wanted 2 like"),
        ("a word for a beta", TRAIN + "grow.betas=[0.9,x]",
         r"grow.betas\[1\]='x' is a str; wanted a float"),
        ("a beta above 1", TRAIN + "grow.betas=0.9,1.5",
         "grow.betas=.*1.5.*; wanted 0 to 1, and less than 1"),
        ("a mean that never moves", TRAIN + "grow.ema=1",
         "grow.ema=1.0; wanted 0 to 1, and less than 1"),
        ("a rate that is nan", TRAIN + "grow.lr=.nan",
         "grow.lr=nan; wanted a finite number like"),
        ("a rate without end", TRAIN + "pretrain.lr=inf",
         "pretrain.lr=inf; wanted a finite number"),
        ("a negative rate", TRAIN + "grow.lr=-1e-4", "grow.lr=-0.0001; wanted 0 or more"),
        ("a negative anchor", TRAIN + "grow.beta_w2=-1", "grow.beta_w2=-1.0; wanted 0 or more"),
        ("no clip at all", TRAIN + "grow.grad_clip=0", "grow.grad_clip=0.0; wanted more than 0"),
        ("negative steps", TRAIN + "grow.steps=-1", "grow.steps=-1; wanted 1 or more"),
        ("no pre-training steps", TRAIN + "pretrain.steps=0",
         "pretrain.steps=0; wanted 1 or more"),
        ("a share above 1", TRAIN + "pretrain.single_share=2", "single_share=2.0; wanted 0 to 1"),
        ("negative NFE", TRAIN + "sample.nfe=-3",
         "sample.nfe=-3; wanted at least one Euler step"),
        ("time that runs back", TRAIN + "sample.sway=-2",
         "sample.sway=-2.0; wanted -1 .* to 1.75"),
        ("no evaluation steps", TRAIN + "evaluate.nfe=0", "evaluate.nfe=0; wanted 1 or more"),
        ("an unknown split", TRAIN + "evaluate.split=test", "split='test'; wanted eval or tune"),
        ("a corpus of one", TRAIN + "corpus.eval=1", "corpus.eval=1; wanted 2 or more"),
        ("speech too fast", TRAIN + "corpus.rate_wpm=9000",
         "rate_wpm=9000; eSpeak NG speaks 80 to 450"),
        ("no checkpoints", TRAIN + "keep_last=0", "keep_last=0; wanted 1 or more checkpoints"),
        ("a negative pause", TRAIN + "save_every_sec=-1",
         "save_every_sec=-1.0; wanted 0 or more"),
        # ---- what does not fit together
        ("a group of one", TRAIN + "grow.group_size=1",
         "group_size=1; one rollout has no baseline"),
        ("prompts over ranks", "WORLD_SIZE=4 " + TRAIN + "grow.prompts_per_step=6 stages=grow",
         "grow.prompts_per_step=6 does not divide over 4 ranks; use 8"),
        ("heads that do not share", TRAIN + "model.lm.kv_heads=4",
         "model.lm: heads=2, kv_heads=4, .*wanted heads a multiple of kv_heads"),
        ("an odd head", TRAIN + "model.encoder.head_dim=7",
         "model.encoder: .*head_dim=7; .*even"),
        ("patches off the audio", TRAIN + "model.patch_frames=3",
         "patch_frames=3; .*use 4, 2 or 1"),
        ("latents of two widths", TRAIN + "model.latent_dim=8",
         "model.latent_dim=8 and vae.latent_dim=16; .*set both to one number"),
        ("letters without a number", TRAIN + "model.vocab_size=5",
         "alphabet has 27 characters, use 27"),
        ("no stages", TRAIN + "stages=[]", "stages is empty; name some of corpus, vae"),
        ("a stage twice", TRAIN + "stages=grow,grow", "each comes once, .*use stages=grow"),
        ("stages in no order", TRAIN + "stages=grow,pretrain", "use stages=pretrain,grow"),
        ("an unknown stage", TRAIN + "stages=grwo", "unknown stage 'grwo'; .*did you mean grow"),
        ("a stage without its start", TRAIN + "stages=grow",
         "no vae.safetensors in .*; run stages=vae first"),
        ("a profile of nothing", TRAIN + "--profile",
         "no vae.safetensors in .*; run stages=vae first"),
        ("an unknown reward", TRAIN + "rewards.weights.mos=1",
         r"names \['mos'\]; the streams are"),
        ("nothing to reward", TRAIN + "'rewards.weights={wer: 0, sim: 0}'",
         "leave nothing to reward"),
        ("a toy judge of Chinese", TRAIN + "rewards.lang=zh rewards.zh_asr=whisper",
         "rewards.lang='zh', but the toy world speaks English: use en"),
        ("an unknown language", TRAIN + "rewards.lang=de",
         "lang='de' is unknown; use one of en, zh"),
        ("a judge that is missing", TRAIN + "rewards.asr=nowhere",
         "asr='nowhere' is no folder here and no hub id"),
        ("a GPU where there is none", TRAIN + "device=cuda",
         "device='cuda', but PyTorch finds no CUDA GPU here; use device=auto"),
        ("an unknown device", TRAIN + "device=abacus",
         "device='abacus'; wanted auto, cpu or cuda"),
        ("a result of another config",
         "train.py --config {micro.yaml} out_dir={other-run} stages=vae",
         "vae.safetensors was made with another vae section: .*dim 64 there, 192 now"),
        # ---- the real world
        ("no VAE", REAL + "real.vae=none.pth",
         "real.vae='none.pth' is not there; wanted Semantic-VAE"),
        ("no LM", REAL + "real.lm=none", "real.lm='none' is no folder here and no hub id"),
        ("no corpus", REAL + "data.train=none",
         "data.train='none' is not there; wanted a manifest"),
        ("no prompts", REAL + "data.prompts=none",
         "data.prompts='none' is not there; wanted what data.py make-prompts wrote"),
        ("a bad line in the corpus", REAL + "data.train={torn.jsonl}",
         "torn.jsonl: 1 bad lines line 2: no json"),
        ("prompts without a text to say", REAL + "data.prompts={plain.jsonl}",
         "line 1: wanted 'target_text'; make RL prompts by"),
        ("an unknown language of data", REAL + "data.langs=[de]",
         r"data.langs=\['de'\]; use one or more of"),
        ("toy judges of real speech", REAL + "rewards.asr=toy",
         "asr='toy' .*world's English only"),
        ("a toy voice of real speech", REAL + "rewards.speaker=toy",
         "speaker='toy' serves the toy world only; name wavlm_large"),
        ("real judges to train", REAL + "stages=vae,judges,grow",
         "real judges are not trained here"),
        ("no test lists", REAL + "stages=vae,grow,evaluate",
         "evaluate.lists is empty; name a test set"),
        ("a bad line in a test list", REAL + "stages=vae,pretrain,grow,evaluate "
         "'evaluate.lists={x-en: {bad.lst}}'", "bad.lst line 2: wanted 2 to 5 fields"),
    ), (  # ---- manifests and lists
        ("no manifest", "data.py check {new}",
         "does not exist; give a manifest or a corpus folder"),
        ("an empty manifest", "data.py check {nothing.jsonl}",
         "nothing.jsonl has no lines; wanted a json object a line"),
        ("a line that is no json", "data.py check {torn.jsonl}",
         "torn.jsonl: .* line 2: no json"),
        ("a line that is a list", "data.py check {array.jsonl}",
         "line 1: wanted a json object, came"),
        ("a missing field", "data.py check {field.jsonl}",
         "line 2: wanted 'text' as a string, came None"),
        ("a field of another type", "data.py check {type.jsonl}",
         "line 1: wanted 'text' as a string, came 7"),
        ("a duration that is a word", "data.py check {time.jsonl}",
         "wanted 'duration' as a number from 0"),
        ("a manifest in another code", "data.py check {latin.jsonl}",
         "latin.jsonl line 1: .*wanted UTF-8"),
        ("only missing audio", "data.py check {gone.jsonl}",
         "no usable utterance: .*gone.wav: missing"),
        ("a folder of nothing", "data.py check {empty-dir}",
         r"no \*.tar .*; write a manifest of it instead"),
        ("no files to decode", "data.py check {plain.jsonl} --limit 0",
         "--limit 0; wanted at least 1"),
        ("a source twice", "data.py make-prompts {plain.jsonl} {plain.jsonl} --out {new}",
         "named twice"),
        ("no such list", LISTS + "x-en=none.lst", "x-en: no list file none.lst"),
        ("a list without a name", LISTS + "{bad.lst}", "is not of the form NAME=FILE"),
        ("a list of no language", LISTS + "x-de={bad.lst}",
         "unknown test set 'x-de'; wanted seedtts-en, seedtts-zh"),
        ("a bad line in a list", LISTS + "x-en={bad.lst}",
         "bad.lst line 2: wanted 2 to 5 fields"),
        ("an utterance twice", LISTS + "x-en={twice.lst}", r"duplicate utterances \['u1'\]"),
        ("a list of nothing", LISTS + "x-en={none.lst}", "none.lst has no lines"),
        ("a text without words", LISTS + "x-en={silent.lst}",
         "utterance u1: reference text '...' is empty"),
        ("wavs that are missing", LISTS + "x-en={prompts.lst}",
         "x-en, wavs: 1 of 1 files are missing"),
        ("no folder of wavs", "evaluate.py --wavs {new} --asr x --lists x-en={bad.lst}",
         "is no folder"),
        ("a run without records", "evaluate.py --ckpt {run}",
         "no .*eval_after.jsonl; run the evaluate stage of that run first"),
        ("records that were cut", "evaluate.py --ckpt {eval-run}",
         "eval_after.jsonl line 2 is no json .*was it cut off"),
        ("neither run nor wavs", "evaluate.py",
         "give either --ckpt, output folders of train.py, or"),
    ), [  # ---- recordings, to each of the three commands that read one
        (f"{what} for {command.split()[0]}", command.replace("WAV", f"{{{file}}}"),
         f"{file}.*{answer}")
        for command in (VOICE + "WAV", "rewards.py WAV --asr x", "vae.py {odd.pth} WAV {new}.wav")
        for what, file, answer in (
            ("no samples", "empty.wav", "is empty; record it again"),
            ("no bytes", "zero.wav", "no readable audio file"),
            ("NaN", "nan.wav", "holds NaN or infinite samples; export it again"),
            ("infinity", "inf.wav", "holds NaN or infinite samples; export it again"),
            ("integers as floats", "integers.wav", "samples up to 3277; wanted -1 to 1: .*divide"),
            ("no audio", "text.wav", "no readable audio file"),
            ("a torn header", "cut.wav", "no readable audio file|is empty"),
            ("a folder", "folder.wav", "no readable audio file"),
            ("silence", "silent.wav", "is silent"),
            ("ten minutes", "long.wav", "lasts 600 s; wanted [36]0 s at most: cut a passage"))
    ], (  # ---- and the rest of their words
        ("no recording", VOICE + "none.wav", "none.wav: no readable audio file"),
        ("a short prompt", VOICE + "{short.wav}",
         r"lasts 0\.30 s; a voice needs 0\.5 s at least"),
        ("one sample as a prompt", VOICE + "{one.wav}",
         r"lasts 0\.00 s; a voice needs 0\.5 s at least"),
        ("one sample to judge", "rewards.py {one.wav} --asr x",
         "is silent or shorter than 45 ms"),
        ("an empty text", SPEAK + "''", "the text is empty; give at least one word"),
        ("punctuation alone", SPEAK + "'...!'", "the text is empty; give at least one word"),
        ("emoji", SPEAK + "'we ran \U0001f600'", "outside the toy alphabet"),
        ("right to left", SPEAK + "'\u05e9\u05dc\u05d5\u05dd'",
         "outside the toy alphabet .*; write the text out"),
        ("mixed scripts", SPEAK + "'we \u8dd1 ran'",
         r"characters \['\u8dd1'\] in .*outside the toy alphabet"),
        ("digits", SPEAK + "'7 dogs'",
         r"characters \['7'\] in '7 dogs' are outside the toy alphabet"),
        ("control characters", SPEAK + "'we \x07ran'",
         r"characters \['\\x07'\] in .*outside the toy alphabet"),
        ("NUL", SPEAK + "'we\0ran'", r"characters \['\\x00'\] in .*outside the toy alphabet"),
        ("broken bytes", SPEAK + "'we \udc80ran'",
         r"characters \['\\udc80'\] in .*outside the toy alphabet"),
        ("a very long text", SPEAK + "'" + "the dog ran " * 100 + "'",
         "--text is about 80 s of speech; wanted 60 s at most: split it"),
        ("a bad prompt text", SPEAK + "'we ran' --prompt-text ...",
         "the text is empty; give at least one word"),
        ("no steps", SPEAK + "'we ran' --nfe 0", "sample.nfe=0; wanted at least one Euler step"),
        ("guidance that is nan", SPEAK + "'we ran' --cfg-scale nan",
         "sample.cfg_scale=nan; wanted 0 .off. or more"),
        ("a result that is no wav", SPEAK + "'we ran' --out x.mp3",
         "x.mp3: wanted a name that ends in .wav"),
        ("a result nowhere", SPEAK + "'we ran' --out {new}/x.wav", "in a folder that exists"),
        ("a result over a folder", SPEAK + "'we ran' --out {folder.wav}",
         "folder.wav: wanted a name that ends in .wav"),
        ("nothing to judge with", "rewards.py {good.wav}",
         "no judge given; add --asr, --speaker or --utmos"),
        ("WER of no words", JUDGE + "--asr x --text '!?'", r"reference text '!\?' is empty once"),
        ("SIM of one file", JUDGE + "--speaker x",
         "--speaker compares with --prompt, or two files"),
        # ---- checkpoints
        ("no run", LOAD + "{empty-dir}",
         r"is no output folder of train.py \(no config.json in it\)"),
        ("a run without its stage", LOAD + "{run}",
         "no grow.safetensors in .*run; run stages=grow first"),
        ("a config that was cut", LOAD + "{torn-json}",
         "config.json is no config of this train.py"),
        ("a config that is a list", LOAD + "{list-json}",
         "config.json is no config of this train.py"),
        ("a config of tomorrow", LOAD + "{new-json}",
         "unknown config key 'flavour'; .*give that run's command again"),
        ("a config with a hole", LOAD + "{half-json}",
         "config.json is no config .*pretrain is a section"),
        ("a checkpoint that was cut", LOAD + "{cut-run}",
         "grow.safetensors is no readable safetensors file .*cut off"),
        ("another program's checkpoint", LOAD + "{foreign-run}",
         "grow.safetensors was not written by train.py"),
        ("a checkpoint without a word", LOAD + "{plain-run}",
         "grow.safetensors was not written by train.py"),
        ("a VAE for a model", LOAD + "{vae-run}",
         "grow.safetensors is another model, wanted a DiTAR; run stages=grow"),
        ("other weights in it", LOAD + "{odd-run}",
         "grow.safetensors is another model, wanted a DiTAR; run stages=grow"),
    ), [
        (f"{what} as a VAE", f"vae.py {{{file}}} {{good.wav}} {{new}}.wav", f"{file}.*{answer}")
        for what, file, answer in (
            ("words", "words.pth", "cannot be read as tensors .*; wanted Semantic-VAE's"),
            ("half a file", "cut.pth", "cannot be read as tensors .* may be cut off"),
            ("half a safetensors file", "cut.safetensors", "cannot be read .* may be cut off"),
            ("a list", "list.pth", "holds no dict of tensors; wanted Semantic-VAE's"),
            ("another model", "odd.pth", "missing .*is it of another model or layout"),
            ("another safetensors file", "odd.safetensors", "is it of another model or layout"))
    ], (
        ("no VAE file", "vae.py none.pth {good.wav} {new}.wav",
         "none.pth: there is no such file; wanted Semantic-VAE's"),
        # ---- judges
        ("no recogniser", JUDGE + "--asr nowhere",
         "asr='nowhere' is no folder here and no hub id"),
        ("a folder without one", JUDGE + "--asr {empty-dir}",
         "could not load Whisper from .*empty-dir"),
        ("another model's folder", JUDGE + "--asr {qwen}", "config.json is of a qwen3 model"),
        ("no voice judge", JUDGE + "--prompt {good.wav} --speaker no.pth",
         "speaker='no.pth' is no file here"),
        ("half a voice judge", JUDGE + "--prompt {good.wav} --speaker {cut.pth}",
         "cut.pth .*cannot be read, perhaps half downloaded; wanted wavlm_large_finetune.pth"),
        ("another voice judge", JUDGE + "--prompt {good.wav} --speaker {odd.pth}",
         "odd.pth is another model, wanted wavlm_large_finetune.pth"),
        ("no UTMOS", JUDGE + "--utmos none.pt", "utmos='none.pt' is no file here"),
        ("half a UTMOS", JUDGE + "--utmos {cut.pth}",
         "cannot be read, perhaps half downloaded; wanted utmos22_strong"),
        ("a list as UTMOS", JUDGE + "--utmos {list.pth}",
         "list.pth holds a list; wanted utmos22_strong"),
    )) for row in table]


# ---- the machinery -----------------------------------------------------------------------------

@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Makes a named file once and returns its path."""
    place = tmp_path_factory.mktemp("shelf")

    def get(name):
        if not (place / name).exists():
            MAKERS[name](place / name)
        return str(place / name)
    return get


@pytest.fixture
def no_slow_step(monkeypatch):
    for owner, name in SLOW:
        def slow(*args, name=name, **kwargs):
            raise AssertionError(f"{name} ran before the input was refused")
        monkeypatch.setattr(owner, name, slow)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(ROOT)


def words_of(command, shelf, new):
    """The words of a command line, its files made."""
    for name in MAKERS:
        if f"{{{name}}}" in command:
            command = command.replace(f"{{{name}}}", shelf(name))
    return shlex.split(command.replace("{new}", str(new)))


@pytest.mark.parametrize("command, answer", [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_bad_input_ends_in_one_line_that_says_what_to_do(command, answer, shelf, no_slow_step,
                                                         tmp_path, capsys, monkeypatch):
    words = words_of(command, shelf, tmp_path / "new")
    if words[0].startswith("WORLD_SIZE="):
        monkeypatch.setenv(*words.pop(0).split("="))
    script, *words = words
    main = importlib.import_module(script.removesuffix(".py")).main
    started = time.process_time()
    with pytest.raises(SystemExit) as end:
        checks.run_main(lambda: main(words))
    said = capsys.readouterr().err
    assert end.value.code == (1 if script == "data.py" else 2)
    assert said.startswith("error: ")
    assert re.search(answer, " ".join(said.split())), said
    assert time.process_time() - started < 5
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == [], "nothing is left behind"


# ---- what is taken all the same ----------------------------------------------------------------

# name, file, what is noted ("" for nothing)
TAKEN = (
    ("16 kHz, 16 bit", wav(hum(1)), ""),
    ("stereo", wav(np.stack([hum(1), hum(1)], axis=1)), "has 2 channels; their mean is used"),
    ("8 kHz", wav(hum(1, 8_000), 8_000), "is at 8000 Hz; resampled to 16000 Hz"),
    ("24 kHz", wav(hum(1, 24_000), 24_000), "is at 24000 Hz; resampled to 16000 Hz"),
    ("44.1 kHz", wav(hum(1, 44_100), 44_100), "is at 44100 Hz; resampled to 16000 Hz"),
    ("48 kHz in six channels", wav(np.stack([hum(1, 48_000)] * 6, axis=1), 48_000),
     "has 6 channels; .*is at 48000 Hz; resampled"),
    ("24 bit", wav(hum(1), subtype="PCM_24"), ""),
    ("float", wav(hum(1), subtype="FLOAT"), ""),
    ("double", wav(hum(1), subtype="DOUBLE"), ""),
    ("8 bit", wav(hum(1), subtype="PCM_U8"), ""),
    ("flac", wav(hum(1), format="FLAC"), ""),
    ("ogg", wav(hum(1), format="OGG"), ""),
    ("mp3", wav(hum(1), format="MP3"), ""),
    ("clipped", wav(np.clip(hum(1, loud=5), -1, 1)), ""),
    ("a little beyond 1", wav(hum(1, loud=1.5), subtype="FLOAT"), ""),
)


@pytest.mark.parametrize("maker, noted", [row[1:] for row in TAKEN], ids=[row[0] for row in TAKEN])
def test_audio_of_other_kinds_is_taken_with_a_note(maker, noted, tmp_path, capsys):
    maker(tmp_path / "a.wav")
    heard = sample.read_prompt(str(tmp_path / "a.wav"))
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(noted, said) if noted else said == ""
    assert heard.dtype == torch.float32 and abs(len(heard) - RATE) <= 3_200
    spectrum = torch.fft.rfft(heard[1_600:12_800]).abs()            # still a hum of 150 Hz
    assert spectrum.argmax() == 150 * 11_200 // RATE


# name, text of the real world, what comes of it: a regex of the error, or the text and the note
REAL_TEXTS = (
    ("empty", " \n ", "has no word to speak", None, ""),
    ("punctuation", "?!...", "has no word to speak", None, ""),
    ("emoji", "\U0001f600", "has no word to speak", None, ""),
    ("NUL", "we\0ran", r"control characters \['\\x00'\] in the text 'we\\x00ran'", None, ""),
    ("a bell", "we \x07ran", r"control characters \['\\x07'\]", None, ""),
    ("broken bytes", "we \udc80 ran", r"control characters \['\\udc80'\]", None, ""),
    ("blanks and line ends", " we\tran\r\n far ", None, "we ran far", ""),
    ("mixed scripts", "we \u8dd1 na\u00efve \uff21", None, "we \u8dd1 na\u00efve \uff21", ""),
    ("right to left", "we \u05e9\u05dc", None, "we \u05e9\u05dc", "letters .* of neither English"),
)


@pytest.mark.parametrize("given, error, taken, noted", [row[1:] for row in REAL_TEXTS],
                         ids=[row[0] for row in REAL_TEXTS])
def test_texts_of_the_real_world(given, error, taken, noted, capsys):
    world = RealWorld(run=None)
    if error:
        with pytest.raises(ValueError, match=error):
            world.clean(given)
        return
    assert world.clean(given) == taken
    said = capsys.readouterr().out
    assert re.search(noted, said) if noted else said == ""


# ---- how an error is shown ---------------------------------------------------------------------

@pytest.mark.parametrize("wrong", (lambda: json.loads("{"), lambda: np.zeros(3).reshape(2, 2),
                                   lambda: [].index(3), lambda: {}["a"], lambda: 1 / 0))
def test_a_bug_keeps_its_traceback(wrong):
    with pytest.raises((ValueError, KeyError, ZeroDivisionError)):
        checks.run_main(wrong)


def test_a_script_ends_with_one_line_and_status_2():
    done = subprocess.run([sys.executable, "rewards.py", "none.wav", "--asr", "x"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error: none.wav: no readable audio file \(.*\)\n", done.stderr)


def test_every_command_line_shows_errors_in_this_way():
    for script in ("train", "sample", "evaluate", "rewards", "vae"):
        assert "    run_main(main)" in (ROOT / f"{script}.py").read_text(encoding="utf-8")
