"""Where a GROW step's time goes, and how far it is from this machine's matrix product; whether
memory or time grow over many steps; and how much of a batch's gradient is signal:

    python train.py --config toy.yaml --profile
    python bench.py --config toy.yaml --growth 300 grow.prompts_per_step=1 grow.group_size=2
    python bench.py --config toy.yaml --signal 8 method=grpo sample.nfe=10
"""

import argparse
import contextlib
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from checks import run_main
from config import load_config
from run import Run
from train import GrowTrainer, keep_freed_memory
from worlds import make_world


def profile(run, world, steps=3):
    """Where a GROW step's time goes, and how far LocDiT is from this machine's matrix product."""
    c, s, m = run.config.rl, run.config.sample, run.config.model
    trainer = GrowTrainer(run, world)
    dtype = torch.bfloat16 if run.bf16 else torch.float32
    trainer.gradients(0)                                            # warm-up
    logs = [trainer.gradients(step) for step in range(1, steps + 1)]
    mean = {k: sum(log[k] for log in logs) / steps for k in logs[0]}
    R, P = c.prompts_per_step * c.group_size, m.patch_frames
    seconds = {k: mean[f"sec_{k}"] for k in ("rollout", "decode", "reward", "update")}

    def wait():
        if run.device.type == "cuda":
            torch.cuda.synchronize()

    def per_second(work, repeats=20):
        with torch.no_grad():
            work()
            wait()
            started = time.perf_counter()
            for _ in range(repeats):
                work()
            wait()
        return repeats / (time.perf_counter() - started)
    a, b = (torch.randn(2_048, 2_048, device=run.device, dtype=dtype) for _ in range(2))
    peak = 2 * 2_048 ** 3 * per_second(lambda: a @ b) / 1e9

    weights = sum(p.numel() for p in trainer.policy.locdit.parameters())
    tokens, d = 2 + 2 * P, m.locdit
    final = d.dim * (d.heads * d.head_dim * 2 + 3 * d.mlp_dim)      # for the noisy tokens only
    row = 2 * ((weights - final) * tokens + final * P
               + d.layers * 2 * tokens * tokens * d.heads * d.head_dim)     # one LocDiT row
    rows = R * (2 if s.cfg_scale else 1)
    x = torch.randn(rows, P, m.latent_dim, device=run.device, dtype=dtype)
    h = torch.randn(rows, m.lm.dim, device=run.device, dtype=dtype)
    t = torch.rand(1, device=run.device)
    locdit = rows * row * per_second(lambda: trainer.actor.velocity(x, t, h, x)) / 1e9
    needed = mean["patches"] * s.nfe * rows * row / 1e9
    total = sum(seconds.values())
    print(f"{torch.get_num_threads()} threads, {dtype}; {R} rollouts a step, "
          f"{mean['patches']:.1f} patches each, NFE {s.nfe}")
    for name, sec in seconds.items():
        print(f"  {name:8} {sec:6.2f} s  {100 * sec / total:3.0f} %")
    print(f"  step     {total:6.2f} s        {R / total:.1f} rollouts/s in all, "
          f"{R / seconds['rollout']:.1f} rollouts/s sampling, "
          f"{mean['audio_sec'] / seconds['rollout']:.0f} x real time")
    print(f"  matrix product {peak:.0f} GFLOP/s; LocDiT alone {locdit:.0f} GFLOP/s "
          f"({100 * locdit / peak:.0f} %); whole rollout {needed / seconds['rollout']:.0f} GFLOP/s "
          f"of LocDiT work ({100 * needed / seconds['rollout'] / peak:.0f} %)")


def resident_mb():
    """Memory of this process; its peak where there is no /proc."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)


@contextlib.contextmanager
def scratch_trainer(config):
    """A trainer at the pretrained weights, whose run keeps no result: (run, trainer)."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(replace(config, out_dir=folder,
                          weights_dir=config.weights_dir or config.out_dir), "")
        yield run, GrowTrainer(run, make_world(run))


def growth(config, steps):
    """Memory and time of each of `steps` RL steps: (steps,) MB, (steps,) ms. Keeps no result."""
    rows = []
    with scratch_trainer(config) as (run, trainer):
        c = run.config.rl
        run.fit("grow", trainer.policy, trainer.gradients, steps, c.lr, decay=False, betas=c.betas,
                weight_decay=c.weight_decay, ema=c.ema, clip=c.grad_clip,
                after=lambda step, logs, weights: rows.append((resident_mb(), 1e3 * logs["sec"])))
    return np.array(rows).T


def signal(config, batches):
    """Cosines between the gradients of `batches` batches of rollouts, each with its own prompts and
    noise, at the pretrained weights: (pairs,). Their mean is |E u|^2 of the gradients' directions
    u: the share of a gradient's squared length that is signal, where their lengths are alike.
    LocDiT's parameters only: all that GRPO trains."""
    units = []
    with scratch_trainer(config) as (_, trainer):
        for step in range(batches):
            trainer.gradients(step)
            grads = [p.grad for p in trainer.policy.locdit.parameters() if p.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            units.append(flat / flat.norm())
            trainer.policy.zero_grad()
            print(f"batch {step + 1} of {batches}", end="\r", file=sys.stderr, flush=True)
    cosines = torch.stack(units) @ torch.stack(units).T             # (batches, batches)
    return cosines[tuple(torch.triu_indices(batches, batches, 1))]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--growth", type=int, default=300, metavar="STEPS")
    parser.add_argument("--signal", type=int, metavar="BATCHES", help="instead: gradients' cosines")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    args = parser.parse_intermixed_args(words)
    if args.growth < 30:
        raise ValueError(f"--growth {args.growth}; wanted 30 steps or more")
    config = load_config(args.config, args.overrides)
    if args.signal is not None:
        if args.signal < 3:
            raise ValueError(f"--signal {args.signal}; wanted 3 batches or more")
        cosines = signal(config, args.signal)
        error = cosines.std() / len(cosines) ** 0.5                 # as if pairs were independent
        print(f"{100 * cosines.mean():.2f} % of a gradient's squared length is signal (standard "
              f"error {100 * error:.2f} %: {len(cosines)} pairs of {args.signal} batches)")
        return
    rows = growth(config, args.growth)
    settled = rows[:, args.growth // 3:]        # every shape has been met, every cache is full
    for unit, start, values in zip(("MB", "ms"), rows[:, 0], settled):
        slope = 100 * np.polyfit(np.arange(len(values)), values, 1)[0]
        print(f"{start:.1f} {unit} in the first step, {np.median(values):.1f} {unit} in the last "
              f"two thirds of {args.growth}: {slope:+.2f} {unit} per 100 steps")


if __name__ == "__main__":
    keep_freed_memory()
    run_main(main)
