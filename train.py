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
import ctypes
import functools
import json
import math
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn as nn

import evaluate
import guards
import plan
import testsets
from checks import run_main
from config import STAGES, Config, build, check_device, load_config
from grow import collect, grow_step, speak
from grpo import grpo_step
from model import DiTAR, ModelConfig, pretrain_loss, round_up, valid_patches
from judges import load_strict
from rewards import score
from run import Run, differences, load_meta, save_tensors, write_text
from worlds import DryWorld, dry_config, make_world

# ---------------------------------------------------------------- stage: pre-training

def collate(texts, patches):
    """Lists of ids and of (N, P, D) -> right-padded text, text_len, patches, n, in few shapes."""
    text_len = torch.tensor([len(t) for t in texts])
    n = torch.tensor([len(p) for p in patches])
    text = torch.zeros(len(texts), round_up(text_len.max(), 16), dtype=torch.long)
    padded = torch.zeros(len(texts), round_up(n.max(), 8), *patches[0].shape[1:])
    for i, (ids, p) in enumerate(zip(texts, patches)):
        text[i, :len(ids)], padded[i, :len(p)] = torch.tensor(ids), p
    return text, text_len, padded, n


def train_ditar(run, world):
    """Pre-training: flow matching and stop loss on all patches of the rows of each step."""
    c, m = run.config.pretrain, run.config.model
    torch.manual_seed(run.config.seed)
    model = world.new_model().to(run.device)
    if c.aux_weight:
        model.aux = nn.Linear(m.lm.dim, m.patch_frames * m.latent_dim).to(run.device)

    def gradients(step):
        rows = world.pretrain_rows(step)
        share = run.sum(sum(len(x_1) for _, _, x_1 in rows))        # patches of all ranks
        if not rows:
            return {}
        text, text_len, x_1, n = collate([ids for _, ids, _ in rows], [x for _, _, x in rows])
        t, drop = (torch.zeros(m.noise_mult, *x_1.shape[:2], dtype=d) for d in (None, torch.bool))
        x_0 = torch.zeros(m.noise_mult, *x_1.shape)
        for i, (g, _, x) in enumerate(rows):                        # a row's noise is its own
            shape = (m.noise_mult, len(x))
            t[:, i, :len(x)] = torch.rand(shape, generator=g)
            drop[:, i, :len(x)] = torch.rand(shape, generator=g) < m.drop_h
            x_0[:, i, :len(x)] = torch.randn(*shape, *x.shape[1:], generator=g)
        text, text_len, x_1, n, t, x_0, drop = (
            v.to(run.device) for v in (text, text_len, x_1, n, t, x_0, drop))
        with run.autocast():
            flow, stop, h = pretrain_loss(model, text, text_len, x_1, n, t, x_0, drop)
            loss, logs = flow + m.stop_weight * stop, {"flow": flow.item(), "stop": stop.item()}
            if c.aux_weight:
                valid = valid_patches(n, x_1.shape[1])
                aux = (model.aux(h[valid]).float() - x_1[valid].flatten(1)).pow(2).mean()
                loss, logs["aux"] = loss + c.aux_weight * aux, aux.item()
        (loss * (int(n.sum()) / share)).backward()
        return logs

    weights = run.fit("pretrain", model, gradients, c.steps, c.lr, c.warmup, c.hold,
                      betas=c.betas, ema=c.ema)
    model.load_state_dict(weights)
    if c.aux_weight:
        del model.aux
    run.finish("pretrain", model.state_dict(), ditar_scores(run, world, model), world.half)


def ditar_scores(run, world, model, n=256):
    """WER and SIM on the tune split (unheard voices), by the judges that will give the reward."""
    prompts, _ = world.held_out(n, "tune")
    if not prompts:
        return {}
    wavs, utterances = evaluate.speak(run.fast(model), world.vae, prompts, run.config.evaluate,
                                      run.config.sample)
    records = evaluate.score(wavs, [u.stopped for u in utterances], prompts, world.judges)
    return {name: sum(r[name] for r in records) / len(records)
            for name in ("wer", "wer_held", "sim", "sim_held", "severe") if name in records[0]}


