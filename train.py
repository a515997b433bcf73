"""Training: config, stages, the one training loop, checkpoints, logs, torchrun.

    python train.py --config toy.yaml                   the main job: GROW on the toy world
    python train.py --config toy.yaml stages=all        everything from nothing
    python train.py --config toy.yaml --profile         where a GROW step's time goes
    python train.py --config toy.yaml grow.lr=2e-5 out_dir=out/lr2e-5
    torchrun --nproc_per_node 2 train.py --config toy.yaml

Each stage writes out_dir/STAGE.safetensors and is skipped when that file is there with the same
config; stages that a run does not make itself are read from `weights_dir`. Everything random is a
function of (seed, stage, step), so a run that was stopped continues with the same numbers.
"""

import argparse
import copy
import ctypes
import dataclasses
import difflib
import hashlib
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

import evaluate
import rewards
import toy
from grow import GrowConfig, Prompt, grow_step
from model import DiTAR, ModelConfig, pretrain_loss, round_up, valid_patches
from evaluate import EvalConfig
from rewards import RewardConfig
from sample import SampleConfig
from toy import load_vae
from toy_judges import JudgeConfig, load_judges, train_judges

# What the progress bar shows; the log has all.
SHOWN = ("wer", "sim", "anchor", "caps", "loss", "reconstruction", "kl", "flow", "stop", "sec")
STAGES = ("corpus", "vae", "judges", "pretrain", "grow", "evaluate")


@dataclass(frozen=True)
class PretrainConfig:
    steps: int = 200_000
    pairs_per_step: int = 128       # (prompt, target) pairs of one speaker
    single_share: float = 0.0       # share of rows that are one utterance alone
    lr: float = 1e-4                # peak; linear warm-up, then linear decay to 0 (paper)
    warmup: int = 10_000
    betas: tuple = (0.9, 0.98)
    hold: float = 0.0               # share of the steps at the peak before the decay begins
    ema: float = 0.0                # decay of the averaged weights that are kept; 0 is off
    aux_weight: float = 0.0         # squared error of the next patch read from h linearly (toy)


@dataclass(frozen=True)
class Config:
    out_dir: str = "out/run"
    weights_dir: str = ""           # where results of stages that this run does not make lie
    stages: tuple = ("grow", "evaluate")
    seed: int = 0
    device: str = "auto"            # auto: cuda when there is one
    autocast: str = "auto"          # auto: bf16 where the machine multiplies bf16 faster; or off
    save_every_sec: float = 60.0    # of a stage's own checkpoint
    corpus: toy.CorpusConfig = toy.CorpusConfig()
    vae: toy.VAEConfig = toy.VAEConfig()
    judges: JudgeConfig = JudgeConfig()
    model: ModelConfig = ModelConfig()
    pretrain: PretrainConfig = PretrainConfig()
    sample: SampleConfig = SampleConfig()
    rewards: RewardConfig = RewardConfig()
    grow: GrowConfig = GrowConfig()
    evaluate: EvalConfig = EvalConfig()

    def __post_init__(self):
        if self.autocast not in ("auto", "on", "off"):
            raise ValueError(f"autocast={self.autocast!r}; wanted auto, on or off")


# ---------------------------------------------------------------- config

