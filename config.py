"""The config of a run: one frozen dataclass per concept, a yaml file, `section.field=value` words.

A yaml file lists what differs from the defaults, which stand beside each field with unit and
reason. Unknown keys and wrong types stop the run and name the near one.
"""

import dataclasses
import difflib
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path

import yaml

import toy
from data import DataConfig
from evaluate import EvalConfig
from grow import GrowConfig
from guards import GuardConfig
from model import ModelConfig
from rewards import RewardConfig
from sample import SampleConfig
from toy_judges import JudgeConfig
from worlds import RealConfig


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
    guards: GuardConfig = GuardConfig()
    evaluate: EvalConfig = EvalConfig()

    def __post_init__(self):
        if self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last}; wanted 1 or more checkpoints")
        for name, known in (("autocast", ("auto", "on", "off")), ("world", ("toy", "real"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; wanted one of "
                                 f"{', '.join(known)}")


# ---------------------------------------------------------------- yaml -> dataclasses

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
