"""What runs that were stopped, machines that fail and strange files must not do to a training.

The first half looks at what lives.py did to runs of all stages: it killed and continued them, in a
process of its own, as forking a process that has threads is unsafe.
"""
import errno
import json
import os
import pickle
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import test_train
import torch
from test_train import (MICRO, ROOT, Stopped, assert_same_fit, fit, log_of, micro_run, poison)

import bench
import judges
import run as run_module
import toy
import train
from run import load_meta, load_tensors, save_tensors, write_text
from vae import load_semantic_vae


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What lives.py saw, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("lives")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "lives.py"), str(folder)], capture_output=True,
        text=True, timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3_000:]
    return json.loads((folder / "report.json").read_text()) | {"folder": folder}


# ---- kill -9 -----------------------------------------------------------------------------------

def test_a_run_killed_at_fifty_random_moments_ends_as_if_it_had_not_been(report):
    """The same tensors, log records (without times), table, records and best weights."""
    deaths = [death for chain in report["kills"] for death in chain["deaths"]]
    assert len(deaths) >= 50 and {status for *_, status in deaths} == {-9}
    per_stage = Counter(stage for stage, *_ in deaths)
    assert set(per_stage) == {"start", *train.STAGES} and min(per_stage.values()) >= 3
    for chain in report["kills"]:
        assert chain["broken"] == []                # nothing half under a final name, at any moment
        assert chain["last"] == 0 and chain["differences"] == []


def test_so_does_one_killed_inside_of_its_writes(report):
    moments = report["moments"]
    assert len(moments["deaths"]) >= 15 and {s for *_, s in moments["deaths"]} == {-9}
    assert moments["broken"] == [] and moments["last"] == 0 and moments["differences"] == []


def test_what_is_compared_holds_every_step_once_and_no_scratch_file(report):
    whole = report["folder"] / "whole"
    steps = Counter((r["stage"], r["step"]) for r in log_of(whole / "run"))
    assert set(steps.values()) == {1} and len({stage for stage, _ in steps}) == 7
    for folder in (whole, report["folder"] / "chain0", report["folder"] / "moments"):
        assert sorted(path.name for path in (folder / "run").iterdir()) == [
            "config.json", "eval_after.jsonl", "eval_before.jsonl", "eval_real.jsonl", "figure.png",
            "grow.best.safetensors", "grow.safetensors", "judges.safetensors", "log.jsonl",
            "pretrain.safetensors", "table.md", "vae.safetensors", "wavs"]


def test_no_process_that_speaks_outlives_a_killed_run(report):
    assert report["orphans"]["status"] == -9 and report["orphans"]["seconds"] < 15


# ---- SIGTERM, Ctrl-C ---------------------------------------------------------------------------

@pytest.mark.parametrize("name, signal, step", (
    ("SIGTERM", "SIGTERM", 1), ("SIGINT", "SIGINT", 2), ("late", "SIGTERM", 3)))
def test_a_signal_ends_a_run_at_the_next_step_with_a_checkpoint_and_one_line(name, signal, step,
                                                                              report):
    told = report["signals"][name]
    assert told["status"] == 1 and "Traceback" not in told["text"]
    assert told["text"].splitlines()[-1] == (
        f"grow: stopped by {signal} after step {step}; the same command continues from there")
    assert told["checkpoints"] == [f"grow.{step + 1:07d}.resume.safetensors"]


def test_a_second_signal_ends_it_at_once_and_one_outside_of_the_loop_too(report):
    twice, elsewhere = report["signals"]["twice"], report["signals"]["elsewhere"]
    assert twice["status"] == -2 and twice["checkpoints"] == []
    assert elsewhere["status"] == 1
    assert elsewhere["text"].splitlines()[-1] == (
        "stopped by SIGINT; the same command continues from there")
    assert "Traceback" not in twice["text"] + elsewhere["text"]


def test_a_run_that_signals_ended_five_times_ends_as_if_it_had_not_been(report):
    assert report["signals"]["end"]["status"] == 0 and report["signals"]["differences"] == []


# ---- no room -----------------------------------------------------------------------------------

def test_without_room_the_last_checkpoint_stays_and_the_run_continues_later(report):
    told = report["no_room"]
    for name, file in (("full", "run/grow.0000003.resume.safetensors"),
                       ("read only", "run/config.json")):
        assert told[name]["status"] == 2
        assert told[name]["text"].splitlines()[-1].startswith(f"error: could not write {file} (")
        assert "free some space or make the folder writable" in told[name]["text"]
        assert told[name]["checkpoints"] == ["grow.0000002.resume.safetensors"]
    assert "File too large" in told["full"]["text"]
    assert "Permission denied" in told["read only"]["text"]
    assert told["end"]["status"] == 0 and told["differences"] == []


