"""The config of a run: one frozen dataclass per concept, a yaml file, `section.field=value` words.

A yaml file lists what differs from the defaults, which stand beside each field with unit and
reason. Unknown keys and wrong types stop the run and name the near one.
"""

import dataclasses
import difflib
import math
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path

import torch
import yaml

import toy
from checks import at_least, shares
from data import DataConfig
from evaluate import EvalConfig
from grow import GrowConfig
from grpo import GrpoConfig, window_steps
from guards import GuardConfig
from model import ModelConfig
from rewards import RewardConfig
from sample import SampleConfig
from toy_judges import JudgeConfig
from worlds import RealConfig

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

    def __post_init__(self):
        at_least("pretrain", self, steps=1, pairs_per_step=1, lr=0, warmup=0, aux_weight=0)
        shares("pretrain", self, "single_share", "hold")
        shares("pretrain", self, "betas", "ema", one=False)


@dataclass(frozen=True)
class Config:
    out_dir: str = "out/run"
    method: str = "grow"            # or grpo, the paper's baseline
    world: str = "toy"              # or real: corpora, VAE and judges by path (worlds.py)
    weights_dir: str = ""           # where results of stages that this run does not make lie
    stages: tuple = ("grow", "evaluate")
    seed: int = 0
    device: str = "auto"            # auto: cuda when there is one
    autocast: str = "auto"          # auto: bf16 where the machine multiplies bf16 faster; or off
    save_every_sec: float = 60.0    # between a stage's own checkpoints
    keep_last: int = 1              # of them
    corpus: toy.CorpusConfig = toy.CorpusConfig()
    vae: toy.VAEConfig = toy.VAEConfig()
    judges: JudgeConfig = JudgeConfig()
    real: RealConfig = RealConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    pretrain: PretrainConfig = PretrainConfig()
    sample: SampleConfig = SampleConfig()
    rewards: RewardConfig = RewardConfig()
    grow: GrowConfig = GrowConfig()
    grpo: GrpoConfig = GrpoConfig()
    guards: GuardConfig = GuardConfig()
    evaluate: EvalConfig = EvalConfig()

    def __post_init__(self):
        if self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last}; wanted 1 or more checkpoints")
        for name, known in (("autocast", ("auto", "on", "off")), ("world", ("toy", "real")),
                            ("method", ("grow", "grpo"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; wanted one of "
                                 f"{', '.join(known)}")
        if self.save_every_sec < 0:
            raise ValueError(f"save_every_sec={self.save_every_sec}; wanted 0 or more")
        if 4 % self.model.patch_frames:
            raise ValueError(f"model.patch_frames={self.model.patch_frames}; audio is cut to whole "
                             "0.1 s, four frames: use 4, 2 or 1")
        if self.stages != ("all",):
            check_stages(self.stages)
        if self.method == "grpo":
            window_steps(self.grpo, self.sample.nfe)                # refuses nfe <= window

    @property
    def rl(self):
        """The section of the method that the grow stage runs."""
        return getattr(self, self.method)


def check_stages(stages):
    """Raises ValueError for stages that are unknown, none, twice or out of order."""
    for stage in stages:
        if stage not in STAGES:
            near = difflib.get_close_matches(stage, STAGES, n=1)
            raise ValueError(f"unknown stage {stage!r}; known are {', '.join(STAGES)}, or all"
                             + (f"; did you mean {near[0]}?" if near else ""))
    in_order = [stage for stage in STAGES if stage in stages]
    if not stages:
        raise ValueError(f"stages is empty; name some of {', '.join(STAGES)}, or all")
    if list(stages) != in_order:
        raise ValueError(f"stages={','.join(stages)}: each comes once, after those that it starts "
                         f"from; use stages={','.join(in_order)}")


def check_device(name):
    """Raises ValueError for a device that this machine does not have."""
    try:
        kind = "cpu" if name == "auto" else torch.device(name).type
    except RuntimeError:
        kind = None
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}; wanted auto, cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but PyTorch finds no CUDA GPU here; use device=auto or "
                         "device=cpu")


# ---------------------------------------------------------------- yaml -> dataclasses

def build(cls, values, where=""):
    """Dataclass from nested dicts. Raises ValueError that names unknown keys and wrong types."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    kwargs = {}
    for key, value in values.items():
        name = f"{where}{key}"
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
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
    if wanted is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)                   # yaml reads 1e-4 as a string
        except ValueError:
            number = None
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{name}={value}; wanted a finite number like {default!r}")
        value = value if number is None else number
    if wanted is str and isinstance(value, bool):
        return "on" if value else "off"             # yaml reads a bare off as False
    if wanted is tuple and isinstance(value, (list, tuple, str)):
        value = value.split(",") if isinstance(value, str) else value
        if isinstance(default[0], float) and len(value) != len(default):
            raise ValueError(f"{name}={value} has {len(value)} numbers; wanted {len(default)} like "
                             f"{list(default)}")
        return tuple(convert(v, default[0], f"{name}[{i}]") for i, v in enumerate(value))
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
    values = parse_yaml(Path(path).read_bytes(), path) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; wanted lines of key: value, as "
                         "in toy.yaml")
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
        node[last] = parse_yaml(value, f"override {word!r}")
    return build(Config, values)


def parse_yaml(text, where):
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is no yaml: {' '.join(str(error).split())}") from error
