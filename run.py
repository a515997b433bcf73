"""A run: output folder, ranks, log, checkpoints and the one training loop. What a stage trains
stands in train.py, the toy's VAE and judges in toy.py and toy_judges.py.

Everything random is a function of (seed, stage, step), so a run that was stopped continues with the
same numbers; a file is written under a temporary name, synced and renamed: whole or not there.
"""

import contextlib
import copy
import datetime
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

# What the progress bar shows; the log has all.
SHOWN = ("wer", "sim", "anchor", "caps", "loss", "reconstruction", "kl", "flow", "stop", "sec")
VERSION = 1                     # of the files; raised when older ones can no longer be read


# ---------------------------------------------------------------- files

@contextlib.contextmanager
def writing(path):
    """Names the file that could not be written, and what to do, in whatever error came."""
    try:
        yield
    except Exception as error:                      # a full disk comes as safetensors' own class
        raise OSError(f"could not write {path} ({error}); what was there before is untouched: free "
                      "some space or make the folder writable, and give the same command again"
                      ) from error


@contextlib.contextmanager
def whole(path):
    """Yields a scratch name to write `path` under, then syncs and renames: whole or not there. The
    name lies in a folder of its own, as safetensors has scratch files too; what a run that was
    killed left in it goes with the next write."""
    folder = path.parent / ".unfinished"
    with writing(path):
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            yield folder / path.name
            with open(folder / path.name, "rb") as file:
                os.fsync(file.fileno())
            os.replace(folder / path.name, path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def save_tensors(path, tensors, meta):
    with whole(path) as scratch:
        save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, scratch,
                  metadata={k: json.dumps(v) for k, v in meta.items()})


def write_text(path, text):
    with whole(path) as scratch:
        scratch.write_text(text)


def digest(tensors):
    """Short hash of what tensors hold, to tell one result from another."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:16]


def readable(path):
    """A safetensors file, opened. Raises ValueError if it is none, or cut off."""
    try:
        return safe_open(path, "pt")
    except Exception as error:                      # safetensors raises its own bare class
        raise ValueError(f"{path} is no readable safetensors file ({error}); it may be cut off: "
                         "delete it and run its stage again") from error


def load_tensors(path):
    """Returns (dict of fp32 tensors, metadata dict)."""
    with readable(path) as file:
        tensors = {k: file.get_tensor(k) for k in file.keys()}
    return ({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()},
            load_meta(path))


def load_meta(path):
    """A file's metadata alone. Raises ValueError for another program's, or another version's."""
    with readable(path) as file:
        texts = file.metadata() or {}
    try:
        meta = {k: json.loads(v) for k, v in texts.items()}
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} was not written by train.py (its metadata: {texts}); "
                         "use another out_dir") from error
    if meta.get("version", VERSION) != VERSION:
        raise ValueError(f"{path} is of version {meta['version']}, this code reads {VERSION}; use "
                         "the code that wrote it, or another out_dir")
    return meta


def differences(theirs, ours):
    """The fields in which two config sections differ, as text."""
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return f"{theirs!r} there, {ours!r} now"
    return ", ".join(f"{k} {theirs.get(k)!r} there, {ours.get(k)!r} now"
                     for k in sorted({*theirs, *ours}) if theirs.get(k) != ours.get(k))


# ---------------------------------------------------------------- what the loop needs

