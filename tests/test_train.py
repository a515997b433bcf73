"""What train.py promises: config, the training loop, files, and the whole method end to end."""
import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import soundfile
import torch
import torch.nn as nn

import bench
import evaluate
import rewards
import sample
import toy
import run as run_module
import train
from config import Config, build, load_config
from run import Averaged, Run, load_tensors, save_tensors, schedule, step_generator
from worlds import ToyWorld

ROOT = Path(__file__).resolve().parents[1]
MICRO = str(ROOT / "tests" / "micro.yaml")


# ---- config ------------------------------------------------------------------------------------

@pytest.fixture
def yaml_file(tmp_path):
    """Writes a yaml text and returns its path."""
    def write(text):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return str(path)
    return write


@pytest.mark.parametrize("text, message", (
    ("sead: 1", "unknown config key 'sead'; did you mean seed?"),
    ("zzz: 1", "unknown config key 'zzz'; known are out_dir, method, world, weights_dir"),
    ("grow: {lrr: 1}", "unknown config key 'grow.lrr'; did you mean grow.lr?"),
    ("model: {lm: {dims: 8}}", "unknown config key 'model.lm.dims'; did you mean model.lm.dim?"),
    ("grow: 3", "grow is a section; set its fields, e.g. grow.steps="),
    ("grow:", "grow is a section"),
    ("grow: {steps: many}", "grow.steps='many' is a str; wanted a int like 400"),
    ("grow: {steps: 1.5}", "grow.steps=1.5 is a float; wanted a int"),
    ("grow: {lr: fast}", "grow.lr='fast' is a str; wanted a float"),
    ("grow: {lr: true}", "grow.lr=True is a bool; wanted a float"),
    ("grow: {share_noise: 1}", "grow.share_noise=1 is a int; wanted a bool"),
    ("out_dir: 7", "out_dir=7 is a int; wanted a str"),
    ("grow: {group_size: 1}", "grow.group_size=1; one rollout has no baseline"),
    ("sample: {nfe: -3}", "sample.nfe=-3; wanted at least one Euler step"),
    ("rewards: {weights: {wer: much}}", "rewards.weights.wer='much' is a str; wanted a float"),
))
def test_a_wrong_config_is_refused_and_names_the_field(text, message, yaml_file):
    with pytest.raises(ValueError) as error:
        load_config(yaml_file(text))
    assert message in str(error.value)


@pytest.mark.parametrize("word, message", (
    ("grow.lr", "override 'grow.lr' is not of the form section.field=value"),
    ("grow.stepz=3", "unknown config key 'grow.stepz'; did you mean grow.steps?"),
    ("grow=3", "grow is a section"),
    ("seed.x=3", "seed is no section, it is 5"),
    ("out_dir.x=3", "out_dir={'x': 3} is a dict; wanted a str"),
))
def test_a_wrong_override_is_refused(word, message, yaml_file):
    with pytest.raises(ValueError) as error:
        load_config(yaml_file("seed: 5"), [word])
    assert message in str(error.value)


def test_values_come_from_defaults_then_yaml_then_overrides(yaml_file):
    path = yaml_file("grow: {lr: 1e-4, steps: 7}\npretrain: {betas: [0.5, 0.6]}\nautocast: off\n"
                     "model: {lm: {dim: 64}}")
    c = load_config(path, ["grow.steps=9", "out_dir=x/y", "stages=vae,grow", "model.lm.layers=2",
                           "grow.share_noise=true", "grow.beta_w2=1", "sample.cfg_scale=1e-1",
                           "rewards.weights.wer=2"])
    assert c.grow.lr == 1e-4                            # yaml itself reads 1e-4 as a string
    assert (c.grow.steps, c.out_dir, c.stages) == (9, "x/y", ("vae", "grow"))
    assert (c.model.lm.dim, c.model.lm.layers) == (64, 2)
    assert c.model.lm.heads == Config().model.lm.heads
    assert c.pretrain.betas == (0.5, 0.6) and c.grow.share_noise is True
    assert c.grow.beta_w2 == 1.0 and isinstance(c.grow.beta_w2, float)
    assert c.sample.cfg_scale == 0.1 and c.rewards.weights["wer"] == 2.0
    assert c.autocast == "off"                          # which yaml reads as False
    assert load_config(path, ["stages=all"]).stages == ("all",)
    assert load_config(path, ["autocast=on"]).autocast == "on"


def test_an_empty_file_is_the_default_config(yaml_file):
    assert load_config(yaml_file("# nothing\n")) == Config()


@pytest.mark.parametrize("name", ("toy.yaml", "tests/micro.yaml"))
def test_the_configs_of_this_repository_load_and_survive_json(name):
    c = load_config(str(ROOT / name))
    assert build(Config, json.loads(json.dumps(asdict(c)))) == c


def test_a_missing_config_file_and_an_unknown_stage_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no config file 'none.yaml'; toy.yaml is the one"):
        train.main(["--config", "none.yaml"])
    for word, hint in (("stages=grwo", "did you mean grow"),
                       ("stages=vae,xyz", "known are corpus")):
        with pytest.raises(ValueError, match="unknown stage .*" + hint):
            train.main(["--config", MICRO, word, f"out_dir={tmp_path / 'x'}"])
    assert not (tmp_path / "x").exists()                # before anything is made


# ---- pieces of the loop ------------------------------------------------------------------------

