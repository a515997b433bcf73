"""GROW: group-relative advantage-weighted on-policy RL of a flow-matching TTS model.

Paper: Algorithm 1 and Eq. (5)-(11). `grow_step` at the end reads like Algorithm 1, with its line
numbers; above it stand the pieces, one equation each, as pure functions.

Differs from the paper or fills what it leaves open (defaults are the paper's reading):
 1. The mean over a rollout's own generated patches comes first, then the mean over rollouts, so
    that long rollouts do not weigh more and sum_k w_k = 0 keeps cancelling self-imitation.
 2. Prompt patches carry no loss.
 3. No stop loss in RL, and the stop head's weights are frozen (train.py, GrowTrainer).
 4. Off by default, on in toy.yaml, all leave the expected gradient as it is: `draws`,
    `share_noise`, `t_per: patch`. `ema` averages the weights that are evaluated, not the policy.
 5. `target: latents` trains on the sampled latents instead of re-encoding the waveform (line 6).
"""

import time
from dataclasses import dataclass

import torch

import guards
import rewards as reward_module
from audio import SAMPLE_RATE
from checks import at_least, shares
from model import draw_latents, history_of, interpolate, pad_rows, round_up
from sample import decode_wavs, generate, guided


@dataclass(frozen=True)
class GrowConfig:
    steps: int = 400                # "several hundred updates"
    prompts_per_step: int = 16      # "batch size 128" read as 16 prompts x 8 rollouts (open)
    group_size: int = 8             # G
    beta_w2: float = 0.025          # anchor to the frozen reference
    lr: float = 2e-6                # AdamW, constant
    warmup: int = 0                 # steps of linear warm-up: AdamW's first steps are all noise
    lr_decay: bool = False          # linear decay to 0 over the run (paper: constant)
    betas: tuple = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0          # open
    weighting: str = "signed"       # Eq. (8), (9); or exp_advantage, exp_reward (Table 2)
    tau: float = 1.0                # inverse temperature of the exponential weightings
    velocity: str = "conditional"   # v_theta in the loss; or guided (Table 3)
    target: str = "reencode"        # x_1 = E([prompt || rollout]); or latents
    t_per: str = "rollout"          # one t for all of a rollout's patches; or patch
    draws: int = 1                  # (t, x_0) draws per patch on one LM pass, t stratified
    share_noise: bool = False       # a group shares t and x_0 at each patch index
    ema: float = 0.0                # averaged policy for evaluation; 0 is off
    redraws: int = 4                # tries to replace a group whose rewards are all equal
    micro_batch: int = 32           # rollouts per backward pass: memory only

    def __post_init__(self):
        if self.group_size < 2:
            raise ValueError(f"grow.group_size={self.group_size}; one rollout has no baseline, "
                             "use 2 or more (the paper: 8)")
        for name, known in (("weighting", ("signed", "exp_advantage", "exp_reward")),
                            ("velocity", ("conditional", "guided")),
                            ("target", ("reencode", "latents")), ("t_per", ("rollout", "patch"))):
            if getattr(self, name) not in known:
                raise ValueError(f"grow.{name}={getattr(self, name)!r}; known are {known}")
        at_least("grow", self, steps=1, prompts_per_step=1, draws=1, micro_batch=1, redraws=0,
                 beta_w2=0, lr=0, warmup=0, weight_decay=0, tau=0)
        shares("grow", self, "betas", "ema", one=False)
        if not self.grad_clip > 0:
            raise ValueError(f"grow.grad_clip={self.grad_clip}; wanted more than 0, and a large "
                             "number where nothing is to be clipped")


@dataclass
class Prompt:
    """One example of the prompt set D: what a group of rollouts starts from."""
    token_ids: list                 # prompt text and target text
    n_target: int                   # tokens of the target text alone; sets the length cap
    text: str                       # target text y, what the recogniser should hear
    wav: torch.Tensor               # (S,) prompt waveform x_ref, whole patches
    latents: torch.Tensor           # (N0, P, D) = E(x_ref), normalised


