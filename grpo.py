"""DiTAR-GRPO, the paper's baseline: policy gradients on a window of noisy denoising steps.

Paper: GROW, "Comparison with the DiTAR-GRPO baseline" and "Rollout NFE and training efficiency".
Flow-GRPO turns the sampling ODE into an SDE, so that each denoising step is a Gaussian with a
likelihood; MixGRPO confines the noise and the gradient to a short window of steps; CPS
(coefficient-preserving sampling) keeps the noise level of x_t on the schedule. Choose it with
`method: grpo`. `grpo_step` at the end takes grow_step's place and shares its rollouts and rewards.

A noisy step from t to t' is Euler's step, pushed away from the noise estimate, plus noise:

    x' = x + (t' - t) v - k x̂_0 + std ε,    x̂_0 = x - t v,    v guided, as in a GROW rollout
    cps     k = (1 - t') (1 - cos(η π/2))       std = (1 - t') sin(η π/2)
    flow    k = g^2 (t' - t) / (2 (1 - t))      std = g sqrt(t' - t),    g = η sqrt((1 - t) / t)

At η=0 both are Euler's. The paper gives three noisy steps per patch, CPS, recorded LM states, the
gradient through LocDiT alone, and both passes of the guidance in the loss. It leaves open:
 1. The window's place. Here it moves on by one step of the grid every `shift_every` updates and
    starts again at the first, as in MixGRPO; all patches and rollouts of an update share it. Never
    the grid's last step: there CPS has no noise.
 2. η, the clip range and the learning rate: see GrpoConfig. KL to the reference: off, as MixGRPO.
 3. The ratio is taken per step of a patch, with the rollout's advantage. Log-probabilities are
    means over the patch's P*D numbers, as in public code: the ratio is the true one's (P*D)-th
    root, which is why clip ranges are tiny.
 4. `log_prob: gaussian` is the normal density; `square`, -(x' - mean)^2, is public CPS code's,
    which weighs each step by 2 std^2.
 5. The unconditional velocity carries gradient too ("each enter the loss").
 6. The mean over a rollout's own transitions comes first, then the mean over rollouts, as in
    grow.py, and the advantages are GROW's weights, Eq. (9).
 7. One update per batch of rollouts, as GROW: on-policy, so that theta_old is the policy itself,
    the ratio is 1 and the clip never binds. Public code takes several updates per batch.
 8. A group's rollouts share x_0, as in MixGRPO's code: what sets them apart is then the noise of
    the window, which the likelihood can credit, and not a start that it knows nothing of.
"""

import math
import time
from dataclasses import dataclass, replace

import torch

from audio import SAMPLE_RATE
from checks import at_least, shares
from grow import collect, speak, weights
from model import pad_rows
from sample import Utterance, times, velocity_fn

# How far the policy may be from the actor before the first update, by the actor's precision, in
# units of velocity, so that steps of every size are judged alike. On the toy model at NFE 5, 10 and
# 32: 2e-7 in float32, 0.013 between bf16 and float32, 0.29 and more with another patch's history.
VELOCITY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
NOISE_STREAM = 0x5DE            # keeps the steps' noise apart from the same utterance's x_0