def test_the_schedule_warms_up_holds_and_decays_linearly():
    assert [schedule(i, 14, 4) for i in range(14)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, *(i / 10 for i in range(10, 0, -1))])
    assert [schedule(i, 10, 2, hold=0.5) for i in range(10)] == pytest.approx(
        [0.5, 1.0, 1, 1, 1, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert schedule(0, 5, 0) == 1.0 and schedule(4, 5, 0) == pytest.approx(0.2)


def test_a_step_generator_depends_on_its_key_alone():
    def draw(*key):
        return torch.randn(4, generator=step_generator(*key))
    state = torch.get_rng_state()
    first = draw(0, "grow", 3)
    others = [draw(0, "grow", 4), draw(0, "vae", 3), draw(1, "grow", 3), draw(0, "grow", 3, 0)]
    assert torch.equal(draw(0, "grow", 3), first)
    assert all((other - first).abs().max() > 1e-3 for other in others)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_moving_average_follows_its_recurrence():
    p = nn.Parameter(torch.tensor([1.0]))
    average, mean = Averaged({"p": p}, 0.5), 1.0
    for step in range(20):
        p.data.fill_(float(step))
        average.update(step)
        decay = min(0.5, (step + 1) / (step + 10))      # 0.1 at first
        mean = decay * mean + (1 - decay) * step
        assert average.mean["p"].item() == pytest.approx(mean, rel=1e-6)
    assert decay == 0.5


# ---- files -------------------------------------------------------------------------------------

def test_tensors_and_metadata_survive_saving(tmp_path):
    path = tmp_path / "deep" / "x.safetensors"
    tensors = {"a": torch.randn(3, 4).T, "h": torch.randn(5).half(), "i": torch.arange(3)}
    meta = {"config": {"grow": {"lr": 1e-4}}, "scores": {}, "seconds": 1.5}
    save_tensors(path, tensors, meta)
    back, back_meta = load_tensors(path)
    assert back_meta == meta and list(path.parent.iterdir()) == [path]      # no scratch file
    assert torch.equal(back["a"], tensors["a"]) and torch.equal(back["i"], tensors["i"])
    assert back["h"].dtype == torch.float32 and torch.equal(back["h"], tensors["h"].float())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.zeros(2)}, {})
    monkeypatch.setattr(run_module, "save_file", lambda tensors, where, metadata: (
        Path(where).write_bytes(b"half"), 1 / 0))
    with pytest.raises(OSError, match="could not write .*x.safetensors .division by zero.; what "
                                      "was there before is untouched"):
        save_tensors(path, {"a": torch.ones(2)}, {})
    assert list(tmp_path.iterdir()) == [path]                       # no half-written file stays
    assert torch.equal(load_tensors(path)[0]["a"], torch.zeros(2))


@pytest.mark.parametrize("damage", ("cut tail", "cut head", "text", "empty", "missing"))
def test_a_file_that_cannot_be_read_is_named(damage, tmp_path):
    path = tmp_path / "vae.safetensors"
    save_tensors(path, {"a": torch.randn(100)}, {"step": 1})
    data = path.read_bytes()
    path.write_bytes({"cut tail": data[:-10], "cut head": data[:20], "text": b"hello " * 50}.get(
        damage, b""))
    if damage == "missing":
        path.unlink()
    with pytest.raises(ValueError, match=r"vae\.safetensors is no readable safetensors file"):
        load_tensors(path)


def micro_run(folder, *words, cls=Run):
    return cls(load_config(MICRO, [f"out_dir={folder}", "autocast=off", *words]), "a command")


def test_a_stage_of_another_config_is_refused_and_the_field_named(tmp_path):
    run = micro_run(tmp_path)
    assert not run.done("grow")
    run.finish("grow", {"a": torch.zeros(1)}, {})
    assert run.done("grow")
    assert micro_run(tmp_path, "evaluate.n=4", "vae.steps=7", "stages=grow").done("grow")
    for word, field in (("grow.lr=1e-3", "grow section: lr 0.0001 there, 0.001 now"),
                        ("model.lm.dim=32", "model section: lm .*'dim': 64"),
                        ("sample.nfe=9", "sample section: nfe 2 there, 9 now"),
                        ("seed=3", "seed section: 0 there, 3 now")):
        with pytest.raises(ValueError, match=f"grow.safetensors was made with another {field}"):
            micro_run(tmp_path, word).done("grow")


def test_a_foreign_file_in_a_stages_place_is_refused(tmp_path):
    run = micro_run(tmp_path)
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "vae.safetensors")
    with pytest.raises(ValueError, match="vae.safetensors was not written by train.py"):
        run.done("vae")


def test_a_missing_stage_says_where_it_was_sought_and_out_dir_comes_first(tmp_path):
    run = micro_run(tmp_path / "a", f"weights_dir={tmp_path / 'w'}")
    with pytest.raises(ValueError, match="no vae.safetensors in .*a or .*w; run stages=vae first"):
        run.load("vae")
    other = micro_run(tmp_path / "w")
    other.finish("vae", {"a": torch.tensor([1.0])}, {"log_mel_l1": 0.5})
    tensors, meta = run.load("vae")
    assert tensors["a"] == 1 and meta["scores"] == {"log_mel_l1": 0.5}
    assert meta["command"] == "a command" and meta["config"]["vae"] == asdict(run.config.vae)
    run.finish("vae", {"a": torch.tensor([2.0])}, {})
    assert run.load("vae")[0]["a"] == 2


@pytest.mark.parametrize("word, ranks, message", (
    ("grow.prompts_per_step=2", 4, "grow.prompts_per_step=2 does not divide over 4 ranks; use 4"),
    ("grow.prompts_per_step=10", 4, "prompts_per_step=10 does not divide over 4 ranks; use 12"),
    ("stages=pretrain", 3, "pretrain.pairs_per_step=4 does not divide over 3 ranks; use 6")))