def load_ditar(run, stage="pretrain"):
    """The model of a finished stage, with the config that it was made with."""
    path, (tensors, meta) = run.find(stage), run.load(stage)
    what = f"a DiTAR; run stages={stage} in another out_dir"
    if "model" not in meta["config"]:
        raise ValueError(f"{path} is another model, wanted {what}")
    model = DiTAR(build(ModelConfig, meta["config"]["model"]))
    load_strict(model, tensors, path, what)
    return model.to(run.device)


# ---------------------------------------------------------------- stages: GROW, evaluation

class GrowTrainer:
    """What train_grow and profile share: models, judges and one step's gradients."""

    def __init__(self, run, world):
        self.run, self.world = run, world
        self.policy = load_ditar(run)
        theirs, ours = asdict(self.policy.config), asdict(run.config.model)
        if theirs != ours:
            raise ValueError(f"{run.find('pretrain')} has another model section: "
                             f"{differences(theirs, ours)}; GROW starts from that model, so leave "
                             "its fields alone or run stages=pretrain")
        self.streams = world.streams()
        learns = "locdit" if run.config.method == "grpo" else ""
        for name, p in self.policy.named_parameters():      # no stop loss in RL; GRPO keeps theta_a
            p.requires_grad_(name.startswith(learns) and not name.startswith("stop_head"))
        self.reference = load_ditar(run).requires_grad_(False)
        self.actor = run.fast(self.reference)

    def gradients(self, step):
        run, c, take_step = self.run, self.run.config.rl, grow_step
        if run.config.method == "grpo":
            c, take_step = c.at(step), grpo_step                    # its window moves
        for mine, theirs in zip(self.actor.parameters(), self.policy.parameters()):
            mine.data.copy_(theirs.data)
        return take_step(
            self.policy, self.actor, self.reference, self.world.vae, self.streams,
            run.config.rewards.weights,
            lambda slot, attempt: self.world.prompt(step, slot, attempt),
            range(run.rank, c.prompts_per_step, run.ranks),         # a group stays on one rank
            lambda *key: run.generator("grow", step, *key),
            c, run.config.sample, run.sum, run.autocast)

    def print_noise_floor(self):
        """The judges' own noise beside the spread that the weights are made of, on one group."""
        run, c = self.run, self.run.config.rl
        groups, _ = collect(
            lambda prompts, seeds: speak(self.actor, prompts, seeds, c, run.config.sample),
            self.world.vae, self.streams, lambda slot, attempt: self.world.prompt(0, slot, attempt),
            [0], lambda *key: run.generator("floor", *key), c)
        if run.main and groups.slots:
            floor = guards.noise_floor(
                self.streams, score, groups.wavs, [p.text for p in groups.prompts],
                [p.wav for p in groups.prompts], run.generator("floor"))
            print("noise of the rewards (their spread within a group): " + ", ".join(
                f"{name} {value:.3g} ({groups.rewards[name].std(correction=0):.3g})"
                for name, value in floor.items()), flush=True)

    def probe(self, step, weights):
        """Held-out WER and SIM of the weights that evaluation would use; the best are kept."""
        run, g = self.run, self.run.config.guards
        prompts, _ = self.world.held_out(g.probe_n, "tune")
        if not prompts:
            return {}
        for name, p in self.actor.named_parameters():
            p.data.copy_(weights.get(name, p))
        c = replace(run.config.evaluate, nfe=g.probe_nfe)
        wavs, utterances = evaluate.speak(self.actor, self.world.vae, prompts, c, run.config.sample)
        records = evaluate.score(wavs, [u.stopped for u in utterances], prompts, self.world.judges)
        wer, sim = (sum(r[name] for r in records) / len(records) for name in ("wer", "sim"))
        path = run.dir / "grow.best.safetensors"
        there = load_meta(path)["score"] if path.exists() else -math.inf
        if sim - wer > there:
            save_tensors(path, self.policy.state_dict() | weights, {
                "config": run.fingerprint("grow"), "score": sim - wer, "wer": wer, "sim": sim,
                "step": step})
        return {"held_out_wer": wer, "held_out_sim": sim}