def step_generator(*key):
    """A CPU generator for this (seed, stage, step, ...): nothing random has another source."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def schedule(step, steps, warmup, hold=0.0):
    """Linear warm-up to 1, then linear decay to 0 that begins after `hold` of the steps (1: never).
    """
    if step < warmup:
        return (step + 1) / warmup
    start = max(warmup, hold * steps)
    return min(1.0, (steps - step) / max(1, steps - start))


class Averaged:
    """Exponential moving average of parameters, with the usual warm-up of its decay. With decay 0
    it is the parameters themselves and takes no memory."""

    def __init__(self, named, decay):
        self.named, self.decay = named, decay
        self.mean = {name: p.detach().clone() if decay > 0 else p.detach()
                     for name, p in named.items()}

    @torch.no_grad()
    def update(self, step):
        if self.decay > 0:
            decay = min(self.decay, (step + 1) / (step + 10))
            torch._foreach_lerp_(list(self.mean.values()), list(self.named.values()), 1 - decay)


@contextlib.contextmanager
def stop_signals():
    """Yields a list that holds a signal's name once SIGTERM or Ctrl-C came; a second one ends the
    process at once. In a thread, where Python takes no handlers, it stays empty."""
    came, before = [], {}

    def note(number, frame):
        came.append(signal.Signals(number).name)
        for each in before:
            signal.signal(each, signal.SIG_DFL)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- a run: ranks, files, log

class Run:
    """What only train.py knows: ranks, device, the output folder and the log. fresh: empty the
    folder first."""

    def __init__(self, config, command, fresh=False):
        self.config, self.command = config, command
        self.dir = Path(config.out_dir)
        self.rank = int(os.environ.get("RANK", 0))
        self.ranks = int(os.environ.get("WORLD_SIZE", 1))
        self.main = self.rank == 0
        cuda = torch.cuda.is_available()
        device = ("cuda" if cuda else "cpu") if config.device == "auto" else config.device
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
            torch.cuda.set_device(device)
        self.device = torch.device(device)
        if self.ranks > 1 and not dist.is_initialized():
            # evaluation keeps one rank busy while the others wait for it
            dist.init_process_group("nccl" if cuda and device != "cpu" else "gloo",
                                    timeout=datetime.timedelta(hours=12))
        fast_bf16 = (torch.cuda.is_bf16_supported() if self.device.type == "cuda"
                     else torch.cpu._is_amx_tile_supported())
        self.bf16 = fast_bf16 if config.autocast == "auto" else config.autocast == "on"
        if fresh:
            if self.main and self.dir.exists():
                shutil.rmtree(self.dir)
            self.barrier()                          # no rank makes the folder before it is emptied
        self.dir.mkdir(parents=True, exist_ok=True)

    def generator(self, *key):
        return step_generator(self.config.seed, *key)

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def fingerprint(self, stage):
        """What shapes a stage's result: sections of the config, as they are read back from json,
        and the results of earlier stages that it starts from."""
        sections, split, before = {
            "vae": (("vae",), "judge", ()),
            "judges": (("judges",), "judge", ("vae",)),
            "pretrain": (("model", "pretrain"), "pretrain", ("vae",)),
            "grow": (("model", "method", self.config.method, "sample", "rewards"), "rl",
                     ("vae", "judges", "pretrain")),
        }[stage]
        whole = json.loads(json.dumps(asdict(self.config)))
        marks = {name: whole[name] for name in (*sections, "seed")}
        if self.config.world == "toy":
            voice = ("speakers_per_variant", "rate_wpm", "word_gap", "seed", split)
            marks["corpus"] = {name: whole["corpus"][name] for name in voice}
        else:
            marks |= {"real": whole["real"], "data": whole["data"]}
            before = [name for name in before if name != "judges"]
        return marks | {"from": {name: self.digest(name) for name in before}}

    def digest(self, stage):
        """Hash of a finished stage's tensors, read from its metadata where it stands there."""
        try:
            path = self.find(stage)
        except ValueError:                          # not made yet
            return None
        with readable(path) as file:
            mark = (file.metadata() or {}).get("digest")
            return json.loads(mark) if mark else digest({k: file.get_tensor(k)
                                                         for k in file.keys()})

    def done(self, stage):
        """Is the stage's result in out_dir? Raises ValueError if it is of another config."""
        path = self.dir / f"{stage}.safetensors"
        if not path.exists():
            return False
        theirs, ours = load_meta(path).get("config"), self.fingerprint(stage)
        if theirs is None:
            raise ValueError(f"{path} was not written by train.py; use another out_dir")
        for section in ours:
            if theirs.get(section) != ours[section]:
                raise ValueError(
                    f"{path} was made with another {section} section: "
                    f"{differences(theirs.get(section), ours[section])}; "
                    "use another out_dir, or remove the file to train again")
        return True

    def sum(self, number):
        """Sum of a number over ranks."""
        if self.ranks == 1:
            return number
        total = torch.tensor(float(number), device=self.device)
        dist.all_reduce(total)
        return total.item()

    def barrier(self):
        if self.ranks > 1:
            dist.barrier()

    def find(self, stage):
        """Path of a stage's finished result: in out_dir, else in weights_dir."""
        places = [self.dir] + ([Path(self.config.weights_dir)] if self.config.weights_dir else [])
        for place in places:
            if (place / f"{stage}.safetensors").exists():
                return place / f"{stage}.safetensors"
        raise ValueError(f"no {stage}.safetensors in {' or '.join(map(str, places))}; "
                         f"run stages={stage.split('.')[0]} first, or stages=all")

    def load(self, stage):
        """Tensors and metadata of a stage's finished result."""
        path = self.find(stage)
        tensors, meta = load_tensors(path)
        if "config" not in meta:
            raise ValueError(f"{path} was not written by train.py (no config in its metadata); "
                             f"run stages={stage} to make one")
        return tensors, meta

    def finish(self, stage, tensors, scores, half=True, **more):
        """Write a stage's result with what made it, what it scores and `more` metadata. Its seconds
        are those of all its steps in the log, so that a restart does not hide any."""
        if not self.main:
            return
        seconds = sum(r["sec"] for r in self.records(stage))
        tensors = {k: v.half() if half and v.is_floating_point() else v
                   for k, v in tensors.items()}
        save_tensors(self.dir / f"{stage}.safetensors", tensors, {
            "version": VERSION, "config": self.fingerprint(stage), "command": self.command,
            "seconds": round(seconds, 1), "scores": scores, "digest": digest(tensors),
            **more})
        self.tidy(stage)
        print(f"{stage}: " + ", ".join(f"{k} {v:.4g}" for k, v in scores.items())
              + f"  ({seconds:.0f} s of steps)", flush=True)

    def tidy(self, stage):
        """Remove the own checkpoints of a stage that is done."""
        for path in self.dir.glob(f"{stage}*.resume.safetensors"):
            path.unlink()

    def fast(self, model):
        """A copy of a model in the precision of rollouts and evaluation."""
        return copy.deepcopy(model).to(torch.bfloat16 if self.bf16 else torch.float32)

    def all_reduce(self, tensors):
        """Sum over ranks, in flat buffers of about 256 MB. Each rank's loss is its share of the
        global mean."""
        if self.ranks == 1:
            return
        bucket, size = [], 0
        for i, tensor in enumerate(tensors):
            bucket.append(tensor)
            size += tensor.numel()
            if size >= 2**26 or i == len(tensors) - 1:
                flat = torch.cat([t.flatten() for t in bucket])
                dist.all_reduce(flat)
                for t, part in zip(bucket, flat.split([t.numel() for t in bucket])):
                    t.copy_(part.view_as(t))
                bucket, size = [], 0

    def log(self, stage, step, logs, bar):
        if not self.main:
            return
        record = {"stage": stage, "step": step} | {
            k: round(float(v), 6) for k, v in logs.items()}
        path = self.dir / "log.jsonl"
        with writing(path), open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        text = "  ".join(f"{k} {record[k]:.4g}" for k in SHOWN if k in record)
        if not bar.disable:
            bar.set_postfix_str(text, refresh=False)
        elif stage == "grow" or step % 50 == 0:
            print(f"{stage} {step}/{bar.total}: {text}", flush=True)

    def records(self, stage):
        """The log's records of a stage and its parts."""
        path = self.dir / "log.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [r for r in (json.loads(line) for line in lines if line.endswith("}"))
                if r["stage"].split(".")[0] == stage]

    def rewind_log(self, stage, step):
        """Drop this stage's lines from `step` on, so that each step stands in the log once."""
        path = self.dir / "log.jsonl"
        if self.main and path.exists():
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if not (
                (r := json.loads(line))["stage"] == stage and r["step"] >= step)]
            write_text(path, "".join(line + "\n" for line in kept))

    def checkpoints(self, stage):
        """A stage's own checkpoints, oldest first: STAGE.STEP.resume.safetensors."""
        return sorted(self.dir.glob(f"{stage}.[0-9]*.resume.safetensors"))

    def fit(self, stage, module, gradients, steps, lr, warmup=0, hold=0.0, decay=True,
            betas=(0.9, 0.98), weight_decay=0.01, ema=0.0, clip=1.0, part="", after=None):
        """The one training loop. gradients(step) adds to .grad and returns numbers to log. The
        learning rate is `lr` times `schedule`, constant without decay. Resumes from the stage's own
        last checkpoint; SIGTERM and Ctrl-C end it at the next step with one. after(step, logs,
        weights) looks at each step and may add to its numbers. Returns the averaged weights (the
        last ones without ema) as a dict."""
        named = {k: p for k, p in module.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(named.values(), lr=1.0, betas=betas, foreach=True,
                                      weight_decay=weight_decay)
        average, fingerprint = Averaged(named, ema), self.fingerprint(stage)
        first = updates = bad = 0           # a step whose gradient is not finite is no update
        if there := self.checkpoints(stage + part):
            first, updates, bad = self.restore(there, fingerprint, named, average, optimizer)
        self.rewind_log(stage + part, first)

        def save(step):
            tensors = {f"model.{name}": p for name, p in named.items()}
            for name, p in named.items():
                state = optimizer.state[p]
                tensors |= {f"m.{name}": state["exp_avg"], f"v.{name}": state["exp_avg_sq"]}
                if ema > 0:
                    tensors[f"ema.{name}"] = average.mean[name]
            save_tensors(self.dir / f"{stage}{part}.{step:07d}.resume.safetensors", tensors,
                         {"version": VERSION, "step": step, "updates": updates, "bad": bad,
                          "config": fingerprint})
            for path in self.checkpoints(stage + part)[:-self.config.keep_last]:
                path.unlink()

        bar = tqdm(range(first, steps), initial=first, total=steps, desc=stage + part,
                   disable=not (self.main and sys.stderr.isatty()))
        saved, step = time.time(), first - 1
        with stop_signals() as stopping:
            for step in bar:
                started = time.time()
                rate = lr * schedule(step, steps, warmup, hold if decay else 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.zero_grad()
                logs = gradients(step)
                for p in named.values():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                self.all_reduce([p.grad for p in named.values()])
                norm = nn.utils.clip_grad_norm_(named.values(), clip).item()
                if math.isfinite(norm):
                    optimizer.step()
                    average.update(step)
                    updates, bad = updates + 1, 0
                else:
                    bad += 1
                    if bad == 10:
                        raise RuntimeError(
                            f"{stage}: the gradient was not finite for 10 steps in a row; lower "
                            "the learning rate or raise the anchor")
                logs |= {"grad_norm": norm, "lr": rate, "skipped": step + 1 - updates,
                         "sec": time.time() - started}
                if after:
                    after(step, logs, average.mean)
                self.log(stage + part, step, logs, bar)
                stop = self.sum(len(stopping)) > 0
                due = (stop or step + 1 == steps
                       or time.time() - saved > self.config.save_every_sec)
                if self.main and due and updates:
                    save(step + 1)
                    saved = time.time()
                if stop:
                    break
            if self.sum(len(stopping)) > 0:     # maybe only since the last step's checkpoint
                if self.main:
                    print(f"{stage + part}: stopped by {stopping[0] if stopping else 'a rank'} "
                          f"after step {step}; the same command continues from there", flush=True)
                raise SystemExit(1)
        return average.mean if ema > 0 else {k: p.detach() for k, p in named.items()}

    def restore(self, there, fingerprint, named, average, optimizer):
        """Fill parameters, averages and AdamW's moments from the newest of a stage's checkpoints,
        one tensor at a time. Returns the step to go on with, the updates so far, and the steps
        without one since the last."""
        path = there[-1]
        try:
            meta = load_meta(path)
        except ValueError as error:
            before = there[-2].name if len(there) > 1 else "the stage's first step"
            raise ValueError(f"{error}; without that file the same command continues from {before}"
                             ) from error
        if not {"config", "step", "updates"} <= meta.keys():
            raise ValueError(f"{path} is no checkpoint of train.py; remove it")
        for section in fingerprint:
            if meta["config"].get(section) != fingerprint[section]:
                raise ValueError(
                    f"{path} is of another {section} section: "
                    f"{differences(meta['config'].get(section), fingerprint[section])}; "
                    "use another out_dir, or remove the file to start again")
        with readable(path) as file:
            theirs = {k.removeprefix("model.") for k in file.keys() if k.startswith("model.")}
            if theirs != named.keys():
                raise ValueError(f"{path} holds the parameters of another model, differing in "
                                 f"{', '.join(sorted(theirs ^ named.keys())[:3])}; remove it")
            for name, p in named.items():
                p.data.copy_(file.get_tensor(f"model.{name}"))
                if average.decay > 0:
                    average.mean[name].copy_(file.get_tensor(f"ema.{name}"))
                optimizer.state[p] = {"step": torch.tensor(float(meta["updates"]))} | {
                    key: file.get_tensor(f"{short}.{name}").to(p.device)
                    for key, short in (("exp_avg", "m"), ("exp_avg_sq", "v"))}
        return meta["step"], meta["updates"], meta.get("bad", 0)