@dataclass(frozen=True)
class GrpoConfig:
    steps: int = 400                # as GROW's
    prompts_per_step: int = 16
    group_size: int = 8             # G
    lr: float = 2e-6                # AdamW (open; as GROW's)
    warmup: int = 0
    lr_decay: bool = False
    betas: tuple = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    window: int = 3                 # noisy steps per patch (paper: 3)
    window_start: int = 0           # first noisy step of the grid, at the first update (open)
    shift_every: int = 25           # updates until the window moves on by one step; 0: never (open)
    sde: str = "cps"                # or flow, Flow-GRPO's
    eta: float = 0.7                # noise of the noisy steps; 1 is all that CPS has (open)
    log_prob: str = "gaussian"      # or square, see 4 above
    clip: float = 1e-4              # ratio's range is 1 +- clip (open); never binds here, see 7
    kl: float = 0.0                 # weight of the KL to the reference (open)
    same_noise: bool = True         # a group's rollouts start from the same x_0 (open; MixGRPO's)
    ema: float = 0.0                # as GROW's
    redraws: int = 4
    micro_batch: int = 16           # rollouts per backward pass: memory only

    def __post_init__(self):
        if self.group_size < 2:
            raise ValueError(f"grpo.group_size={self.group_size}; one rollout has no baseline, "
                             "use 2 or more (the paper: 8)")
        for name, known in (("sde", ("cps", "flow")), ("log_prob", ("gaussian", "square"))):
            if getattr(self, name) not in known:
                raise ValueError(f"grpo.{name}={getattr(self, name)!r}; known are {known}")
        at_least("grpo", self, steps=1, prompts_per_step=1, window=1, micro_batch=1, window_start=0,
                 shift_every=0, redraws=0, kl=0, lr=0, warmup=0, weight_decay=0)
        shares("grpo", self, "betas", "ema", one=False)
        if self.eta <= 0 or (self.sde == "cps" and self.eta > 1):
            raise ValueError(f"grpo.eta={self.eta}; wanted more than 0, and with cps at most 1: "
                             "without noise there is no likelihood, and 1 renews all of it")
        for name in ("clip", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"grpo.{name}={getattr(self, name)}; wanted more than 0")

    def at(self, step):
        """The config of one update: the window has moved on."""
        moved = step // self.shift_every if self.shift_every else 0
        return replace(self, window_start=self.window_start + moved)


def window_steps(c, nfe):
    """The noisy steps of a grid of nfe: c.window neighbours, never the last. Starts are counted
    around the nfe - c.window that fit. Raises ValueError where none does."""
    if nfe <= c.window:
        raise ValueError(f"sample.nfe={nfe} leaves no room for grpo.window={c.window}: the last "
                         f"step carries no noise; use nfe={c.window + 1} or more, or a smaller "
                         "window")
    start = c.window_start % (nfe - c.window)
    return range(start, start + c.window)


# ---------------------------------------------------------------- one noisy step

def coefficients(grid, steps, eta, sde):
    """t, t' - t, k and std of the given steps of the grid: four tensors (W,)."""
    t, t_next = grid[steps.start:steps.stop], grid[steps.start + 1:steps.stop + 1]
    dt = t_next - t
    if sde == "cps":
        angle = eta * math.pi / 2
        return t, dt, (1 - t_next) * (1 - math.cos(angle)), (1 - t_next) * math.sin(angle)
    g2 = eta ** 2 * (1 - t) / torch.where(t > 0, t, grid[1])        # finite at t=0, as Flow-GRPO
    return t, dt, g2 * dt / (2 * (1 - t)), (g2 * dt).sqrt()


def step_mean(x, v, t, dt, k):
    """Mean of x' given x: Euler's step, minus k times the noise estimate."""
    return x + dt * v - k * (x - t * v)


def log_density(x_next, mean, std, kind="gaussian"):
    """log p(x' | x), the mean over a patch's dimensions: (M, P, D) -> (M,)."""
    error = x_next - mean
    if kind == "square":
        return -error.pow(2).mean(dim=(1, 2))
    density = -(error / std).pow(2) / 2 - torch.log(std) - math.log(2 * math.pi) / 2
    return density.mean(dim=(1, 2))


# ---------------------------------------------------------------- rollouts that are recorded

@dataclass
class Recorded(Utterance):
    """An utterance of n patches with its window of W noisy steps; h (n, C) is always there."""
    history: torch.Tensor | None = None     # (n, P, D) what LocDiT saw of the patch before
    path: torch.Tensor | None = None        # (n, W+1, P, D) x before, between and after the steps
    log_prob: torch.Tensor | None = None    # (n, W) under the actor