# ---------------------------------------------------------------- rewards -> weights

def standardize(rewards, eps=1e-6):
    """Eq. (9): centre and scale each prompt's rewards within its own group.
    rewards: (B, G) float32, higher is better. Population standard deviation.
    Returns (B, G); zeros for a group whose rewards are all equal.
    Raises ValueError if G < 2: one rollout has no baseline.
    """
    if rewards.shape[-1] < 2:
        raise ValueError(f"a group of {rewards.shape[-1]} rollout has no baseline; "
                         "wanted 2 or more")
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    std = centred.pow(2).mean(dim=-1, keepdim=True).sqrt()
    return torch.where(spread(rewards)[..., None], centred / (std + eps), 0.0)


def spread(rewards):
    """(B, G) -> (B,) True where a group's rewards are not all equal."""
    return rewards.amax(dim=-1) > rewards.amin(dim=-1)


def usable(streams):
    """Groups that carry a gradient: at least one stream varies. dict of (B, G) -> (B,) bool."""
    return torch.stack([spread(r) for r in streams.values()]).any(dim=0)


def weights(streams, lambdas, weighting="signed", tau=1.0):
    """Eq. (9): w = sum_r lambda_r z_r, or the exponential ancestors of Table 2.
    streams: name -> (B, G) rewards; lambdas: name -> weight of the stream. Returns (B, G).
    exp_advantage is Eq. (5) on the summed rewards; exp_reward is their group softmax times G,
    which is how the paper implements exp(tau r)."""
    if weighting == "signed":
        return sum(lambdas[name] * standardize(r) for name, r in streams.items())
    total = sum(lambdas[name] * r for name, r in streams.items())
    if weighting == "exp_advantage":
        return torch.exp(tau * (total - total.mean(dim=-1, keepdim=True)))
    return torch.softmax(tau * total, dim=-1) * total.shape[-1]


# ---------------------------------------------------------------- noise, loss

def draw_noise(key_to_generator, groups, c, n_max, P, D):
    """Line 7: t and x_0 for every generated patch of every rollout.
    key_to_generator(group, rollout) -> torch.Generator; groups: ids of the groups; n_max: patches.
    Returns t (K, R, n_max) and x_0 (K, R, n_max, P, D), R = rollouts of all groups, K = draws.
    Each of the K strata of [0, 1] holds one t, so a patch's draws cover all times."""
    t, x_0 = [], []
    for group in groups:
        for k in range(1 if c.share_noise else c.group_size):
            g = key_to_generator(group, k)
            u = torch.rand(c.draws, 1, generator=g).expand(c.draws, n_max)
            rows = [(torch.rand(c.draws, generator=g),
                     torch.randn(c.draws, P, D, generator=g)) for _ in range(n_max)]
            if c.t_per == "patch":
                u = torch.stack([r for r, _ in rows], dim=1)        # (K, n_max)
            strata = torch.arange(c.draws)[:, None]
            repeats = c.group_size if c.share_noise else 1
            t += [(strata + u) / c.draws] * repeats
            x_0 += [torch.stack([x for _, x in rows], dim=1)] * repeats
    return torch.stack(t, dim=1), torch.stack(x_0, dim=1)


@dataclass
class Batch:
    """Line 6: rollouts as training examples. R rollouts, N patches of the longest."""
    text: torch.Tensor              # (R, L) ids of prompt text + target text
    text_len: torch.Tensor          # (R,)
    patches: torch.Tensor           # (R, N, P, D): x_1 = E([x_ref || x^])
    n_prompt: torch.Tensor          # (R,) patches of the prompt: no loss on them
    n: torch.Tensor                 # (R,) patches in all