class FullDisk:
    """A file that takes half of the next text."""

    def __init__(self, file):
        self.file = file

    def write(self, text):
        self.file.write(text[:len(text) // 2])
        self.file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def test_a_log_line_without_room_is_named_and_written_later(tmp_path, monkeypatch):
    whole = fit(tmp_path / "whole")

    def fill(step, module):
        if step == 5:
            monkeypatch.setattr(run_module, "open", lambda *args: FullDisk(open(*args)),
                                raising=False)
    with pytest.raises(OSError, match=r"could not write .*log.jsonl \(.*No space left on device\)"):
        fit(tmp_path / "part", hook=fill)
    assert not (tmp_path / "part" / "log.jsonl").read_text().endswith("\n")
    monkeypatch.delattr(run_module, "open")
    assert_same_fit(fit(tmp_path / "part"), whole)


@pytest.mark.parametrize("moment", ("write", "sync", "rename"))
def test_a_text_is_whole_or_as_it_was(moment, tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_text(path, "old")

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    owner, name = {"write": (Path, "write_text"), "sync": (os, "fsync"),
                   "rename": (os, "replace")}[moment]
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(OSError, match=r"could not write .*config.json \(.*No space left"):
        write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# ---- old checkpoints ---------------------------------------------------------------------------

def test_of_the_kept_checkpoints_an_older_one_continues_where_the_newest_is_broken(tmp_path,
                                                                                   monkeypatch):
    monkeypatch.setattr(test_train, "micro_run",
                        lambda folder, *words: micro_run(folder, *words, "keep_last=3"))
    whole, part, asked = fit(tmp_path / "whole"), tmp_path / "part", []

    def crash(step, module):
        if step == 6:
            raise Stopped
    with pytest.raises(Stopped):
        fit(part, hook=crash)
    names = [f"vae.000000{step}.resume.safetensors" for step in (4, 5, 6)]
    assert sorted(p.name for p in part.glob("*.resume.*")) == names
    newest = part / names[2]
    newest.write_bytes(newest.read_bytes()[:-7])
    log = (part / "log.jsonl").read_bytes()
    with pytest.raises(ValueError, match=f"{names[2]} is no readable safetensors file .* delete it "
                                         f".* without that file .* continues from {names[1]}"):
        fit(part)
    assert (part / "log.jsonl").read_bytes() == log
    newest.unlink()
    assert_same_fit(fit(part, hook=lambda step, module: asked.append(step)), whole)
    assert asked == [5, 6, 7]
    assert sorted(p.name for p in part.glob("*.resume.*")) == [
        f"vae.000000{step}.resume.safetensors" for step in (6, 7, 8)]


def test_where_the_only_checkpoint_is_broken_the_stage_begins_anew_without_it(tmp_path):
    whole = fit(tmp_path)
    only, = tmp_path.glob("*.resume.safetensors")
    only.write_bytes(b"")
    with pytest.raises(ValueError, match="continues from the stage's first step"):
        fit(tmp_path)
    only.unlink()
    assert_same_fit(fit(tmp_path), whole)


# ---- files that are not ours -------------------------------------------------------------------

def test_files_of_another_version_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr(run_module, "VERSION", 2)
        micro_run(tmp_path).finish("grow", {"a": torch.zeros(1)}, {})
        fit(tmp_path)
    for read in (lambda: micro_run(tmp_path).done("grow"), lambda: micro_run(tmp_path).load("grow"),
                 lambda: fit(tmp_path)):
        with pytest.raises(ValueError, match="safetensors is of version 2, this code reads 1"):
            read()


def test_files_of_another_tokenizer_are_refused_and_the_field_named(tmp_path):
    micro_run(tmp_path / "toy").finish("pretrain", {"a": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match="model section: vocab_size 27 there, 30 now"):
        micro_run(tmp_path / "toy", "model.vocab_size=30").done("pretrain")
    words = ("world=real", "real.lm=a")
    micro_run(tmp_path / "real", *words).finish("pretrain", {"a": torch.zeros(1)}, {})
    assert micro_run(tmp_path / "real", *words).done("pretrain")
    with pytest.raises(ValueError, match="real section: lm 'a' there, 'b' now"):
        micro_run(tmp_path / "real", "world=real", "real.lm=b").done("pretrain")
    with pytest.raises(ValueError, match="pretrain.safetensors was made with another"):
        micro_run(tmp_path / "real").done("pretrain")               # of the other world


@pytest.mark.parametrize("kind, message", (
    ("upstream", r"was not written by train.py \(its metadata: .'format': 'pt'"),
    ("bare", "is no checkpoint of train.py; remove it"),
    ("other parameters", "holds the parameters of another model, differing in bias, classes")))
def test_a_foreign_checkpoint_is_not_continued(kind, message, tmp_path):
    fit(tmp_path)
    path, = tmp_path.glob("*.resume.safetensors")
    if kind == "other parameters":
        save_tensors(path, {"model.weight": torch.zeros(2, 3), "model.classes": torch.zeros(2)},
                     load_meta(path))
    else:
        safetensors.torch.save_file({"model.weight": torch.zeros(2, 3)}, path,
                                    {"format": "pt"} if kind == "upstream" else None)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path)


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_no_pickle_is_executed_whatever_its_name(tmp_path, monkeypatch):
    marker, run = tmp_path / "executed", micro_run(tmp_path)
    pickle.loads(pickle.dumps(Evil(marker))).close()
    assert marker.exists()                          # it would
    marker.unlink()
    plain, zipped = tmp_path / "plain", tmp_path / "zipped"
    plain.write_bytes(pickle.dumps({"a": Evil(marker)}, 2))
    torch.save({"state_dict": {"a": Evil(marker)}, "model": Evil(marker)}, zipped)
    monkeypatch.setattr(toy, "_speak_alone", lambda job: [np.zeros(1_600, np.int16)] * len(job[0]))
    corpus = toy.CorpusConfig(tune=2, cache_dir=str(tmp_path / "corpus"))
    toy.corpus("tune", corpus)
    cached, = (tmp_path / "corpus").iterdir()
    readers = {
        "vae.safetensors": (load_tensors, load_semantic_vae, lambda path: run.done("vae"),
                            lambda path: run.load("vae")),
        "vae.0000001.resume.safetensors": (lambda path: fit(tmp_path),),
        "ema_state_dict.pth": (load_semantic_vae,),
        "wavlm_large_finetune.pth": (judges.SpeakerVerifier.load,),
        "utmos22_strong_step7459_v1.pt": (judges.UTMOS.load,),
        str(cached): (lambda path: toy.corpus("tune", corpus),)}
    for source in (plain, zipped):
        for name, functions in readers.items():
            path = tmp_path / name
            path.write_bytes(source.read_bytes())
            for read in functions:
                with pytest.raises((ValueError, KeyError)):
                    read(path)
                assert not marker.exists(), (source, name)
            path.unlink()
    np.savez(cached, wavs=np.array([Evil(marker)], dtype=object), lengths=[1, 1])
    with pytest.raises(ValueError, match="allow_pickle=False"):
        toy.corpus("tune", corpus)
    assert not marker.exists()


# ---- steps without a finite gradient -----------------------------------------------------------

def test_a_grow_step_that_is_not_finite_is_skipped_and_counted(report):
    told = report["not_finite"]["one"]
    assert told["status"] == 0 and [r["skipped"] for r in told["log"]] == [0, 1, 1, 1]
    assert [np.isfinite(r["grad_norm"]) for r in told["log"]] == [True, False, True, True]
    assert [np.isfinite(r["anchor"]) for r in told["log"]] == [True, False, True, True]
    tensors, _ = load_tensors(report["folder"] / "not_finite_one" / "run" / "grow.safetensors")
    assert all(torch.isfinite(t).all() for t in tensors.values())


def test_ten_such_grow_steps_in_a_row_end_the_run_with_what_to_try(report):
    told = report["not_finite"]["ten"]
    assert told["status"] == 1 and len(told["log"]) == 10
    assert told["text"].splitlines()[-1].endswith(
        "grow: the gradient was not finite for 10 steps in a row; lower the learning rate or raise "
        "the anchor")


def test_steps_in_a_row_are_counted_over_an_interruption(tmp_path):
    def crash(step, module):
        poison(*range(1, 20))(step, module)
        if step == 6:
            raise Stopped
    with pytest.raises(Stopped):
        fit(tmp_path, steps=20, hook=crash)
    with pytest.raises(RuntimeError, match="not finite for 10 steps in a row"):
        fit(tmp_path, steps=20, hook=poison(*range(1, 20)))
    assert [r["step"] for r in log_of(tmp_path)] == list(range(10))


# ---- long runs ---------------------------------------------------------------------------------

def test_memory_stays_flat_over_300_grow_steps(report):
    growth = report["growth"]
    memory, milliseconds = growth["rows"]
    assert growth["status"] == 0 and len(memory) == len(milliseconds) == 300
    middle, last = (statistics.median(memory[a:a + 100]) for a in (100, 200))
    assert last - middle < 4                        # MB; 40 kB a step that stay would show
    middle, last = (statistics.median(milliseconds[a:a + 100]) for a in (100, 200))
    assert last < 3 * middle                        # coarse, as other work may run beside it
    for unit in ("MB", "ms"):
        assert f" {unit} in the last two thirds of 300: " in growth["text"]
        assert f" {unit} per 100 steps" in growth["text"]


def test_growth_over_too_few_steps_is_refused():
    with pytest.raises(ValueError, match="--growth 3; wanted 30 steps or more"):
        bench.main(["--config", MICRO, "--growth", "3"])