def test_work_that_does_not_divide_over_ranks_is_refused_before_any(word, ranks, message, tmp_path,
                                                                    monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ValueError, match=message):
        train.main(["--config", MICRO, f"out_dir={tmp_path / 'out'}", "stages=grow", word])
    assert not list(tmp_path.iterdir())                             # not even the folder


# ---- fit ---------------------------------------------------------------------------------------

class Stopped(Exception):
    pass


def fit(folder, steps=8, ema=0.9, hook=lambda step, module: None, save=0.0, stage="vae",
        scale=1.0):
    """Fits a line to noise of the run's generators; hook(step, module) runs after the backward
    pass. Returns the weights, the log without times, and the module's last weights."""
    run = micro_run(folder, f"save_every_sec={save}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Linear(3, 2)

    def gradients(step):
        x, y = (torch.randn(8, n, generator=run.generator("fit", step)) for n in (3, 2))
        loss = scale * (module(x) - y).pow(2).mean()
        loss.backward()
        hook(step, module)
        return {"loss": loss.item()}
    weights = run.fit(stage, module, gradients, steps, 0.05, warmup=2, ema=ema)
    return {k: v.clone() for k, v in weights.items()}, log_of(folder), module.state_dict()


def log_of(folder):
    lines = (Path(folder) / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("sec")}
            for line in lines]


def assert_same_fit(a, b):
    for x, y in zip(a, b):
        if isinstance(x, dict):
            assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
        else:
            assert x == y


@pytest.mark.parametrize("ema", (0.0, 0.9))
def test_a_fit_that_was_interrupted_ends_as_if_it_had_not_been(ema, tmp_path):
    whole = fit(tmp_path / "whole", ema=ema)
    part, kept = tmp_path / "part", tmp_path / "vae.0000004.resume.safetensors"

    def crash(step, module):
        if step == 4:                                   # what was saved after steps 0-3
            shutil.copy(part / kept.name, kept)
        if step == 6:
            raise Stopped
    with pytest.raises(Stopped):
        fit(part, ema=ema, hook=crash)
    assert [r["step"] for r in log_of(part)] == list(range(6))
    assert [p.name for p in part.glob("*.resume.*")] == ["vae.0000006.resume.safetensors"]
    (part / "vae.0000006.resume.safetensors").unlink()  # steps 4 and 5 are lost, but in the log
    shutil.copy(kept, part)
    asked = []
    continued = fit(tmp_path / "part", ema=ema, hook=lambda step, module: asked.append(step))
    assert asked == [4, 5, 6, 7]
    assert_same_fit(continued, whole)
    assert [r["step"] for r in continued[1]] == list(range(8))


def test_a_half_written_log_line_and_other_stages_lines_survive_an_interruption(tmp_path):
    def crash(step, module):
        if step == 3:
            raise Stopped
    with pytest.raises(Stopped):
        fit(tmp_path, hook=crash)
    log = tmp_path / "log.jsonl"
    log.write_text('{"stage": "judges.asr", "step": 7}\n' + log.read_text() + '{"stage": "va')
    _, records, _ = fit(tmp_path)
    assert records[0] == {"stage": "judges.asr", "step": 7}
    assert [r["step"] for r in records[1:]] == list(range(8))


def test_without_a_checkpoint_the_fit_begins_anew_and_seldom_saving_saves_nothing(tmp_path):
    def crash(step, module):
        if step == 5:
            raise Stopped
    with pytest.raises(Stopped):
        fit(tmp_path / "a", hook=crash, save=1e6)
    assert not list((tmp_path / "a").glob("*.resume.safetensors"))
    assert_same_fit(fit(tmp_path / "a", save=1e6), fit(tmp_path / "b", save=0))


def test_a_checkpoint_of_another_config_is_not_continued(tmp_path):
    run = micro_run(tmp_path, "save_every_sec=0")
    module = nn.Linear(1, 1)

    def gradients(step):
        module(torch.ones(1, 1)).sum().backward()
        return {}
    run.fit("vae", module, gradients, 3, 0.1)
    with pytest.raises(ValueError, match="vae.0000003.resume.safetensors is of another vae section"
                                         ": lr 0.002 there, 1.0 now"):
        micro_run(tmp_path, "vae.lr=1").fit("vae", module, gradients, 3, 0.1)


def poison(*steps):
    """A hook that makes the gradient of these steps not a number."""
    def hook(step, module):
        if step in steps:
            module.bias.grad[0] = math.nan
    return hook


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path):
    seen = {}

    def hook(step, module):
        seen[step] = [p.detach().clone() for p in module.parameters()]
        poison(3)(step, module)
    weights, log, _ = fit(tmp_path, hook=hook, ema=0.0)
    moved = [max((a - b).abs().max().item() for a, b in zip(seen[i], seen[i + 1]))
             for i in range(7)]
    assert moved[3] == 0 and min(moved[:3] + moved[4:]) > 0
    assert math.isnan(log[3]["grad_norm"]) and len(log) == 8
    assert all(torch.isfinite(w).all() for w in weights.values())


def test_after_a_skipped_step_continuing_is_still_exact(tmp_path):
    whole = fit(tmp_path / "whole", hook=poison(0, 2))

    def crash(step, module):
        poison(0, 2)(step, module)
        if step == 5:
            raise Stopped
    with pytest.raises(Stopped):
        fit(tmp_path / "part", hook=crash)
    continued = fit(tmp_path / "part", hook=poison(0, 2))
    assert str(continued[1]) == str(whole[1])           # as text: nan equals nan
    assert_same_fit((continued[0], continued[2]), (whole[0], whole[2]))


