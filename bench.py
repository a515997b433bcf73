"""Where a GROW step's time goes, and how far it is from this machine's matrix product:

    python train.py --config toy.yaml --profile
"""

import time

import torch

from train import GrowTrainer


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