def grow_loss(policy, reference, batch, w, t, x_0, beta_w2, cfg_scale=None, total=None):
    """Eq. (11): mean_k w_k l_k + beta_W2 mean_k a_k, with l_k = mean ‖v_theta - v*‖^2 and
    a_k = mean ‖v_theta - v_ref‖^2 over rollout k's generated patches, latent dims and draws.

    w: (R,); t: (K, R, n_max) and x_0: (K, R, n_max, P, D), indexed by generated patch;
    cfg_scale: None compares the conditional velocity (the paper), a number the guided one;
    total: rollouts that the mean runs over, when this batch is a part of them.
    Returns a dict: "policy", "anchor", "loss" (scalars) and per-rollout "l", "a" (R,).
    Raises ValueError when a rollout has no generated patch."""
    K, R, N = t.shape[0], len(batch.n), batch.patches.shape[1]
    n_generated = batch.n - batch.n_prompt
    if (n_generated < 1).any():
        raise ValueError("a rollout without a generated patch has no loss; drop its group")
    total = R if total is None else total
    index = torch.arange(N, device=batch.n.device)
    mask = (index >= batch.n_prompt[:, None]) & (index < batch.n[:, None])      # (R, N)
    rows, weight = pad_rows(mask.flatten().nonzero()[:, 0])
    r, i = rows // N, rows % N                                      # (M,) rollout and patch
    j = (i - batch.n_prompt[r]).clamp(min=0)
    x_1 = batch.patches[r, i].repeat(K, 1, 1)                       # (K*M, P, D)
    history = history_of(batch.patches)[r, i].repeat(K, 1, 1)
    t, x_0 = t[:, r, j].flatten(), x_0[:, r, j].flatten(0, 1)
    x_t, v_star = interpolate(x_0, x_1, t)

    def velocity(model):
        h = model.hidden(batch.text, batch.text_len, batch.patches)[r, i].repeat(K, 1)
        v = model.velocity(x_t, t, h, history).float()
        if cfg_scale is None:
            return v
        return guided(v, model.velocity(x_t, t, torch.zeros_like(h), history).float(), cfg_scale)

    v = velocity(policy)
    with torch.no_grad():
        v_ref = velocity(reference)
    share = (weight / n_generated[r] / K).repeat(K)                 # (K*M,) sums to 1 per rollout

    def per_rollout(error):
        error = error.pow(2).mean(dim=(1, 2)) * share               # (K*M,)
        return torch.zeros(R, device=error.device).index_add(0, r.repeat(K), error)
    l_k, a_k = per_rollout(v - v_star), per_rollout(v - v_ref)
    policy_term, anchor = (w * l_k).sum() / total, a_k.sum() / total
    return {"policy": policy_term, "anchor": anchor, "loss": policy_term + beta_w2 * anchor,
            "l": l_k.detach(), "a": a_k.detach()}


# ---------------------------------------------------------------- one step

def assemble(vae, prompts, utterances, wavs, c, latent="mean", generators=None):
    """Line 6: u = [x_ref || x^], x_1 = E(u). prompts, utterances, wavs, generators: lists of R;
    latent: the posterior's mean, or a sample of it with each rollout's own generator."""
    P, D = prompts[0].latents.shape[1:]
    text_len = torch.tensor([len(p.token_ids) for p in prompts])
    n_prompt = torch.tensor([len(p.latents) for p in prompts])
    n = n_prompt + torch.tensor([len(u.latents) for u in utterances])
    text = torch.zeros(len(prompts), round_up(text_len.max(), 16), dtype=torch.long)
    patches = torch.zeros(len(prompts), round_up(n.max(), 8), P, D)
    for i, (p, u, wav) in enumerate(zip(prompts, utterances, wavs)):
        text[i, :text_len[i]] = torch.tensor(p.token_ids)
    if c.target == "latents":
        for i, (p, u) in enumerate(zip(prompts, utterances)):
            patches[i, :n[i]] = torch.cat((p.latents, u.latents.cpu()))
    else:
        hop = len(prompts[0].wav) // (len(prompts[0].latents) * P)
        audio = torch.zeros(len(prompts), patches.shape[1] * P * hop)
        for i, (p, wav) in enumerate(zip(prompts, wavs)):
            audio[i, :n[i] * P * hop] = torch.cat((p.wav, wav))
        for part in torch.arange(len(prompts)).split(32):
            mean, log_var = vae.encode(audio[part].to(vae.latent_mean.device),
                                       (n[part] * P * hop).to(vae.latent_mean.device))
            for i, *posterior in zip(part.tolist(), mean.cpu(), log_var.cpu()):
                own = [v[:n[i] * P] for v in posterior]     # noise must not depend on the padding
                x_1 = draw_latents(*own, latent, generators and generators[i])
                patches[i, :n[i]] = x_1.view(-1, P, D)
    return Batch(text, text_len, patches, n_prompt, n)