class Recorder:
    """generate's `solver`: Euler's method, noisy inside the window, which it records. The noise of
    a step is a function of (utterance seed, patch, step of the window) alone."""

    def __init__(self, seeds, grid, c):
        self.c, self.steps = c, window_steps(c, len(grid) - 1)
        self.window = coefficients(grid, self.steps, c.eta, c.sde)
        self.generators = [torch.Generator().manual_seed(seed ^ NOISE_STREAM) for seed in seeds]
        self.patches = []               # patch i: rollouts in the batch, and their records

    def __call__(self, model, h, history, x, grid, cfg_scale, row, i):
        v_fn, rows, W = velocity_fn(model, h, history, cfg_scale), row.tolist(), self.c.window
        noise = torch.stack([torch.randn(W, *x.shape[1:], generator=self.generators[r])
                             for r in rows]).to(x.device)           # (B', W, P, D)
        x, path, log_probs = x.float(), [], []
        for n, (t, t_next) in enumerate(zip(grid[:-1], grid[1:])):
            v = v_fn(x, t)
            if n not in self.steps:
                x = x + (t_next - t) * v
                continue
            j = n - self.steps.start
            t, dt, k, std = (value[j] for value in self.window)
            path.append(x)
            mean = step_mean(x, v, t, dt, k)
            x = mean + std * noise[:, j]
            log_probs.append(log_density(x, mean, std, self.c.log_prob))
            if n + 1 == self.steps.stop:
                path.append(x)
        self.patches.append((rows, h, history, torch.stack(path, 1), torch.stack(log_probs, 1)))
        return x

    def attach(self, utterances):
        """Each utterance with its own records; those of rows that lingered in the batch go."""
        records = [[] for _ in utterances]
        for i, (rows, *values) in enumerate(self.patches):
            for b, r in enumerate(rows):
                if i < len(utterances[r].latents):
                    records[r].append([value[b] for value in values])
        return [Recorded(u.latents, u.stopped, *(torch.stack(values) for values in zip(*record)))
                for u, record in zip(utterances, records)]


# ---------------------------------------------------------------- loss

def grpo_loss(policy, reference, spoken, advantages, window, c, cfg_scale, total=None,
              log_prob_old=None):
    """mean_k mean_j -min(rho A, clip(rho) A) + kl * KL over rollouts k and their transitions j.

    spoken: R Recorded; advantages: (R,); window: what `coefficients` returned; total: rollouts that
    the mean runs over, when these are a part of them; log_prob_old: (M,) under theta_old, default
    the policy's own now, which is right for the first update after the rollouts (rho = 1, and the
    gradient is that of -A log p). Only LocDiT gets a gradient: h is a recorded constant.
    Returns a dict: "loss", "policy", "kl", "log_prob" (M,), "clip_share", and the policy against
    the actor that spoke: "deviation", the largest |rho - 1|, and "velocity_error", how far the
    velocity would have to be off for it."""
    device, W = policy.speech_start.device, c.window
    h, history, path, recorded = (torch.cat([getattr(u, name) for u in spoken]).to(device)
                                  for name in ("h", "history", "path", "log_prob"))
    n = torch.tensor([len(u.latents) for u in spoken], device=device)
    of = torch.arange(len(n), device=device).repeat_interleave(n)   # (n_1 + n_2 + ...,) rollout
    M = len(h) * W
    rows, weight = pad_rows(torch.arange(M, device=device))         # a few sizes, see pad_rows
    i, j = rows // W, rows % W                                      # patch and step in the window
    x, x_next = path[i, j], path[i, j + 1]                          # (M', P, D)
    h, history = h[i].to(policy.speech_start), history[i].to(policy.speech_start)
    t, dt, k, std = (value.to(device)[j][:, None, None] for value in window)

    v = velocity_fn(policy, h, history, cfg_scale)(x, t.flatten())
    log_prob = log_density(x_next, step_mean(x, v, t, dt, k), std, c.log_prob)
    old = log_prob.detach().clone()
    if log_prob_old is not None:
        old[:M] = log_prob_old
    ratio = (log_prob - old).exp()
    A = advantages[of[i]]
    clipped = ratio.clamp(1 - c.clip, 1 + c.clip)
    share = weight / (n[of[i]] * W) / (len(n) if total is None else total)
    policy_term = -(share * torch.minimum(A * ratio, A * clipped)).sum()
    kl = torch.zeros((), device=device)
    if c.kl > 0:                        # of two Gaussians of equal std whose means differ through v
        with torch.no_grad():
            v_ref = velocity_fn(reference, h, history, cfg_scale)(x, t.flatten())
        kl = (share * ((dt + k * t) * (v - v_ref) / std).pow(2).mean(dim=(1, 2))).sum() / 2
    # how much log_prob moves with v, for a noise of 1; what float32 rounds is no deviation
    unit = (dt + k * t) * (1 / std if c.log_prob == "gaussian" else 2 * std)
    off = log_prob.detach()[:M] - recorded.flatten()
    return {"loss": policy_term + c.kl * kl, "policy": policy_term.detach(), "kl": kl.detach(),
            "log_prob": log_prob.detach()[:M], "deviation": off.expm1().abs().max(),
            "velocity_error": ((off.abs() - 1e-6).relu() / unit.flatten()[:M]).max(),
            "clip_share": (ratio != clipped)[:M].float().mean()}