def test_ten_gradients_in_a_row_that_are_not_finite_stop_the_run(tmp_path):
    fit(tmp_path / "nine", steps=21, hook=poison(*range(1, 10), *range(11, 20)))
    with pytest.raises(RuntimeError, match="vae: the gradient was not finite for 10 steps"):
        fit(tmp_path / "ten", steps=21, hook=poison(*range(1, 11)))


def test_the_gradient_is_clipped_to_norm_one_and_logged_before(tmp_path):
    norms = []

    class Spy(Run):
        def log(self, stage, step, logs, bar):
            norms.append((logs["grad_norm"], math.sqrt(sum(
                p.grad.pow(2).sum().item() for p in module.parameters()))))
    module = nn.Linear(3, 2)

    def gradients(step):
        module(torch.ones(1, 3)).sum().mul(100 if step else 0.01).backward()
        return {}
    micro_run(tmp_path, cls=Spy).fit("vae", module, gradients, 2, 0.1)
    assert norms[0][0] == pytest.approx(norms[0][1]) and norms[0][0] < 0.1
    assert norms[1][0] > 100 and norms[1][1] == pytest.approx(1, rel=1e-3)


def test_averaged_weights_are_returned_and_the_module_keeps_the_last_ones(tmp_path):
    weights, _, last = fit(tmp_path / "a", ema=0.9)
    assert max((weights[k] - last[k]).abs().max().item() for k in last) > 1e-4
    weights, _, last = fit(tmp_path / "b", ema=0.0)
    assert all(torch.equal(weights[k], last[k]) for k in last)


def test_the_learning_rate_decays_or_stays_as_asked(tmp_path):
    _, log, _ = fit(tmp_path / "a")
    assert [r["lr"] for r in log] == pytest.approx(
        [0.05 * schedule(i, 8, 2) for i in range(8)], abs=1e-6)
    run, module = micro_run(tmp_path / "b"), nn.Linear(1, 1)

    def gradients(step):
        module(torch.ones(1, 1)).sum().backward()
        return {}
    run.fit("grow", module, gradients, 4, 0.05, decay=False)
    assert [r["lr"] for r in log_of(tmp_path / "b")] == [0.05] * 4


# ---- pre-training's batches --------------------------------------------------------------------

def test_rows_are_padded_on_the_right():
    text, text_len, patches, n = train.collate(
        [[3, 4], [5]], [torch.ones(1, 2, 3), 2 * torch.ones(3, 2, 3)])
    assert text_len.tolist() == [2, 1] and n.tolist() == [1, 3]
    assert text[:, :2].tolist() == [[3, 4], [5, 0]] and not text[:, 2:].any()
    assert patches.shape[2:] == (2, 3) and (patches[0, 0] == 1).all() and not patches[0, 1:].any()
    assert (patches[1, :3] == 2).all() and not patches[1, 3:].any()


# ---- the whole method, from nothing ------------------------------------------------------------

@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    """tests/micro.yaml run end to end from an empty folder."""
    folder = tmp_path_factory.mktemp("micro")
    words = ["--config", MICRO, f"out_dir={folder / 'run'}",
             f"corpus.cache_dir={folder / 'corpus'}", "autocast=off"]
    text, trainers = io.StringIO(), []

    class KeptTrainer(train.GrowTrainer):
        def __init__(self, *args):
            super().__init__(*args)
            trainers.append(self)
    with contextlib.redirect_stdout(text), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "GrowTrainer", KeptTrainer)
        train.main(words)
    (trainer,) = trainers
    return SimpleNamespace(dir=folder / "run", words=words, text=text.getvalue(), trainer=trainer)


def test_every_stage_leaves_weights_config_command_seconds_and_scores(micro):
    keys = {"vae": {"log_mel_l1"}, "pretrain": {"wer", "sim"}, "grow": set(), "judges": {
        "asr_wer_real", "asr_wer_vae", "asr_held_wer_real", "asr_held_wer_vae", "speaker_same",
        "speaker_other", "speaker_vae", "speaker_held_same", "speaker_held_other",
        "speaker_held_vae"}}
    for stage, scores in keys.items():
        tensors, meta = load_tensors(micro.dir / f"{stage}.safetensors")
        assert all(torch.isfinite(t).all() for t in tensors.values()), stage
        assert scores <= set(meta["scores"]) and meta["version"] == 1, stage
        assert all(math.isfinite(v) for v in meta["scores"].values())
        assert meta["command"].startswith("python train.py --config ") and meta["seconds"] > 0
        assert {"corpus", "seed"} < set(meta["config"])
    assert not list(micro.dir.glob("*.resume.safetensors"))
    assert not list(micro.dir.glob("*.tmp"))
    assert json.loads((micro.dir / "config.json").read_text())["grow"]["group_size"] == 4


def test_each_step_of_each_stage_stands_in_the_log_once(micro):
    steps = {}
    for record in log_of(micro.dir):
        steps.setdefault(record["stage"], []).append(record["step"])
    expected = {"vae": 15, "judges.asr": 10, "judges.asr_held": 10, "judges.speaker": 10,
                "judges.speaker_held": 10, "pretrain": 10, "grow": 3}
    assert steps == {stage: list(range(n)) for stage, n in expected.items()}