def speak(actor, prompts, seeds, c, s, **how):
    """Line 3: G rollouts of each prompt."""
    return generate(actor, [p.token_ids for p in prompts], [p.latents for p in prompts],
                    [s.cap(p.n_target) for p in prompts], seeds, group=c.group_size, nfe=s.nfe,
                    cfg_scale=s.cfg_scale, sway=s.sway, **how)


@dataclass
class Groups:
    """Scored rollouts of the groups that carry a gradient, a group's rollouts adjacent."""
    slots: list                     # B ids of the groups, sorted
    prompts: list                   # R = B*G
    utterances: list                # R
    wavs: list                      # R generated waveforms
    rewards: dict                   # name -> (B, G)


def collect(roll_out, vae, streams, draw_prompt, slots, generator, c):
    """Lines 3-4: roll out and score the groups `slots`; one without reward variance, or with a wav
    that is not finite, is discarded and redrawn, at most c.redraws times. roll_out(prompts, seeds)
    -> G utterances of each prompt. Returns Groups, maybe without any, and numbers to log. The other
    arguments are grow_step's."""
    G, log = c.group_size, {"sec_rollout": 0.0, "sec_decode": 0.0, "sec_reward": 0.0}
    kept, pending, discarded = {}, list(slots), 0
    utterance_count = caps_hit = n_bad = 0
    for attempt in range(c.redraws + 1):
        # 3: draw (x_ref, y_ref, y) ~ D, roll out G candidates from the current policy
        prompts = [draw_prompt(slot, attempt) for slot in pending]
        repeated = [p for p in prompts for _ in range(G)]
        seeds = [int(torch.randint(2**62, (1,), generator=generator("rollout", slot, attempt, k)))
                 for slot in pending for k in range(G)]
        clock = [time.perf_counter()]
        utterances = roll_out(prompts, seeds)
        clock.append(time.perf_counter())
        wavs = decode_wavs(vae, [p.latents for p in repeated], utterances)
        clock.append(time.perf_counter())
        # 4: compute rewards
        rewards, bad = reward_module.score(streams, wavs, [p.text for p in repeated],
                                           [p.wav for p in repeated])
        clock.append(time.perf_counter())
        for name, start, end in zip(("sec_rollout", "sec_decode", "sec_reward"), clock, clock[1:]):
            log[name] += end - start
        utterance_count += len(utterances)
        caps_hit += sum(not u.stopped for u in utterances)
        n_bad += int(bad.sum())
        # no gradient without reward variance, and nan spoils the batch: discard and redraw
        ok = usable({name: r.view(-1, G) for name, r in rewards.items()}).tolist()
        for b, slot in enumerate(pending):
            rows = slice(b * G, (b + 1) * G)
            ok[b] = ok[b] and all(torch.isfinite(wav).all() for wav in wavs[rows])
            if ok[b]:
                kept[slot] = (repeated[rows], utterances[rows], wavs[rows],
                              {name: r[rows] for name, r in rewards.items()})
        pending = [slot for slot, good in zip(pending, ok) if not good]
        discarded += len(pending)
        if not pending:
            break
    log |= {"discarded": discarded / (len(kept) + discarded), "caps": caps_hit / utterance_count,
            "bad": n_bad / utterance_count, "groups": len(kept)}
    groups = [kept[slot] for slot in sorted(kept)]
    rewards = {name: torch.stack([g[3][name] for g in groups]) for name in streams if groups}
    for name, r in rewards.items():
        log |= {name: r.mean().item(), f"{name}_spread": r.std(dim=1, correction=0).mean().item()}
    prompts, utterances, wavs = ([x for g in groups for x in g[i]] for i in range(3))
    if groups:
        log |= guards.panel(wavs, [p.text for p in prompts])
    return Groups(sorted(kept), prompts, utterances, wavs, rewards), log