def train_grow(run, world):
    c, g = run.config.rl, run.config.guards
    trainer = GrowTrainer(run, world)
    trainer.print_noise_floor()
    if run.main and not run.checkpoints("grow"):                    # of an earlier training
        (run.dir / "grow.best.safetensors").unlink(missing_ok=True)

    @functools.cache
    def drift():            # made after the first step, when the log ends where the run resumed
        return guards.Drift(g, [r for r in run.records("grow") if "seconds" in r])

    def after(step, logs, weights):
        for warning in drift().check(logs):
            if run.main:
                print(f"warning at step {step}: {warning}", flush=True)
        if g.probe_every and (step + 1) % g.probe_every == 0 and run.main:
            logs |= trainer.probe(step, weights)
    weights = run.fit("grow", trainer.policy, trainer.gradients, c.steps, c.lr, c.warmup,
                      decay=c.lr_decay, betas=c.betas, weight_decay=c.weight_decay,
                      ema=c.ema, clip=c.grad_clip, after=after)
    trainer.policy.load_state_dict(weights, strict=False)
    run.finish("grow", trainer.policy.state_dict(), {}, half=False)


def run_evaluate(run, world):
    """Both systems on held-out prompts: records, table, figure and wav files in out_dir."""
    c, judges = run.config.evaluate, world.judges
    prompts, real = world.held_out(c.n, c.split)
    out = []
    for stage in ("pretrain", "grow"):
        started = time.time()
        wavs, utterances = evaluate.speak(run.fast(load_ditar(run, stage)), world.vae, prompts, c,
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
    try:
        config = build(Config, json.loads(path.read_text()) | {"out_dir": str(folder)})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no config of this train.py ({error}); each run writes one at "
                         "its start: give that run's command again") from error
    check_device(config.device)
    return Run(config, "")


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
    parser.add_argument("--plan", action="store_true", help="print sizes, memory, FLOPs and exit")
    parser.add_argument("--gpus", type=int, default=8, help="for --plan")
    parser.add_argument("--tflops", type=float, default=400.0, help="of one GPU, for --plan")
    parser.add_argument("--dry-run", action="store_true",
                        help="one step of each stage, random weights and data, one layer a stack")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    args = parser.parse_intermixed_args(words)      # overrides may stand on both sides of --profile
    config = load_config(args.config, args.overrides)
    stages = STAGES if config.stages == ("all",) else config.stages
    if args.plan:
        return plan.show(config, args.gpus, args.tflops)
    check_device(config.device)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.dry_run:
        config = dry_config(config, ranks)
    for stage, section, amount in (("pretrain", "pretrain", "pairs_per_step"),
                                   ("grow", config.method, "prompts_per_step")):
        number = getattr(getattr(config, section), amount)
        if stage in stages and number % ranks:
            raise ValueError(f"{section}.{amount}={number} does not divide over {ranks} ranks; "
                             f"use {round_up(number, ranks)}")
    run = Run(config, "python train.py " + " ".join(sys.argv[1:] if words is None else words),
              fresh=args.dry_run)
    world = DryWorld(run) if args.dry_run else make_world(run)
    world.check(("grow",) if args.profile else stages)
    if args.profile:
        from bench import profile
        return profile(run, world)
    work = {"vae": world.make_vae, "judges": world.make_judges,
            "pretrain": lambda: train_ditar(run, world), "grow": lambda: train_grow(run, world)}
    todo = [stage for stage in stages if stage not in work or not run.done(stage)]
    for stage in [s for s in stages if s in work]:
        changed = [name for name in run.fingerprint(stage)["from"] if name in todo]
        if changed and (stage not in todo or run.checkpoints(stage)):
            raise ValueError(f"{run.dir / stage}*.safetensors was made from another "
                             f"{', '.join(changed)} than this run is to make; use another out_dir, "
                             "or remove the file to train it again")
    if run.main:
        write_text(run.dir / "config.json", json.dumps(asdict(config), indent=1) + "\n")
    for stage in stages:
        if stage == "corpus":
            world.make_corpus()
        elif stage == "evaluate":
            if config.evaluate.lists:
                testsets.run_lists(run, world)
            elif run.main:
                run_evaluate(run, world)
        elif stage not in todo:
            if run.main:
                run.tidy(stage)     # a run may have ended just before it could
            print(f"{stage}: {run.dir / stage}.safetensors is there, skipped", flush=True)
        else:
            work[stage]()
        run.barrier()


if __name__ == "__main__":
    keep_freed_memory()
    try:
        run_main(main)
    except KeyboardInterrupt:           # outside the training loop, which has its own way to end
        sys.exit("stopped by SIGINT; the same command continues from there")