def build(cls, values, where=""):
    """Dataclass from nested dicts. Raises ValueError that names unknown keys and wrong types."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    kwargs = {}
    for key, value in values.items():
        name = f"{where}{key}"
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"known are {', '.join(fields)}"
            raise ValueError(f"unknown config key {name!r}; {hint}")
        default = fields[key].default
        if default is dataclasses.MISSING:
            default = fields[key].default_factory()
        kwargs[key] = convert(value, default, name)
    return dataclasses.replace(cls(), **kwargs)


def convert(value, default, name):
    """A yaml or command-line value in the type of the field's default."""
    if is_dataclass(default):
        if not isinstance(value, dict):
            raise ValueError(f"{name} is a section; set its fields, e.g. {name}."
                             f"{dataclasses.fields(default)[0].name}=...")
        return build(type(default), {**asdict(default), **value}, name + ".")
    wanted = type(default)
    if wanted is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)                     # yaml reads 1e-4 as a string
        except ValueError:
            pass
    if wanted is str and isinstance(value, bool):
        return "on" if value else "off"             # yaml reads a bare off as False
    if wanted is tuple and isinstance(value, (list, tuple, str)):
        return tuple(value.split(",")) if isinstance(value, str) else tuple(value)
    if wanted is dict and isinstance(value, dict):
        return default | {k: convert(v, default.get(k, v), f"{name}.{k}")
                          for k, v in value.items()}
    if type(value) is not wanted:
        raise ValueError(f"{name}={value!r} is a {type(value).__name__}; "
                         f"wanted a {wanted.__name__} like {default!r}")
    return value


def load_config(path, overrides=()):
    """Config from a yaml file and `section.field=value` words."""
    if not Path(path).is_file():
        raise ValueError(f"no config file {path!r}; toy.yaml is the one to start with")
    values = yaml.safe_load(Path(path).read_text()) or {}
    for word in overrides:
        if "=" not in word:
            raise ValueError(f"override {word!r} is not of the form section.field=value")
        keys, value = word.split("=", 1)
        node = values
        *sections, last = keys.split(".")
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ValueError(f"override {word!r}: {section} is no section, it is {node!r}")
        node[last] = yaml.safe_load(value)
    return build(Config, values)


# ---------------------------------------------------------------- files