def test_grows_log_has_what_the_readme_tells_one_to_watch(micro):
    for record in [json.loads(line) for line in (micro.dir / "log.jsonl").read_text().splitlines()
                   if '"grow"' in line]:
        assert set(record) >= {
            "wer", "wer_spread", "sim", "sim_spread", "discarded", "policy", "anchor", "grad_norm",
            "sec_rollout", "sec_decode", "sec_reward", "sec_update", "audio_sec", "caps", "bad",
            "seconds", "rate", "silence", "loudness", "below_anchor", "skipped"}
    assert "noise of the rewards (their spread within a group): wer " in micro.text


def test_probes_stand_in_the_log_and_the_best_weights_are_kept(micro, tmp_path, capsys):
    train.main([*micro.words, f"out_dir={tmp_path}", f"weights_dir={micro.dir}", "stages=grow",
                "guards.probe_every=1", "guards.probe_n=4", "guards.probe_nfe=1",
                "guards.warm_steps=1", "guards.anchor=1e-9"])
    scores = [r["held_out_sim"] - r["held_out_wer"] for r in log_of(tmp_path)]
    best, meta = load_tensors(tmp_path / "grow.best.safetensors")
    assert len(scores) == 3 and meta["step"] == scores.index(max(scores))
    assert meta["score"] == pytest.approx(max(scores), abs=2e-6)
    last = load_tensors(tmp_path / "grow.safetensors")[0]
    assert best.keys() == last.keys()
    train.load_ditar(train.open_run(tmp_path), "grow.best")         # sample.py speaks it
    if meta["step"] == 2:
        assert all(torch.equal(best[k], last[k]) for k in best)
    straight = load_tensors(micro.dir / "grow.safetensors")[0]
    assert all(torch.equal(straight[k], last[k]) for k in last)     # probing changes nothing
    assert capsys.readouterr().out.count("warning at step 1: anchor was") == 1


def test_grow_moves_the_policy_but_neither_its_stop_head_nor_the_reference(micro):
    before, after = (load_tensors(micro.dir / f"{s}.safetensors")[0] for s in ("pretrain", "grow"))
    assert before.keys() == after.keys()                # and the auxiliary head is gone
    assert not any(name.startswith("aux") for name in before)
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    assert all((delta == 0) == name.startswith("stop_head") for name, delta in moved.items())
    reference = micro.trainer.reference.state_dict()
    assert reference.keys() == before.keys()
    assert all(torch.equal(value, before[name].float()) for name, value in reference.items())


def test_grpo_is_another_method_of_the_same_stage(micro, tmp_path):
    words = [*micro.words, f"out_dir={tmp_path}", f"weights_dir={micro.dir}", "stages=grow",
             "sample.nfe=5", "grpo.steps=2", "grpo.prompts_per_step=2", "grpo.group_size=4",
             "grpo.lr=1e-4"]
    train.main([*words, "method=grpo"])
    before, after = load_tensors(micro.dir / "pretrain.safetensors")[0], load_tensors(
        tmp_path / "grow.safetensors")[0]
    moved = {name for name in before if (after[name] != before[name]).any()}
    assert moved and all(name.startswith("locdit") for name in moved)
    records = log_of(tmp_path)
    assert len(records) == 2 and all(r["ratio_max"] == pytest.approx(1, abs=1e-5) for r in records)
    with pytest.raises(ValueError, match="made with another method section"):
        train.main([*words, "method=grow"])
    with pytest.raises(ValueError, match="sample.nfe|window"):
        train.main([*micro.words, f"out_dir={tmp_path / 'x'}", "method=grpo", "sample.nfe=3"])


def test_what_was_made_from_stages_that_are_to_be_made_anew_is_refused(micro, tmp_path):
    shutil.copy(micro.dir / "grow.safetensors", tmp_path)
    words = [*micro.words, f"out_dir={tmp_path}", f"weights_dir={micro.dir}"]
    with pytest.raises(ValueError, match=r"grow\*.safetensors was made from another vae, judges, "
                                         "pretrain than this run is to make"):
        train.main([*words, "stages=all"])
    (tmp_path / "grow.safetensors").rename(tmp_path / "grow.0000001.resume.safetensors")
    with pytest.raises(ValueError, match="grow.* was made from another vae"):
        train.main([*words, "stages=all"])              # nor is a half of it continued
    assert not (tmp_path / "vae.safetensors").exists()              # before any slow step


def test_the_report_is_there(micro):
    table = (micro.dir / "table.md").read_text()
    assert "| 1 run(s) x 8 prompts | before | after |" in table and table.strip() in micro.text
    assert (micro.dir / "figure.png").stat().st_size > 10_000
    for name in ("real", "before", "after"):
        rows = evaluate.read_records(micro.dir / f"eval_{name}.jsonl")
        assert len(rows) == 8
        assert {"wer", "wer_held", "sim", "sim_held", "severe", "hyp"} <= set(rows[0])
    wavs = list((micro.dir / "wavs").iterdir())
    assert len(wavs) <= 6 and len(wavs) % 3 == 0
    for path in wavs:
        wav, rate = soundfile.read(path)
        assert rate == 16_000 and wav.ndim == 1 and np.abs(wav).max() > 0


def test_the_table_can_be_printed_again_from_the_command_line(micro):
    done = subprocess.run([sys.executable, "evaluate.py", "--ckpt", str(micro.dir)], cwd=ROOT,
                          capture_output=True, text=True, check=True)
    assert done.stdout == (micro.dir / "table.md").read_text()