def grow_step(policy, actor, reference, vae, streams, lambdas, draw_prompt, slots, generator, c, s,
              global_sum, autocast):
    """Algorithm 1, lines 3-8, and the backward pass; line 9, AdamW, is Run.fit's in run.py.

    policy: the model that learns; actor: the same weights in the precision of rollouts;
    reference: frozen theta_pre. streams: name -> reward; lambdas: name -> lambda_r.
    draw_prompt(slot, attempt) -> Prompt; slots: ids of this rank's groups;
    generator(*key) -> torch.Generator, a pure function of its key; global_sum(number) adds over
    ranks. Returns numbers to log."""
    # 3, 4: roll out G candidates of each prompt from the current policy, compute rewards
    groups, log = collect(lambda prompts, seeds: speak(actor, prompts, seeds, c, s), vae, streams,
                          draw_prompt, slots, generator, c)
    total = global_sum(len(groups.slots)) * c.group_size            # rollouts in the mean
    if not groups.slots:
        return log

    started = time.perf_counter()
    # 5: compute weights
    w = weights(groups.rewards, lambdas, c.weighting, c.tau).flatten()                  # (R,)
    # 6: assemble training data u = [x_ref || x^], x_1 = E(u)
    batch = assemble(vae, groups.prompts, groups.utterances, groups.wavs, c, policy.config.latent,
                     [generator("encode", slot, k) for slot in groups.slots
                      for k in range(c.group_size)])
    # 7: sample t and x_0; x_t and v* are formed in grow_loss
    n_max = int((batch.n - batch.n_prompt).max())
    t, x_0 = draw_noise(lambda slot, k: generator("noise", slot, k), groups.slots, c, n_max,
                        *batch.patches.shape[2:])
    # 8: compute loss and its gradient, in parts that fit in memory
    device, sums = policy.speech_start.device, {"policy": 0.0, "anchor": 0.0, "l": 0.0}
    for part in torch.arange(len(w)).split(c.micro_batch):
        piece = Batch(*(v[part].to(device) for v in vars(batch).values()))
        piece.patches = piece.patches[:, :round_up(piece.n.max(), 8)]
        with autocast():
            terms = grow_loss(policy, reference, piece, w[part].to(device), t[:, part].to(device),
                              x_0[:, part].to(device), c.beta_w2,
                              s.cfg_scale if c.velocity == "guided" else None,
                              total=total)
        terms["loss"].backward()
        for name in sums:
            sums[name] += terms[name].sum().item()
    share = total / len(w)                  # under torchrun the log shows this rank's groups
    log |= {"policy": sums["policy"] * share, "anchor": sums["anchor"] * share,
            "flow": sums["l"] / len(w),
            "below_anchor": (w < -c.beta_w2).float().mean().item(),
            "patches": (batch.n - batch.n_prompt).float().mean().item(),
            "audio_sec": sum(len(x) for x in groups.wavs) / SAMPLE_RATE,
            "sec_update": time.perf_counter() - started}
    return log