def save_tensors(path, tensors, meta):
    """Write safetensors under a temporary name, sync, rename: a file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, scratch,
              metadata={k: json.dumps(v) for k, v in meta.items()})
    with open(scratch, "rb") as file:
        os.fsync(file.fileno())
    os.replace(scratch, path)


def load_tensors(path):
    """Returns (dict of fp32 tensors, metadata dict)."""
    try:
        with safe_open(path, "pt") as file:
            meta = {k: json.loads(v) for k, v in (file.metadata() or {}).items()}
            tensors = {k: file.get_tensor(k) for k in file.keys()}
    except Exception as error:                      # safetensors raises its own bare class
        raise ValueError(f"{path} is no readable safetensors file ({error}); it may be cut off: "
                         "delete it and run its stage again") from error
    return {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}, meta


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
    """Exponential moving average of parameters, with the usual warm-up of its decay."""

    def __init__(self, named, decay):
        self.named, self.decay = named, decay
        self.mean = {name: p.detach().clone() for name, p in named.items()}

    @torch.no_grad()
    def update(self, step):
        decay = min(self.decay, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(self.mean.values()), list(self.named.values()), 1 - decay)




# ---------------------------------------------------------------- a run: ranks, files, log

class Run:
    """What only train.py knows: ranks, device, the output folder and the log."""

    def __init__(self, config, command):
        self.config, self.command = config, command
        self.dir = Path(config.out_dir)
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.main = self.rank == 0
        cuda = torch.cuda.is_available()
        device = ("cuda" if cuda else "cpu") if config.device == "auto" else config.device
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
            torch.cuda.set_device(device)
        self.device = torch.device(device)
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if cuda and device != "cpu" else "gloo")
        fast_bf16 = (torch.cuda.is_bf16_supported() if self.device.type == "cuda"
                     else torch.cpu._is_amx_tile_supported())
        self.bf16 = fast_bf16 if config.autocast == "auto" else config.autocast == "on"
        self.dir.mkdir(parents=True, exist_ok=True)

    def generator(self, *key):
        return step_generator(self.config.seed, *key)

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def fingerprint(self, stage):
        """The part of the config that shapes a stage's result, as it is read back from json."""
        sections, split = {
            "vae": (("vae",), "judge"), "judges": (("judges",), "judge"),
            "pretrain": (("model", "pretrain"), "pretrain"),
            "grow": (("model", "grow", "sample", "rewards"), "rl")}[stage]
        whole = json.loads(json.dumps(asdict(self.config)))
        voice = ("speakers_per_variant", "rate_wpm", "word_gap", "seed", split)
        return ({name: whole[name] for name in (*sections, "seed")}
                | {"corpus": {name: whole["corpus"][name] for name in voice}})

    def done(self, stage):
        """Is the stage's result in out_dir? Raises ValueError if it is of another config."""
        path = self.dir / f"{stage}.safetensors"
        if not path.exists():
            return False
        theirs, ours = load_tensors(path)[1].get("config"), self.fingerprint(stage)
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
        if self.world == 1:
            return number
        total = torch.tensor(float(number), device=self.device)
        dist.all_reduce(total)
        return total.item()

    def barrier(self):
        if self.world > 1:
            dist.barrier()

    def find(self, stage):
        """Path of a stage's finished result: in out_dir, else in weights_dir."""
        places = [self.dir] + ([Path(self.config.weights_dir)] if self.config.weights_dir else [])
        for place in places:
            if (place / f"{stage}.safetensors").exists():
                return place / f"{stage}.safetensors"
        raise ValueError(f"no {stage}.safetensors in {' or '.join(map(str, places))}; "
                         f"run stages={stage} first, or stages=all")

    def load(self, stage):
        """Tensors and metadata of a stage's finished result."""
        path = self.find(stage)
        tensors, meta = load_tensors(path)
        if "config" not in meta:
            raise ValueError(f"{path} was not written by train.py (no config in its metadata); "
                             f"run stages={stage} to make one")
        return tensors, meta

    def finish(self, stage, tensors, scores, half=True):
        """Write a stage's result with what made it and what it scores. Its seconds are those of
        all its steps in the log, so that a restart does not hide any."""
        if not self.main:
            return
        log = self.dir / "log.jsonl"
        lines = map(json.loads, log.read_text().splitlines() if log.exists() else [])
        seconds = sum(r["sec"] for r in lines if r["stage"].split(".")[0] == stage)
        tensors = {k: v.half() if half and v.is_floating_point() else v
                   for k, v in tensors.items()}
        save_tensors(self.dir / f"{stage}.safetensors", tensors, {
            "version": 1, "config": self.fingerprint(stage), "command": self.command,
            "seconds": round(seconds, 1), "scores": scores})
        for path in self.dir.glob(f"{stage}*.resume.safetensors"):
            path.unlink()
        print(f"{stage}: " + ", ".join(f"{k} {v:.4g}" for k, v in scores.items())
              + f"  ({seconds:.0f} s of steps)", flush=True)

    def fast(self, model):
        """A copy of a model in the precision of rollouts and evaluation."""
        return copy.deepcopy(model).to(torch.bfloat16 if self.bf16 else torch.float32)

    def all_reduce(self, tensors):
        """Sum over ranks, in one flat buffer. Each rank's loss is its share of the global mean."""
        if self.world == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            tensor.copy_(part.view_as(tensor))

    def log(self, stage, step, logs, bar):
        if not self.main:
            return
        record = {"stage": stage, "step": step} | {
            k: round(float(v), 6) for k, v in logs.items()}
        with open(self.dir / "log.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        text = "  ".join(f"{k} {record[k]:.4g}" for k in SHOWN if k in record)
        if not bar.disable:
            bar.set_postfix_str(text, refresh=False)
        elif stage == "grow" or step % 50 == 0:
            print(f"{stage} {step}/{bar.total}: {text}", flush=True)

    def rewind_log(self, stage, step):
        """Drop this stage's lines from `step` on, so that each step stands in the log once."""
        path = self.dir / "log.jsonl"
        if self.main and path.exists():
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if not (
                (r := json.loads(line))["stage"] == stage and r["step"] >= step)]
            path.write_text("".join(line + "\n" for line in kept))

    def fit(self, stage, module, gradients, steps, lr, warmup=0, hold=0.0, decay=True,
            betas=(0.9, 0.98), weight_decay=0.01, ema=0.0, clip=1.0, part=""):
        """The one training loop. gradients(step) adds to .grad and returns numbers to log. The
        learning rate is `lr` times `schedule`, constant without decay. Resumes from the stage's own
        checkpoint. Returns the averaged weights (the last ones without ema) as a dict."""
        named = {k: p for k, p in module.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(named.values(), lr=1.0, betas=betas, foreach=True,
                                      weight_decay=weight_decay)
        average = Averaged(named, ema)
        path = self.dir / f"{stage}{part}.resume.safetensors"
        first = updates = 0                 # a step whose gradient is not finite is no update
        if path.exists():
            tensors, meta = load_tensors(path)
            if meta["config"] != self.fingerprint(stage):
                raise ValueError(f"{path} is of another config; remove it or use another out_dir")
            first, updates = meta["step"], meta.get("updates", meta["step"])
            for name, p in named.items():
                p.data.copy_(tensors[f"model.{name}"])
                average.mean[name].copy_(tensors[f"ema.{name}"])
                optimizer.state[p] = {"step": torch.tensor(float(updates)),
                                      "exp_avg": tensors[f"m.{name}"].to(p.device),
                                      "exp_avg_sq": tensors[f"v.{name}"].to(p.device)}
        self.rewind_log(stage + part, first)

        def save(step):
            tensors = {}
            for name, p in named.items():
                state = optimizer.state[p]
                tensors |= {f"model.{name}": p, f"ema.{name}": average.mean[name],
                            f"m.{name}": state["exp_avg"], f"v.{name}": state["exp_avg_sq"]}
            save_tensors(path, tensors, {"step": step, "updates": updates,
                                         "config": self.fingerprint(stage)})

        bar = tqdm(range(first, steps), initial=first, total=steps, desc=stage + part,
                   disable=not (self.main and sys.stderr.isatty()))
        saved, bad = time.time(), 0
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
                    raise RuntimeError(f"{stage}: the gradient was not finite for 10 steps in a "
                                       "row; lower the learning rate or raise the anchor")
            logs |= {"grad_norm": norm, "lr": rate, "sec": time.time() - started}
            self.log(stage + part, step, logs, bar)
            due = time.time() - saved > self.config.save_every_sec
            if self.main and due and updates and step + 1 < steps:
                save(step + 1)
                saved = time.time()
        return average.mean if ema > 0 else {k: p.detach() for k, p in named.items()}


# ---------------------------------------------------------------- stage: pre-training

def encode_corpus(vae, data, patch_frames):
    """Posterior means of whole utterances: list of (N, P, D), normalised."""
    latents = []
    for i in range(len(data.wavs)):
        mean = vae.encode(data.wav(i)[None])[0][0]                  # (T, D)
        latents.append(mean.view(-1, patch_frames, mean.shape[-1]))
    return latents


def collate(texts, patches):
    """Lists of ids and of (N, P, D) -> right-padded text, text_len, patches, n, in few shapes."""
    text_len = torch.tensor([len(t) for t in texts])
    n = torch.tensor([len(p) for p in patches])
    text = torch.zeros(len(texts), round_up(text_len.max(), 16), dtype=torch.long)
    padded = torch.zeros(len(texts), round_up(n.max(), 8), *patches[0].shape[1:])
    for i, (ids, p) in enumerate(zip(texts, patches)):
        text[i, :len(ids)], padded[i, :len(p)] = torch.tensor(ids), p
    return text, text_len, padded, n


def train_ditar(run):
    """Pre-training on (prompt, target) pairs of one speaker, all patches in the loss."""
    c, m = run.config.pretrain, run.config.model
    if c.pairs_per_step % run.world:
        raise ValueError(f"pretrain.pairs_per_step={c.pairs_per_step} does not divide over "
                         f"{run.world} ranks; use {round_up(c.pairs_per_step, run.world)}")
    data, vae = toy.corpus("pretrain", run.config.corpus), load_vae(run)
    latents = encode_corpus(vae, data, m.patch_frames)
    mates = {s: (data.speakers == s).nonzero()[0].tolist() for s in set(data.speakers.tolist())}
    torch.manual_seed(run.config.seed)
    model = DiTAR(m).to(run.device)
    model.aux = nn.Linear(m.lm.dim, m.patch_frames * m.latent_dim).to(run.device)

    def row(step, slot):
        """One row and its noise, a function of (seed, step, slot) alone: ids, (N, P, D) latents,
        t and drop (K, N), x_0 (K, N, P, D)."""
        g = run.generator("pretrain", step, slot)
        i = int(torch.randint(len(latents), (1,), generator=g))
        others = mates[data.speakers[i]]
        j = others[int(torch.randint(len(others), (1,), generator=g))]
        if float(torch.rand(1, generator=g)) < c.single_share:
            text, x_1 = data.texts[i], latents[i]
        else:
            text, x_1 = f"{data.texts[i]} {data.texts[j]}", torch.cat((latents[i], latents[j]))
        shape = (m.noise_mult, len(x_1))
        return (toy.encode_text(text), x_1, torch.rand(shape, generator=g),
                torch.rand(shape, generator=g) < m.drop_h,
                torch.randn(*shape, *x_1.shape[1:], generator=g))

    def gradients(step):
        rows = [row(step, slot) for slot in range(run.rank, c.pairs_per_step, run.world)]
        texts, patches, *noise = zip(*rows)
        text, text_len, x_1, n = (v.to(run.device) for v in collate(texts, patches))
        t, drop, x_0 = (torch.stack([F.pad(v, (0, 0) * (v.ndim - 2) + (0, x_1.shape[1] - v.shape[1]))
                                     for v in each], dim=1).to(run.device) for each in noise)
        share = run.sum(int(n.sum()))                               # patches of all ranks
        with run.autocast():
            flow, stop, h = pretrain_loss(model, text, text_len, x_1, n, t, x_0, drop)
            valid = valid_patches(n, x_1.shape[1])
            aux = (model.aux(h[valid]).float() - x_1[valid].flatten(1)).pow(2).mean()
        loss = flow + m.stop_weight * stop + c.aux_weight * aux
        (loss * (int(n.sum()) / share)).backward()
        return {"flow": flow.item(), "stop": stop.item(), "aux": aux.item()}

    weights = run.fit("pretrain", model, gradients, c.steps, c.lr, c.warmup, c.hold,
                      betas=c.betas, ema=c.ema)
    model.load_state_dict(weights)
    del model.aux
    run.finish("pretrain", model.state_dict(), ditar_scores(run, model, vae))


def ditar_scores(run, model, vae, n=256):
    """WER and SIM on the tune split (unheard voices), by the judges that will give the reward."""
    c = dataclasses.replace(run.config.evaluate, split="tune", n=n)
    run = Run(dataclasses.replace(run.config, evaluate=c), "")
    prompts, _ = held_out_prompts(run, vae)
    wavs, utterances = evaluate.speak(run.fast(model), vae, prompts, c, run.config.sample)
    records = evaluate.score(wavs, [u.stopped for u in utterances], prompts, load_judges(run))
    return {name: sum(r[name] for r in records) / len(records)
            for name in ("wer", "wer_held", "sim", "sim_held", "severe")}


def load_ditar(run, stage="pretrain"):
    """The model of a finished stage, with the config that it was made with."""
    tensors, meta = run.load(stage)
    model = DiTAR(build(ModelConfig, meta["config"]["model"]))
    model.load_state_dict(tensors)
    return model.to(run.device)


# ---------------------------------------------------------------- stages: GROW, evaluation

def load_streams(run):
    """The reward streams that the config gives a weight: name -> reward."""
    c, judges = run.config.rewards, load_judges(run)
    asr = judges["asr"] if c.asr == "toy" else rewards.Whisper(
        c.asr, run.device, c.lang, c.max_new_tokens)
    if c.speaker != "toy":
        raise ValueError(f"rewards.speaker={c.speaker!r}; the toy encoder is the only one so far")
    streams = {"wer": rewards.WERReward(asr, c), "sim": rewards.SIMReward(judges["speaker"])}
    unknown = sorted(set(c.weights) - set(streams))
    if unknown:
        raise ValueError(f"rewards.weights names {unknown}; the streams are {sorted(streams)}")
    return {name: streams[name] for name, weight in c.weights.items() if weight != 0}


def make_prompt(vae, data, i, text, patch_frames):
    """Prompt from utterance i of a corpus and a target text."""
    wav = data.wav(i)
    latents = vae.encode(wav[None])[0][0]                           # (T, D)
    return Prompt(toy.encode_text(f"{data.texts[i]} {text}"), len(text), text, wav,
                  latents.view(-1, patch_frames, latents.shape[-1]))


def prompt_source(run, vae):
    """draw(step, slot, attempt) -> Prompt of the RL split: prompt i, the text of another."""
    data, cache = toy.corpus("rl", run.config.corpus), {}

    def draw(step, slot, attempt):
        g = run.generator("prompt", step, slot, attempt)
        i, j = torch.randperm(len(data.wavs), generator=g)[:2].tolist()
        if i not in cache:
            cache[i] = make_prompt(vae, data, i, data.texts[j], run.config.model.patch_frames)
        p = cache[i]
        return Prompt(toy.encode_text(f"{data.texts[i]} {data.texts[j]}"), len(data.texts[j]),
                      data.texts[j], p.wav, p.latents)
    return draw


class GrowTrainer:
    """What train_grow and profile share: models, judges and one step's gradients."""

    def __init__(self, run):
        c = run.config.grow
        if c.prompts_per_step % run.world:
            raise ValueError(f"grow.prompts_per_step={c.prompts_per_step} does not divide over "
                             f"{run.world} ranks; use {round_up(c.prompts_per_step, run.world)}")
        ours = json.loads(json.dumps(asdict(run.config.model)))
        theirs = run.load("pretrain")[1]["config"]["model"]
        if theirs != ours:
            raise ValueError(f"{run.find('pretrain')} has another model section: "
                             f"{differences(theirs, ours)}; GROW starts from that model, so leave "
                             "its fields alone or run stages=pretrain")
        self.run, self.vae, self.streams = run, load_vae(run), load_streams(run)
        self.policy = load_ditar(run)
        self.policy.stop_head.requires_grad_(False)                 # no stop loss in RL
        self.reference = load_ditar(run).requires_grad_(False)
        self.actor = run.fast(self.reference)
        self.draw = prompt_source(run, self.vae)

    def gradients(self, step):
        run, c = self.run, self.run.config.grow
        for mine, theirs in zip(self.actor.parameters(), self.policy.parameters()):
            mine.data.copy_(theirs.data)
        return grow_step(
            self.policy, self.actor, self.reference, self.vae, self.streams,
            run.config.rewards.weights, lambda slot, attempt: self.draw(step, slot, attempt),
            range(run.rank, c.prompts_per_step, run.world),         # a group stays on one rank
            lambda *key: run.generator("grow", step, *key),
            c, run.config.sample, run.sum, run.autocast)


def train_grow(run):
    c = run.config.grow
    trainer = GrowTrainer(run)
    weights = run.fit("grow", trainer.policy, trainer.gradients, c.steps, c.lr, c.warmup,
                      decay=c.lr_decay, betas=c.betas, weight_decay=c.weight_decay,
                      ema=c.ema, clip=c.grad_clip)
    trainer.policy.load_state_dict(weights, strict=False)
    run.finish("grow", trainer.policy.state_dict(), {}, half=False)


def held_out_prompts(run, vae):
    """Prompt i of a held-out split is to say the text of utterance i^1 (the same voice), whose
    own audio is the real speech that bounds the scores. Returns prompts and real wavs."""
    data = toy.corpus(run.config.evaluate.split, run.config.corpus)
    n = min(run.config.evaluate.n, len(data.wavs) // 2 * 2)
    frames = run.config.model.patch_frames
    return ([make_prompt(vae, data, i, data.texts[i ^ 1], frames) for i in range(n)],
            [data.wav(i ^ 1) for i in range(n)])


def run_evaluate(run):
    c = run.config.evaluate
    vae, judges = load_vae(run), load_judges(run)
    prompts, real = held_out_prompts(run, vae)
    out = []
    for stage in ("pretrain", "grow"):
        started = time.time()
        wavs, utterances = evaluate.speak(run.fast(load_ditar(run, stage)), vae, prompts, c,
                                          run.config.sample)
        records = evaluate.score(wavs, [u.stopped for u in utterances], prompts, judges)
        print(f"evaluated {stage} on {len(prompts)} prompts, NFE {c.nfe} "
              f"({time.time() - started:.0f} s)", flush=True)
        out += [wavs, records]
    real_records = evaluate.score(real, [True] * len(real), prompts, judges)
    text = evaluate.write_report(run.dir, out[0], out[2], prompts, real_records, out[1], out[3],
                                 c.keep_wavs)
    print(f"\n{text}\n\nfigure, table, records and wav files: {run.dir}/", flush=True)


def open_run(folder):
    """The Run of an output folder of train.py, for sample.py and evaluate.py."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no output folder of train.py (no config.json in it); "
                         "train first, or name the folder that out_dir named")
    values = json.loads(path.read_text()) | {"out_dir": str(folder)}
    return Run(build(Config, values), "")


def evaluate_anew(folder, whisper, limit):
    """Speak and score the first `limit` held-out prompts again, with Whisper as a further judge.
    Returns the records before and after RL, and those of real speech."""
    run = open_run(folder)
    vae, judges = load_vae(run), load_judges(run)
    judge = rewards.Whisper(whisper, run.device, run.config.rewards.lang)
    prompts, real = (v[:limit] for v in held_out_prompts(run, vae))
    systems = [evaluate.speak(run.fast(load_ditar(run, stage)), vae, prompts, run.config.evaluate,
                              run.config.sample) for stage in ("pretrain", "grow")]
    stopped = [[u.stopped for u in utterances] for _, utterances in systems] + [[True] * len(real)]
    return [evaluate.score(wavs, ends, prompts, judges, judge)
            for wavs, ends in zip([w for w, _ in systems] + [real], stopped)]


# ---------------------------------------------------------------- entry point

def keep_freed_memory():
    """Tell glibc to keep what tensors free instead of handing it back to the kernel and faulting
    it in again at every step: up to half of a CPU step's time. Elsewhere this does nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mmap_max, trim_threshold, arena_max = -4, -1, -8
    for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (arena_max, 1)):
        mallopt(option, value)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--profile", action="store_true", help="time a few GROW steps and exit")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    args = parser.parse_intermixed_args(words)      # overrides may stand on both sides of --profile
    config = load_config(args.config, args.overrides)
    stages = STAGES if config.stages == ("all",) else config.stages
    for stage in stages:
        if stage not in STAGES:
            near = difflib.get_close_matches(stage, STAGES, n=1)
            raise ValueError(f"unknown stage {stage!r}; known are {', '.join(STAGES)}"
                             + (f"; did you mean {near[0]}?" if near else ""))
    run = Run(config, "python train.py " + " ".join(sys.argv[1:] if words is None else words))
    if args.profile:
        from bench import profile
        return profile(run)
    work = {"vae": toy.train_vae, "judges": train_judges, "pretrain": train_ditar,
            "grow": train_grow}
    todo = [stage for stage in stages if stage not in work or not run.done(stage)]
    if run.main:
        (run.dir / "config.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    for stage in stages:
        if stage == "corpus":
            for split in ("pretrain", "judge", "rl", "eval"):
                toy.corpus(split, config.corpus)
        elif stage == "evaluate":
            if run.main:
                run_evaluate(run)
        elif stage not in todo:
            print(f"{stage}: {run.dir / stage}.safetensors is there, skipped", flush=True)
        else:
            work[stage](run)
        run.barrier()


if __name__ == "__main__":
    keep_freed_memory()
    main()