def test_a_second_run_skips_every_stage_and_leaves_its_file(micro, capsys):
    files = {path: path.read_bytes() for path in micro.dir.glob("*.safetensors")}
    log, table = ((micro.dir / name).read_text() for name in ("log.jsonl", "table.md"))
    train.main([*micro.words, "stages=all"])
    out = capsys.readouterr().out
    assert len(files) == 4
    for path, data in files.items():
        assert path.read_bytes() == data
        assert f"{path.stem}: {path} is there, skipped" in out
    assert (micro.dir / "log.jsonl").read_text() == log
    assert (micro.dir / "table.md").read_text() == table            # evaluation repeats itself


def test_profile_reports_where_a_step_goes_and_trains_nothing(micro, tmp_path, capsys):
    train.main([*micro.words, "--profile", f"out_dir={tmp_path}", f"weights_dir={micro.dir}"])
    out = capsys.readouterr().out
    for word in ("rollout ", "decode ", "reward ", "update ", "step ", "rollouts/s", "GFLOP/s"):
        assert word in out
    assert not list(tmp_path.glob("*.safetensors"))


def test_signal_finds_the_share_that_two_gradients_have_in_common(monkeypatch):
    layer = nn.Linear(400, 1)                           # its bias gets no gradient

    def gradients(step):
        assert layer.weight.grad is None                # nothing of the batch before
        layer.weight.grad = 1 + 2 * torch.randn(1, 400,         # signal 1, noise 4
                                                generator=torch.Generator().manual_seed(step))
    trainer = SimpleNamespace(policy=SimpleNamespace(locdit=layer, zero_grad=layer.zero_grad),
                              gradients=gradients)
    monkeypatch.setattr(bench, "scratch_trainer", lambda config: contextlib.nullcontext(
        (None, trainer)))
    cosines = bench.signal(None, 12)
    assert cosines.shape == (66,) and cosines.mean() == pytest.approx(1 / 5, abs=0.03)


def test_signal_runs_for_both_methods_and_too_few_batches_are_refused(micro, capsys):
    words = [*micro.words, "--signal"]
    with pytest.raises(ValueError, match="--signal 2; wanted 3"):
        bench.main([*words, "2"])
    grpo = ["method=grpo", "sample.nfe=4", "grpo.prompts_per_step=1", "grpo.group_size=4"]
    for method in ([], grpo):
        bench.main([*words, "3", *method])
        assert "% of a gradient's squared length is signal" in capsys.readouterr().out


def test_evaluation_prompts_say_a_held_out_text_in_the_voice_that_said_it(micro):
    run = train.open_run(micro.dir)
    prompts, real = ToyWorld(run).held_out(8)
    data = toy.corpus("eval", run.config.corpus)
    assert len(prompts) == len(real) == 8               # of 16: evaluate.n
    for i, p in enumerate(prompts):
        other = i + 1 if i % 2 == 0 else i - 1
        assert p.text == data.texts[other] and torch.equal(real[i], data.wav(other))
        assert torch.equal(p.wav, data.wav(i)) and data.speakers[i] == data.speakers[other]
        assert p.token_ids == toy.encode_text(f"{data.texts[i]} {p.text}")
        assert p.n_target == len(p.text)
        assert len(p.latents) * 1_600 == len(p.wav)


def test_rewards_and_evaluation_share_the_judges_that_the_config_names(micro, tmp_path, monkeypatch):
    class Named:
        def __init__(self, folder, device, lang, limit):
            self.folder = folder
    monkeypatch.setattr(rewards, "Whisper", Named)
    run = train.open_run(micro.dir)
    run.config = replace(run.config, rewards=replace(run.config.rewards, asr=str(tmp_path)))
    world = ToyWorld(run)
    world.check(("grow",))
    assert world.judges["asr"].folder == str(tmp_path)
    assert world.streams()["wer"].asr is world.judges["asr"]
    assert world.streams()["sim"].speaker is world.judges["speaker"]
    assert isinstance(world.judges["asr_held"], nn.Module)          # the toy's own, as ever
    for words, message in ((["rewards.lang=auto"], "the toy world speaks English: use en"),
                           (["rewards.asr=nowhere"], "asr='nowhere' is no folder here")):
        with pytest.raises((ValueError, OSError), match=message):
            train.main([*micro.words, f"out_dir={tmp_path / 'x'}", *words])


def test_pretraining_without_the_judges_that_score_it_is_refused_at_once(micro, tmp_path):
    shutil.copy(micro.dir / "vae.safetensors", tmp_path)
    with pytest.raises(ValueError, match="no judges.safetensors in .*run stages=judges first"):
        train.main([*micro.words, f"out_dir={tmp_path}", "stages=pretrain"])
    assert not (tmp_path / "log.jsonl").exists()