def check_ratio(deviation, velocity_error, dtype):
    """Before the first update the policy has to be the actor: a wrong record, not a bad policy, is
    what moves the ratio. Raises RuntimeError."""
    if not velocity_error <= VELOCITY_TOLERANCE[dtype]:             # NaN too
        raise RuntimeError(
            f"before the first update a ratio of policy to actor is off 1 by {deviation:.2g}, as "
            f"if a velocity was off by {velocity_error:.2g}; wanted at most "
            f"{VELOCITY_TOLERANCE[dtype]:g} with the actor in {dtype}. Either the actor is no copy "
            "of the policy, or h, history, x or the times recorded are not those of its steps: "
            "training on them would go wrong silently, so this stops here")


# ---------------------------------------------------------------- one step

def grpo_step(policy, actor, reference, vae, streams, lambdas, draw_prompt, slots, generator, c, s,
              global_sum, autocast):
    """Rollouts, rewards, advantages, and the gradient of one update. The arguments are grow_step's,
    and c is GrpoConfig.at(step). Returns numbers to log."""
    grid = times(s.nfe, s.sway)
    window = coefficients(grid, window_steps(c, s.nfe), c.eta, c.sde)

    def roll_out(prompts, seeds):
        recorder, G = Recorder(seeds, grid, c), c.group_size
        x_0 = [seeds[k - k % G] for k in range(len(seeds))] if c.same_noise else seeds
        return recorder.attach(speak(actor, prompts, x_0, c, s, solver=recorder))
    groups, log = collect(roll_out, vae, streams, draw_prompt, slots, generator, c)
    total = global_sum(len(groups.slots)) * c.group_size            # rollouts in the mean
    if not groups.slots:
        return log

    started = time.perf_counter()
    advantages = weights(groups.rewards, lambdas).flatten()         # (R,) Eq. (9)
    device, spoken = policy.speech_start.device, groups.utterances
    terms = []
    for part in torch.arange(len(spoken)).split(c.micro_batch):
        with autocast():
            out = grpo_loss(policy, reference, [spoken[r] for r in part.tolist()],
                            advantages[part].to(device), window, c, s.cfg_scale, total)
        check_ratio(out["deviation"].item(), out["velocity_error"].item(), actor.speech_start.dtype)
        out.pop("loss").backward()
        terms.append({name: value.item() for name, value in out.items() if value.ndim == 0})
    share = total / len(spoken)             # under torchrun the log shows this rank's groups
    patches = torch.tensor([len(u.latents) for u in spoken], dtype=torch.float)
    log |= {"policy": sum(x["policy"] for x in terms) * share,
            "kl": sum(x["kl"] for x in terms) * share,
            "ratio_max": 1 + max(x["deviation"] for x in terms),
            "clip_share": max(x["clip_share"] for x in terms),
            "window_start": window_steps(c, s.nfe).start, "patches": patches.mean().item(),
            "audio_sec": sum(len(x) for x in groups.wavs) / SAMPLE_RATE,
            "sec_update": time.perf_counter() - started}
    return log
