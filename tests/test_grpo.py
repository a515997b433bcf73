"""What grpo.py promises: noisy steps of the right law, exact ratios, and a step that learns."""
import contextlib
import math
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import grpo
from conftest import assert_close, count_velocity_calls, gradients, randn, tiny_ditar
from grow import Prompt, weights
from grpo import (GrpoConfig, Recorder, coefficients, grpo_loss, grpo_step, log_density, step_mean,
                  window_steps)
from sample import SampleConfig, generate, times

P, D, HOP = 2, 4, 400
KINDS = ("cps", "flow")


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def moved(model, size=0.05):
    """The same model with its parameters a little elsewhere."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(size * randn(*p.shape, seed=i))
    return model


# ---- config and window -------------------------------------------------------------------------

@pytest.mark.parametrize("change, message", (
    ({"group_size": 1}, "grpo.group_size=1; one rollout has no baseline"),
    ({"sde": "ddpm"}, "grpo.sde='ddpm'; known are"),
    ({"log_prob": "sum"}, "grpo.log_prob='sum'; known are"),
    ({"window": 0}, "grpo.window=0; wanted 1 or more"),
    ({"shift_every": -1}, "grpo.shift_every=-1; wanted 0 or more"),
    ({"kl": -0.1}, "grpo.kl=-0.1; wanted 0 or more"),
    ({"eta": 0.0}, "grpo.eta=0.0; wanted more than 0, and with cps at most 1"),
    ({"eta": 1.2}, "grpo.eta=1.2; wanted more than 0, and with cps at most 1"),
    ({"clip": 0.0}, "grpo.clip=0.0; wanted more than 0"),
    ({"grad_clip": -1.0}, "grpo.grad_clip=-1.0; wanted more than 0"),
    ({"lr": -1e-4}, "grpo.lr=-0.0001; wanted 0 or more"),
    ({"betas": (0.9, 1.0)}, "grpo.betas=(0.9, 1.0); wanted 0 to 1, and less than 1"),
    ({"ema": 1.0}, "grpo.ema=1.0; wanted 0 to 1, and less than 1"),
))
def test_a_config_that_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GrpoConfig(**change)


def test_defaults_are_the_papers_where_it_speaks():
    c = GrpoConfig()
    assert (c.window, c.sde, c.group_size, c.prompts_per_step) == (3, "cps", 8, 16)
    assert GrpoConfig(sde="flow", eta=1.2).eta == 1.2


@pytest.mark.parametrize("nfe", (4, 5, 10, 32))
def test_the_window_moves_over_every_step_but_the_last_and_starts_again(nfe):
    c = GrpoConfig(shift_every=2)
    starts = [window_steps(c.at(step), nfe).start for step in range(0, 2 * (nfe - 3) + 2, 1)]
    assert starts == [step // 2 % (nfe - 3) for step in range(len(starts))]
    assert starts[-1] == 0
    for step in range(100):
        steps = list(window_steps(c.at(step), nfe))
        assert steps == list(range(steps[0], steps[0] + 3)) and nfe - 1 not in steps
    fixed = GrpoConfig(shift_every=0, window_start=1)
    assert fixed.at(1000) == fixed


@pytest.mark.parametrize("nfe", (1, 3))
def test_a_grid_without_room_for_the_window_is_refused(nfe):
    with pytest.raises(ValueError, match=f"sample.nfe={nfe} leaves no room for grpo.window=3.*"
                                         "use nfe=4 or more"):
        window_steps(GrpoConfig(), nfe)
    with pytest.raises(ValueError, match="leaves no room"):         # before anything is rolled out
        step(tiny_ditar(), nfe=nfe, draw_prompt=None)


# ---- one noisy step ----------------------------------------------------------------------------

@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_a_step_is_eulers_bit_for_bit(kind):
    grid, x, v = times(7), randn(3, P, D), randn(3, P, D, seed=1)
    for n, (t, dt, k, std) in enumerate(zip(*coefficients(grid, range(0, 6), 0.0, kind))):
        assert k == 0 and std == 0
        assert torch.equal(step_mean(x, v, t, dt, k), x + (grid[n + 1] - grid[n]) * v)


@pytest.mark.parametrize("sway", (-1.0, 0.0))
@pytest.mark.parametrize("eta", (0.3, 0.7, 1.0))
def test_cps_keeps_the_noise_level_of_the_schedule(eta, sway):
    # x_t = (1-t) e + t x_1 and the exact velocity x_1 - e: what noise is left, plus what is new
    grid, x_1, noise = times(9, sway), torch.tensor([[[2.0]]]), torch.tensor([[[1.0]]])
    for n, (t, dt, k, std) in enumerate(zip(*coefficients(grid, range(0, 8), eta, "cps"))):
        mean = step_mean((1 - t) * noise + t * x_1, x_1 - noise, t, dt, k)
        old = mean - grid[n + 1] * x_1                              # coefficient of e
        assert_close(old.square() + std.square(), (1 - grid[n + 1]).square().view(1, 1, 1), 1e-6)
        assert_close(mean - old, grid[n + 1] * x_1, 1e-6)           # and exactly t' of the data
    assert std > 0


def test_flow_sde_raises_the_noise_above_the_schedule_where_cps_keeps_it():
    # by hand, t .2 -> .45, eta .7: g = 1.4, k = 1.96 * .25 / 1.6 = .30625, std = .7;
    # noise left .8 - .25 - .30625 = .24375, in all sqrt(.24375^2 + .7^2) = .741 against .55
    grid, x_1, noise = torch.tensor([0.0, 0.2, 0.45, 1.0]), torch.zeros(1), torch.ones(1)
    level = {}
    for kind in KINDS:
        t, dt, k, std = (c[0] for c in coefficients(grid, range(1, 2), 0.7, kind))
        old = step_mean((1 - t) * noise, x_1 - noise, t, dt, k)
        level[kind] = (old.square() + std.square()).sqrt().item()
    assert level == pytest.approx({"cps": 0.55, "flow": 0.741}, abs=5e-4)


def test_flow_sde_is_finite_at_pure_noise():
    for value in coefficients(times(10), range(0, 9), 0.7, "flow"):
        assert torch.isfinite(value).all()
    std = coefficients(times(10), range(0, 2), 0.7, "flow")[3]      # on the sway grid, above 1:
    assert std.tolist() == pytest.approx([0.7, 1.2], abs=1e-3)      # more noise than there was


def test_gaussian_log_density_is_torchs_and_square_drops_all_but_the_error():
    x_next, mean, std = randn(3, P, D), randn(3, P, D, seed=1), torch.rand(3, 1, 1) + 0.1
    expected = torch.distributions.Normal(mean, std).log_prob(x_next).mean(dim=(1, 2))
    assert_close(log_density(x_next, mean, std), expected)
    square = log_density(x_next, mean, std, "square")
    assert_close(square, -(x_next - mean).pow(2).mean(dim=(1, 2)))
    constant = -torch.log(std) - math.log(2 * math.pi) / 2
    assert_close(square / (2 * std[:, 0, 0] ** 2) + constant[:, 0, 0], expected)


# ---- recorded rollouts -------------------------------------------------------------------------

TEXTS, CAPS = ([3, 1, 4], [1, 5, 9, 2, 6]), [2, 4]
PROMPTS = [randn(2, P, D, seed=7), torch.zeros(0, P, D)]
SEEDS = [11, 12, 13, 14, 15, 16]


def record(model, c=GrpoConfig(), nfe=6, cfg_scale=1.5, order=(0, 1), group=3):
    """Two prompts of different lengths, `group` rollouts each: their records and the window."""
    seeds = [seed for p in order for seed in SEEDS[p * 3:p * 3 + group]]
    recorder = Recorder(seeds, times(nfe), c)
    spoken = generate(model, [TEXTS[p] for p in order], [PROMPTS[p] for p in order],
                      [CAPS[p] for p in order], seeds, group=group, nfe=nfe, cfg_scale=cfg_scale,
                      solver=recorder)
    return recorder.attach(spoken), recorder.window


ADVANTAGES = torch.tensor([1.2, -0.7, -0.9, 0.4, -1.1, 1.1])        # sum to 0


def loss_of(policy, spoken, window, c=GrpoConfig(), advantages=ADVANTAGES, reference=None,
            cfg_scale=1.5, **more):
    return grpo_loss(policy, reference or policy, spoken, advantages, window, c, cfg_scale, **more)


@pytest.mark.parametrize("start", (0, 2))
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_rollout_equals_an_independent_loop_in_numpy(kind, start):
    model, eta, gamma = tiny_ditar(), 0.6, 1.5
    spoken, _ = record(model, GrpoConfig(sde=kind, eta=eta, window_start=start))
    grid = 1 - np.cos(np.pi / 2 * np.arange(7) / 6)

    def velocity(x, t, h, history):
        def one(h):
            with torch.no_grad():
                return model.velocity(torch.tensor(x[None]).float(), torch.tensor([t]).float(),
                                      h[None], history[None])[0].double().numpy()
        v_c, v_0 = one(h), one(torch.zeros_like(h))
        return v_c + gamma * (v_c - v_0)
    for u, seed in zip(spoken, SEEDS):
        first, fresh = (torch.Generator().manual_seed(s) for s in (seed, seed ^ grpo.NOISE_STREAM))
        for i in range(len(u.latents)):
            x = torch.randn(P, D, generator=first).double().numpy()
            noise = torch.randn(3, P, D, generator=fresh).double().numpy()
            for n, (t, t2) in enumerate(zip(grid[:-1], grid[1:])):
                v = velocity(x, t, u.h[i], u.history[i])
                x0hat, x1hat, j = x - t * v, x + (1 - t) * v, n - start
                if not 0 <= j < 3:
                    x = x + (t2 - t) * v
                    continue
                if kind == "cps":
                    std = (1 - t2) * np.sin(eta * np.pi / 2)
                    mean = t2 * x1hat + (1 - t2) * np.cos(eta * np.pi / 2) * x0hat
                else:                               # in Flow-GRPO's own time, sigma = 1 - t
                    sigma, step = 1 - t, -(t2 - t)
                    g = eta * np.sqrt(sigma / (grid[1] if t == 0 else 1 - sigma))
                    mean = (x * (1 + g ** 2 / (2 * sigma) * step)
                            - v * (1 + g ** 2 * (1 - sigma) / (2 * sigma)) * step)
                    std = g * np.sqrt(-step)
                np.testing.assert_allclose(u.path[i, j], x, atol=1e-4)
                x = mean + std * noise[j]
                expected = (-noise[j] ** 2 / 2 - np.log(std) - np.log(2 * np.pi) / 2).mean()
                assert u.log_prob[i, j].item() == pytest.approx(expected, abs=1e-4)
                np.testing.assert_allclose(u.path[i, j + 1], x, atol=1e-4)
            np.testing.assert_allclose(u.latents[i], x, atol=2e-4)


def test_records_hold_the_window_of_each_utterances_own_patches_and_nothing_else():
    spoken, _ = record(tiny_ditar())
    assert [len(u.latents) for u in spoken] == [2, 2, 2, 4, 4, 4]
    for u, prompt in zip(spoken, [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3):
        n = len(u.latents)
        assert u.h.shape == (n, 24) and u.path.shape == (n, 4, P, D) and u.log_prob.shape == (n, 3)
        before = prompt[-1] if len(prompt) else torch.zeros(P, D)
        assert torch.equal(u.history, torch.cat((before[None], u.latents[:-1])))
        assert not any(v.requires_grad for v in (u.h, u.history, u.path, u.log_prob))


def test_recorded_states_are_those_of_generate():
    """h while recording equals the teacher-forced h of the same latents."""
    model = tiny_ditar()
    spoken, _ = record(model)
    for u, text, prompt in zip(spoken[::3], TEXTS, PROMPTS):
        patches = torch.cat((prompt, u.latents))[None]
        h = model.hidden(torch.tensor([text]), torch.tensor([len(text)]), patches)[0]
        assert_close(u.h, h[len(prompt):].detach(), 1e-4)


def test_an_utterances_noise_depends_on_neither_batch_nor_order():
    model = tiny_ditar()
    both, _ = record(model)
    turned, _ = record(model, order=(1, 0))
    alone, _ = record(model, order=(1,), group=1)
    for a, b in zip(both, turned[3:] + turned[:3]):
        assert_close(a.path, b.path)
        assert_close(a.latents, b.latents)
    assert_close(both[3].latents, alone[0].latents)
    assert not torch.allclose(both[3].latents, both[4].latents, atol=0.1)


def test_a_tiny_eta_is_the_deterministic_rollout():
    model = tiny_ditar()
    spoken, _ = record(model, GrpoConfig(eta=1e-6))
    plain = generate(model, TEXTS, PROMPTS, CAPS, SEEDS, group=3, nfe=6)
    for a, b in zip(spoken, plain):
        assert_close(a.latents, b.latents, 1e-4)


# ---- ratio, loss, gradient ---------------------------------------------------------------------

@pytest.mark.parametrize("log_prob", ("gaussian", "square"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", (0, 2))
def test_before_the_first_update_the_ratio_is_one_and_the_loss_zero(kind, start, log_prob):
    policy, c = tiny_ditar(), GrpoConfig(sde=kind, window_start=start, log_prob=log_prob)
    spoken, window = record(policy, c)
    recorded = torch.cat([u.log_prob.flatten() for u in spoken])
    out = loss_of(policy, spoken, window, c, log_prob_old=recorded)     # the actor's own, float32
    assert_close(out["log_prob"], recorded, 1e-6)
    assert out["deviation"] < 2e-6 and out["clip_share"] == 0
    # rollouts differ in length and advantages sum to 0, so a mean per rollout cancels
    assert out["loss"].item() == pytest.approx(0, abs=1e-5)
    out["loss"].backward()
    assert flat_gradient(policy).abs().max() > 1e-3


def test_at_ratio_one_the_gradient_is_that_of_minus_a_times_log_p():
    policy = tiny_ditar()
    spoken, window = record(policy)
    loss_of(policy, spoken, window)["loss"].backward()
    ours = flat_gradient(policy)
    policy.zero_grad(set_to_none=True)
    total = 0
    for u, A in zip(spoken, ADVANTAGES):            # one transition at a time, another way round
        for i in range(len(u.latents)):
            for j in range(3):
                t, dt, k, std = (value[j] for value in window)
                x, h, history = u.path[i, j][None], u.h[i][None], u.history[i][None]
                v_c = policy.velocity(x, t[None], h, history)
                v = v_c + 1.5 * (v_c - policy.velocity(x, t[None], 0 * h, history))
                p = torch.distributions.Normal(x + dt * v - k * (x - t * v), std)
                log_p = p.log_prob(u.path[i, j + 1][None]).mean()
                total = total - A * log_p / (3 * len(u.latents)) / len(spoken)
    total.backward()
    theirs = flat_gradient(policy)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_only_locdit_gets_a_gradient():
    policy, reference = tiny_ditar(), moved(tiny_ditar())
    spoken, window = record(policy)
    loss_of(policy, spoken, window, GrpoConfig(kl=1.0), reference=reference)["loss"].backward()
    for name, grad in gradients(policy).items():
        assert (grad is not None and grad.abs().max() > 0) == name.startswith("locdit"), name
    assert all(p.grad is None for p in reference.parameters())


@pytest.mark.parametrize("cfg_scale, passes", ((1.5, 2), (0.0, 1)))
def test_each_patch_costs_three_steps_and_both_passes_of_the_guidance(
        cfg_scale, passes, monkeypatch):
    policy = tiny_ditar()
    spoken, window = record(policy, cfg_scale=cfg_scale)
    monkeypatch.setattr(grpo, "pad_rows", lambda rows: (rows, torch.ones(len(rows))))
    calls = count_velocity_calls(policy, monkeypatch)
    loss_of(policy, spoken, window, cfg_scale=cfg_scale)
    call, = calls
    patches = sum(len(u.latents) for u in spoken)
    assert len(call["x_t"]) == patches * 3 * passes
    assert (call["h"] == 0).all(dim=1).sum() == patches * 3 * (passes - 1)
    assert sorted(set(call["t"].tolist())) == times(6)[:3].tolist()     # no step outside


def test_zero_advantages_give_no_gradient():
    policy = tiny_ditar()
    spoken, window = record(policy)
    loss_of(policy, spoken, window, advantages=torch.zeros(6))["loss"].backward()
    assert flat_gradient(policy).abs().max() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", (0, 1, 2))
def test_kl_is_zero_at_the_reference_and_finite_and_right_elsewhere(kind, start):
    policy, c = tiny_ditar(), GrpoConfig(sde=kind, kl=1.0, window_start=start)
    spoken, window = record(policy, c)
    out = loss_of(policy, spoken, window, c, torch.zeros(6))
    out["loss"].backward()
    assert out["kl"] == 0 and flat_gradient(policy).abs().max() == 0
    policy.zero_grad(set_to_none=True)
    reference = moved(tiny_ditar())
    out = loss_of(policy, spoken, window, c, torch.zeros(6), reference)
    expected = 0
    for u in spoken:
        for i in range(len(u.latents)):
            for j in range(3):
                t, dt, k, std = (value[j] for value in window)
                x, p = u.path[i, j][None], []
                for m in (policy, reference):
                    v_c = m.velocity(x, t[None], u.h[i][None], u.history[i][None])
                    v_0 = m.velocity(x, t[None], 0 * u.h[i][None], u.history[i][None])
                    v = v_c + 1.5 * (v_c - v_0)
                    p.append(torch.distributions.Normal(step_mean(x, v, t, dt, k), std))
                kl = torch.distributions.kl_divergence(*p).mean()
                expected += kl.item() / (3 * len(u.latents)) / len(spoken)
    assert out["kl"].item() == pytest.approx(expected, rel=1e-3) and expected > 0
    out["loss"].backward()
    assert torch.isfinite(flat_gradient(policy)).all() and flat_gradient(policy).abs().max() > 0


def test_one_small_step_raises_the_advantage_weighted_likelihood_of_what_was_recorded():
    policy = tiny_ditar()
    spoken, window = record(policy)
    share = torch.cat([A / len(u.latents) * torch.ones(3 * len(u.latents))
                       for u, A in zip(spoken, ADVANTAGES)])
    before = loss_of(policy, spoken, window)
    before["loss"].backward()
    with torch.no_grad():
        for p in policy.parameters():
            if p.grad is not None:
                p -= 1e-3 * p.grad
    after = loss_of(policy, spoken, window)
    assert (share * after["log_prob"]).sum() > (share * before["log_prob"]).sum() + 1e-6


def test_beyond_its_range_the_clip_stops_what_already_went_far_enough():
    policy = tiny_ditar()
    spoken, window = record(policy)
    spoken = spoken[:1]
    now = loss_of(policy, spoken, window, advantages=ADVANTAGES[:1])["log_prob"]
    c, far = GrpoConfig(clip=0.01), math.log(1.1)

    def outcome(A, shift):
        policy.zero_grad(set_to_none=True)
        out = loss_of(policy, spoken, window, c, torch.tensor([A]), log_prob_old=now - shift)
        out["loss"].backward()
        assert out["clip_share"] == 1
        return out["loss"].item(), flat_gradient(policy).abs().max().item()
    # ratio 1.1: a good rollout gains no more, a bad one is pushed back in full; ratio 1/1.1: turned
    loss, grad = outcome(2.0, far)
    assert loss == pytest.approx(-2 * 1.01, abs=1e-4) and grad == 0
    loss, grad = outcome(-2.0, far)
    assert loss == pytest.approx(2 * 1.1, abs=1e-4) and grad > 1e-3
    loss, grad = outcome(2.0, -far)
    assert loss == pytest.approx(-2 / 1.1, abs=1e-4) and grad > 1e-3
    loss, grad = outcome(-2.0, -far)
    assert loss == pytest.approx(2 * 0.99, abs=1e-4) and grad == 0


def test_parts_of_a_batch_sum_to_its_gradient():
    policy = tiny_ditar()
    spoken, window = record(policy)
    loss_of(policy, spoken, window)["loss"].backward()
    whole = flat_gradient(policy)
    policy.zero_grad(set_to_none=True)
    for part in ([0, 1], [2, 3, 4, 5]):
        loss_of(policy, [spoken[r] for r in part], window, advantages=ADVANTAGES[part],
                total=6)["loss"].backward()
    assert_close(flat_gradient(policy), whole, 1e-5)


# ---- one step ----------------------------------------------------------------------------------

class LinearVAE:
    """A waveform that holds each latent for HOP / D samples. GRPO never encodes."""
    latent_mean = torch.zeros(D)

    def decode(self, latents, lengths):
        return latents.repeat_interleave(HOP // D, dim=2).flatten(1)            # (B, T*HOP)


def mean_latents(wavs):
    return torch.stack([wav.view(-1, D, HOP // D).mean(dim=(0, 2)) for wav in wavs])    # (B, D)


def first_near_1(wavs, texts, prompts):
    """Best where the first half of the latent dimensions averages 1."""
    return -(mean_latents(wavs)[:, :2].mean(dim=1) - 1).pow(2)


def last_near_minus_1(wavs, texts, prompts):
    return -(mean_latents(wavs)[:, 2:].mean(dim=1) + 1).pow(2)


STREAMS = {"first": first_near_1, "last": last_near_minus_1}
LAMBDAS = {"first": 1.0, "last": 0.5}


def make_prompt(slot, attempt=0):
    latents = randn(1 + slot % 3, P, D, seed=1000 * attempt + slot)
    wav = LinearVAE().decode(latents.flatten(0, 1)[None], None)[0]
    ids = [(5 * slot + i) % 13 for i in range(3 + slot % 2)]
    return Prompt(ids, 1, f"slot {slot} attempt {attempt}", wav, latents)


def keyed(*key):
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def step(policy, slots=(0, 1), actor=None, reference=None, global_sum=lambda n: n, streams=STREAMS,
         draw_prompt=make_prompt, nfe=5, autocast=contextlib.nullcontext, **changes):
    """One grpo_step; returns its log and the gradients, and clears them."""
    c = GrpoConfig(**{"group_size": 4, **changes})
    s = SampleConfig(nfe=nfe, max_patches_per_token=0.0, max_patches_extra=3)
    log = grpo_step(policy, actor or policy, reference or moved(tiny_ditar()), LinearVAE(), streams,
                    LAMBDAS, draw_prompt, list(slots), keyed, c, s, global_sum, autocast)
    grads = gradients(policy)
    policy.zero_grad(set_to_none=True)
    return log, grads


@pytest.mark.parametrize("same", (True, False))
def test_a_step_equals_its_parts_put_together_by_hand(same):
    policy, reference = tiny_ditar(), moved(tiny_ditar())
    log, grads = step(policy, reference=reference, kl=0.3, window_start=1, same_noise=same)
    c = GrpoConfig(group_size=4, kl=0.3, window_start=1)
    prompts = [make_prompt(slot) for slot in (0, 1)]
    seeds = [int(torch.randint(2**62, (1,), generator=keyed("rollout", slot, 0, k)))
             for slot in (0, 1) for k in range(4)]
    recorder = Recorder(seeds, times(5), c)
    starts = [seeds[0]] * 4 + [seeds[4]] * 4 if same else seeds
    spoken = recorder.attach(generate(
        policy, [p.token_ids for p in prompts], [p.latents for p in prompts], [3, 3], starts,
        group=4, nfe=5, solver=recorder))
    first = torch.stack([u.path[0, 0] for u in spoken]).view(2, 4, -1)      # before the window
    assert len(first.flatten(0, 1).unique(dim=0)) == (2 if same else 8)     # groups or rollouts
    assert len({u.path[0, 1].sum().item() for u in spoken}) == 8            # noise of their own
    wavs = [LinearVAE().decode(u.latents.flatten(0, 1)[None], None)[0] for u in spoken]
    rewards = {name: f(wavs, None, None).view(2, 4) for name, f in STREAMS.items()}
    out = grpo_loss(policy, reference, spoken, weights(rewards, LAMBDAS).flatten(),
                    recorder.window, c, 1.5)
    out["loss"].backward()
    for name, grad in gradients(policy).items():
        assert (grad is None) == (grads[name] is None), name
        assert grad is None or torch.allclose(grad, grads[name], atol=1e-6), name
    assert log["kl"] == pytest.approx(out["kl"].item(), rel=1e-4) and log["kl"] > 0
    assert log["policy"] == pytest.approx(0, abs=1e-5)
    assert 1 <= log["ratio_max"] < 1 + 1e-5 and log["clip_share"] == 0
    assert (log["groups"], log["discarded"], log["caps"], log["bad"]) == (2, 0, 1, 0)
    assert log["patches"] == 3 and log["audio_sec"] == 8 * 3 * P * HOP / 16_000
    assert log["window_start"] == 1
    assert log["first"] == pytest.approx(rewards["first"].mean().item(), abs=1e-6)
    assert {"last", "last_spread", "sec_rollout", "sec_decode", "sec_reward"} <= log.keys()
    assert all(math.isfinite(value) for value in log.values())


@pytest.mark.parametrize("changes", (
    {"sde": "flow"}, {"log_prob": "square"}, {"eta": 0.4}, {"kl": 1.0}, {"window": 2},
    {"window_start": 1}, {"same_noise": False}), ids=str)
def test_every_option_does_something_and_the_step_repeats_bit_for_bit(changes):
    policy = tiny_ditar()
    (_, grads), (_, again), (_, plain) = (step(policy, **o) for o in (changes, changes, {}))
    for name in grads:
        if name.startswith("locdit"):
            assert torch.isfinite(grads[name]).all() and torch.equal(grads[name], again[name])
    assert not torch.allclose(grads["locdit_out.weight"], plain["locdit_out.weight"], atol=1e-5)


def test_micro_batches_change_memory_not_gradients():
    policy = tiny_ditar()
    log, whole = step(policy, kl=1.0)
    for micro_batch in (1, 3):                                      # 3 cuts through the groups
        part_log, parts = step(policy, kl=1.0, micro_batch=micro_batch)
        assert_close(parts["locdit_out.weight"], whole["locdit_out.weight"])
        assert part_log["kl"] == pytest.approx(log["kl"], rel=1e-4)


def test_two_ranks_sum_to_the_gradient_of_one_and_a_rank_without_groups_takes_part():
    policy, kept = tiny_ditar(), []
    whole_log, whole = step(policy, slots=(0, 1, 2), kl=1.0)
    (a_log, a), (b_log, b) = (step(policy, slots=slots, kl=1.0,
                                   global_sum=lambda n: kept.append(n) or 3)
                              for slots in ((0, 2), (1,)))
    assert kept == [2, 1]
    assert_close(a["locdit_out.weight"] + b["locdit_out.weight"], whole["locdit_out.weight"])
    assert (2 * a_log["kl"] + b_log["kl"]) / 3 == pytest.approx(whole_log["kl"], rel=1e-4)
    flat = {"first": lambda wavs, texts, prompts: torch.full((len(wavs),), 0.1)}
    log, grads = step(policy, streams=flat, redraws=1, global_sum=lambda n: kept.append(n) or 2)
    assert kept[2:] == [0] and log["groups"] == 0 and log["discarded"] == 1
    assert all(g is None for g in grads.values())


@pytest.mark.parametrize("name", ("h", "history", "path", "log_prob"))
def test_a_step_on_records_that_are_not_its_policys_is_a_fatal_error(name, monkeypatch):
    attach = Recorder.attach

    def tampered(self, utterances):
        spoken = attach(self, utterances)
        value = getattr(spoken[5], name)
        return [*spoken[:5], replace(spoken[5], **{name: value + 0.02}), *spoken[6:]]
    policy = tiny_ditar()
    step(policy)
    monkeypatch.setattr(Recorder, "attach", tampered)
    with pytest.raises(RuntimeError, match="before the first update a ratio of policy to actor is "
                                           "off 1 by .*, as if a velocity was"):
        step(policy)


def test_an_actor_that_is_no_copy_of_the_policy_is_a_fatal_error():
    with pytest.raises(RuntimeError, match="the actor is no copy of the policy"):
        step(tiny_ditar(), actor=moved(tiny_ditar(), 0.01))
    with pytest.raises(RuntimeError, match="off 1 by nan"):
        grpo.check_ratio(math.nan, math.nan, torch.float32)


def test_a_bfloat16_actor_and_autocast_stay_within_their_coarser_bound():
    policy = tiny_ditar()
    _, exact = step(policy)
    log, grads = step(policy, actor=tiny_ditar().to(torch.bfloat16),
                      autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert log["ratio_max"] < 1.05 and log["clip_share"] == 0       # the clip's rho is exactly 1
    a, b = exact["locdit_out.weight"].flatten(), grads["locdit_out.weight"].flatten()
    assert b.dtype == torch.float32 and torch.cosine_similarity(a, b, dim=0) > 0.9


def test_a_step_touches_neither_reference_nor_weights_nor_the_global_generator():
    policy, reference = tiny_ditar(), moved(tiny_ditar())
    before = [p.clone() for m in (policy, reference) for p in m.parameters()]
    state = torch.get_rng_state()
    step(policy, reference=reference, kl=1.0)
    assert torch.equal(torch.get_rng_state(), state)
    for p, old in zip((*policy.parameters(), *reference.parameters()), before):
        assert torch.equal(p, old)


@pytest.mark.parametrize("kind", KINDS)
def test_grpo_finds_the_optimum_of_a_bandit_of_two_rewards(kind):
    """Both rewards are best, at 0, where the halves of the latent average 1 and -1. Judged by
    deterministic sampling, on prompts that were not trained on."""
    policy, reference = tiny_ditar(), tiny_ditar()
    trained = [p for name, p in policy.named_parameters() if name.startswith("locdit")]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    c, steps = GrpoConfig(group_size=8, sde=kind, window_start=1, shift_every=0), 30
    s = SampleConfig(nfe=5, cfg_scale=0.5, max_patches_per_token=0.0, max_patches_extra=2)

    def held_out():
        prompts = [make_prompt(slot) for slot in range(100, 106)]
        spoken = generate(policy, [p.token_ids for p in prompts], [p.latents for p in prompts],
                          [2] * 6, list(range(48)), group=8, nfe=8, cfg_scale=0.5)
        wavs = [LinearVAE().decode(u.latents.flatten(0, 1)[None], None)[0] for u in spoken]
        means = mean_latents(wavs).view(-1, 2, 2).mean(dim=(0, 2))
        return means, [f(wavs, None, None).mean().item() for f in STREAMS.values()]
    _, before = held_out()
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - i / steps)
        optimizer.zero_grad()
        grpo_step(policy, policy, reference, LinearVAE(), STREAMS, {"first": 1.0, "last": 1.0},
                  make_prompt, list(range(4)), lambda *key: keyed(i, *key), c.at(i), s,
                  lambda n: n, contextlib.nullcontext)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    means, after = held_out()
    assert_close(means, torch.tensor([1.0, -1.0]), 0.12)
    for worse, better in zip(before, after):
        assert better > worse / 5                                   # both are negative