def test_without_espeak_a_run_is_refused_before_any_slow_step(micro, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(ImportError, match="eSpeak NG.*pip install espeakng-loader"):
        train.main([*micro.words, f"out_dir={tmp_path}", f"corpus.cache_dir={tmp_path / 'new'}",
                    "stages=all"])
    assert not list(tmp_path.glob("*.safetensors"))
    train.main([*micro.words, f"out_dir={tmp_path}", "stages=corpus"])      # cached: no need of it


def test_whisper_judges_several_runs_and_what_they_share_once(micro, tmp_path, monkeypatch, capsys):
    heard, spoken = [], []

    class Loops:                                        # on the last clip, as Whisper may
        def __init__(self, folder, device, lang):
            assert (folder, lang) == ("whisper", "en")

        def transcribe(self, wavs):
            heard.append(len(wavs))
            return ["no"] * (len(wavs) - 1) + ["no " * 100]

    def speak(model, *rest):
        spoken.append(model)
        return real_speak(model, *rest)
    real_speak = evaluate.speak
    monkeypatch.setattr(evaluate, "Whisper", Loops)
    monkeypatch.setattr(evaluate, "speak", speak)
    other = tmp_path / "other"
    shutil.copytree(micro.dir, other)
    tensors, meta = load_tensors(other / "grow.safetensors")
    tensors["stop_head.bias"][1] -= 1                   # another result of RL
    save_tensors(other / "grow.safetensors", tensors, {k: v for k, v in meta.items()
                                                       if k != "digest"})
    evaluate.main(["--ckpt", str(micro.dir), str(other), "--whisper", "whisper", "--limit", "4"])
    out = capsys.readouterr().out
    assert "2 run(s) x 4 prompts" in out and "WER % (Whisper)" in out and "at most 100" in out
    assert len(spoken) == 3 and len(heard) == 4         # the start and real speech: once
    for folder in (micro.dir, other):
        for name in ("before", "after", "real"):
            records = evaluate.read_records(folder / f"whisper_{name}.jsonl")
            assert len(records) == 4 and records[-1]["wer_whisper_capped"] == 1
            assert records[-1]["wer_whisper"] > 10
    evaluate.main(["--ckpt", str(micro.dir)])           # the run's own table is as it was
    assert "Whisper" not in capsys.readouterr().out
    (other / "grow.safetensors").unlink()
    with pytest.raises(ValueError, match="no grow.safetensors in"):
        evaluate.main(["--ckpt", str(micro.dir), str(other), "--whisper", "whisper"])
    assert len(spoken) == 3                             # refused before any slow step


def test_prompts_of_rl_are_a_function_of_step_slot_and_attempt(micro):
    run = train.open_run(micro.dir)
    vae, data = toy.load_vae(run), toy.corpus("rl", run.config.corpus)
    draw, again = ToyWorld(run).prompt, ToyWorld(run).prompt
    keys = [(step, slot, attempt) for step in range(3) for slot in (0, 1) for attempt in (0, 1)]
    prompts = [draw(*key) for key in keys]
    for key, p in reversed(list(zip(keys, prompts))):
        q = again(*key)
        assert (q.text, q.token_ids) == (p.text, p.token_ids) and torch.equal(q.wav, p.wav)
        i = next(i for i in range(len(data.wavs)) if torch.equal(data.wav(i), p.wav))
        assert p.token_ids == toy.encode_text(f"{data.texts[i]} {p.text}")
        torch.testing.assert_close(p.latents.flatten(0, 1), vae.encode(p.wav[None])[0][0],
                                   atol=1e-5, rtol=1e-5)
    assert len({(p.text, len(p.wav)) for p in prompts}) > 6


# ---- two processes -----------------------------------------------------------------------------

def torchrun(*words):
    """train.py as two processes on one machine; the words come after the config."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         "train.py", "--config", *words], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3_000:]


def norms_of(folder, *stages):
    return [r["grad_norm"] for r in log_of(folder) if r["stage"].split(".")[0] in stages]


def test_grow_on_two_processes_is_grow_on_one(micro, tmp_path):
    torchrun(*micro.words[1:], f"out_dir={tmp_path}", f"weights_dir={micro.dir}", "stages=grow")
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == ["grow.safetensors"]
    one, two, start = (load_tensors(path / f"{stage}.safetensors")[0] for path, stage in (
        (micro.dir, "grow"), (tmp_path, "grow"), (micro.dir, "pretrain")))
    one, two, start = (torch.cat([t[k].flatten() for k in sorted(one)]) for t in (one, two, start))
    assert (one - start).abs().max() > 1e-4
    # Adam divides rounding by rounding where a gradient is nearly zero: a handful may differ more
    apart = (one - two).abs()
    assert (apart > 1e-5).sum() <= 20 and apart.max() < 1e-4
    assert (one - two).norm() < 1e-3 * (one - start).norm()
    norms = [norms_of(folder, "grow") for folder in (tmp_path, micro.dir)]
    assert norms[0][0] == pytest.approx(norms[1][0], abs=1.5e-6)    # before Adam has its say
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_the_other_stages_on_two_processes_have_the_gradients_of_one(micro, tmp_path):
    torchrun(*micro.words[1:], f"out_dir={tmp_path}", f"weights_dir={micro.dir}",
             "stages=vae,judges,pretrain")
    for stage in ("vae", "judges", "pretrain"):
        two = norms_of(tmp_path, stage)
        assert len(two) >= 10
        assert two[0] == pytest.approx(norms_of(micro.dir, stage)[0], rel=2e-6, abs=1.5e-6), stage
        assert two == pytest.approx(norms_of(micro.dir, stage), rel=2e-2), stage


# ---- sample.py from a finished run -------------------------------------------------------------

TEXT = "the old man walked to the river"


@pytest.fixture
def voice(tmp_path):
    """Writes a prompt file; a second of a hum at 16 kHz if nothing else is said."""
    def write(wav=None, rate=16_000, name="voice.wav"):
        if wav is None:
            wav = 0.1 * np.sin(np.arange(rate) * 2 * np.pi * 150 / rate)
        soundfile.write(tmp_path / name, wav, rate, subtype="FLOAT")
        return str(tmp_path / name)
    return write


def speak(micro, tmp_path, prompt, *words, text=TEXT, ckpt=None):
    sample.main(["--ckpt", str(ckpt or micro.dir), "--text", text, "--prompt", prompt, "--out",
                 str(tmp_path / "x.wav"), "--nfe", "2", *words])
    return soundfile.read(tmp_path / "x.wav", dtype="float32")


def test_sample_speaks_and_repeats_itself_with_its_seed(micro, tmp_path, voice, capsys):
    wav, rate = speak(micro, tmp_path, voice(), "--prompt-text", "We ran.")
    assert rate == 16_000 and wav.ndim == 1 and len(wav) % 1_600 == 0 and len(wav) > 0
    assert np.isfinite(wav).all() and np.abs(wav).max() > 1e-4
    out = capsys.readouterr().out
    assert f"x.wav: {len(wav) / 16_000:.2f} s" in out and "note" not in out
    same, _ = speak(micro, tmp_path, voice(), "--prompt-text", "we ran")
    assert np.array_equal(wav, same)
    other, _ = speak(micro, tmp_path, voice(), "--prompt-text", "we ran", "--seed", "1")
    n = min(len(wav), len(other))
    assert np.abs(wav[:n] - other[:n]).max() > 1e-4
    before, _ = speak(micro, tmp_path, voice(), "--prompt-text", "we ran", "--stage", "pretrain")
    assert len(before) != len(wav) or np.abs(before - wav).max() > 1e-6


def test_a_stereo_prompt_at_44100_hz_is_converted_with_notes(micro, tmp_path, voice, capsys):
    hum = 0.1 * np.sin(np.arange(60_000) * 2 * np.pi * 150 / 44_100)
    speak(micro, tmp_path, voice(np.stack([hum, hum], axis=1), 44_100))
    out = capsys.readouterr().out
    assert "has 2 channels; their mean is used" in out
    assert "is at 44100 Hz; resampled to 16000 Hz" in out
    assert "no --prompt-text; the recogniser hears" in out
    wav = sample.read_prompt(voice(np.stack([2 * hum, 0 * hum], axis=1), 44_100))
    before = round(60_000 * 160 / 441)
    assert wav.dtype == torch.float32 and len(wav) == before // 1_600 * 1_600
    tone = 0.1 * torch.sin((torch.arange(len(wav)) + before % 1_600) * 2 * torch.pi * 150 / 16_000)
    assert (wav - tone)[200:-200].abs().max() < 2e-3               # the start was cut, not the end


def test_words_that_the_model_never_heard_are_noted(micro, tmp_path, voice, capsys):
    speak(micro, tmp_path, voice(), "--prompt-text", "we ran", text="The old man, quixotic!")
    assert "never heard ['quixotic']" in capsys.readouterr().out


@pytest.mark.parametrize("kind, message", (
    ("short", r"lasts 0\.30 s; a voice needs 0\.5 s"), ("silent", "is silent; record it louder"),
    ("nan", "holds NaN or infinite samples"), ("text", "no readable audio file"),
    ("missing", "no readable audio file")))
def test_a_prompt_that_cannot_serve_is_refused(kind, message, micro, tmp_path, voice):
    hum = 0.1 * np.sin(np.arange(16_000) / 20)
    path = voice({"short": hum[:4_800], "silent": 0 * hum,
                  "nan": np.where(np.arange(16_000) == 99, np.nan, hum)}.get(kind))
    if kind == "text":
        Path(path).write_text("this is not audio")
    elif kind == "missing":
        path += ".gone"
    with pytest.raises(ValueError, match=message) as error:
        speak(micro, tmp_path, path)
    assert path in str(error.value) and not (tmp_path / "x.wav").exists()


@pytest.mark.parametrize("text, message", (
    ("7 dogs", r"characters \['7'\] .* outside the toy alphabet"), ("naïve", r"\['ï'\]"),
    ("...", "the text is empty")))
def test_a_text_that_cannot_be_spoken_is_refused(text, message, micro, tmp_path, voice):
    with pytest.raises(ValueError, match=message):
        speak(micro, tmp_path, voice(), text=text)


def test_a_folder_without_a_run_or_without_its_stage_is_refused(micro, tmp_path, voice):
    with pytest.raises(ValueError, match=r"is no output folder of train.py \(no config.json"):
        speak(micro, tmp_path, voice(), ckpt=tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "half").mkdir()
    shutil.copy(micro.dir / "config.json", tmp_path / "half")
    with pytest.raises(ValueError, match="no .*safetensors in .*half; run stages="):
        speak(micro, tmp_path, voice(), ckpt=tmp_path / "half")


@pytest.mark.parametrize("word, message", (
    (("--nfe", "0"), "sample.nfe=0"), (("--cfg-scale", "-1"), "sample.cfg_scale=-1.0")))
def test_sampling_settings_are_checked(word, message, micro, tmp_path, voice):
    with pytest.raises(ValueError, match=message):
        speak(micro, tmp_path, voice(), *word)


# ---- rewards -----------------------------------------------------------------------------------

def test_a_reward_without_a_stream_is_refused_and_the_named_ones_are_made(micro):
    run = train.open_run(micro.dir)
    streams = ToyWorld(run).streams()
    assert list(streams) == ["wer", "sim"]
    assert streams["wer"].asr.kind == "conv" and streams["sim"].speaker.kind == "attentive"
    silent = replace(run.config.rewards, weights={"wer": 1.0, "sim": 0.0})
    run.config = replace(run.config, rewards=silent)
    assert list(ToyWorld(run).streams()) == ["wer"]
    run.config = replace(run.config, rewards=replace(silent, weights={"wer": 1.0, "mos": 1.0}))
    with pytest.raises(ValueError, match=r"names \['mos'\]; the streams are"):
        ToyWorld(run).streams()
