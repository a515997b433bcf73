"""What grow.py promises: Eq. (9) and (11), fair noise, and a step that is Algorithm 1."""
import contextlib
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import grow
from conftest import assert_close, count_velocity_calls, gradients, randn, tiny_ditar
from grow import (Batch, GrowConfig, Prompt, assemble, draw_noise, grow_loss, grow_step,
                  standardize, usable, weights)
from sample import SampleConfig, Utterance, decode_wavs

P, D, HOP = 2, 4, 400


def assert_gradients_close(ours, theirs, tol):
    """Relative to the largest entry of each parameter's gradient."""
    for name in ours:
        if ours[name] is None or theirs[name] is None:
            assert ours[name] is None and theirs[name] is None, name
        else:
            scale = theirs[name].abs().max()
            assert (ours[name] - theirs[name]).abs().max() <= tol * scale + 1e-8, name


# ---- config ------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, message", (
    ({"group_size": 1}, "grow.group_size=1; one rollout has no baseline"),
    ({"weighting": "softmax"}, "grow.weighting='softmax'; known are"),
    ({"velocity": "both"}, "grow.velocity='both'; known are"),
    ({"target": "wav"}, "grow.target='wav'; known are"),
    ({"t_per": "group"}, "grow.t_per='group'; known are"),
    ({"steps": 0}, "grow.steps=0; wanted 1 or more"),
    ({"prompts_per_step": 0}, "grow.prompts_per_step=0"),
    ({"draws": 0}, "grow.draws=0"),
    ({"micro_batch": 0}, "grow.micro_batch=0"),
))
def test_a_config_that_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        GrowConfig(**change)


def test_defaults_are_the_papers():
    c = GrowConfig()
    assert c.prompts_per_step * c.group_size == 128 and c.group_size == 8
    assert (c.beta_w2, c.lr, c.lr_decay) == (0.025, 2e-6, False)
    assert (c.weighting, c.velocity, c.target, c.t_per) == (
        "signed", "conditional", "reencode", "rollout")
    assert (c.draws, c.share_noise, c.ema) == (1, False, 0.0)


# ---- rewards -> weights ------------------------------------------------------------------------

def test_equation_9_by_hand():
    # wer: mean .5, std sqrt((.25 + .25) / 4) = .353553; sim: mean .8, std .1
    streams = {"wer": torch.tensor([[1.0, 0.5, 0.5, 0.0]]),
               "sim": torch.tensor([[0.9, 0.7, 0.9, 0.7]])}
    root = math.sqrt(2)
    assert_close(standardize(streams["wer"]), torch.tensor([[root, 0.0, 0.0, -root]]))
    assert_close(standardize(streams["sim"]), torch.tensor([[1.0, -1.0, 1.0, -1.0]]), 3e-5)
    w = weights(streams, {"wer": 1.0, "sim": 0.5})
    assert_close(w, torch.tensor([[root + 0.5, -0.5, 0.5, -root - 0.5]]), 3e-5)


def test_each_group_is_centred_and_scaled_by_itself():
    rewards = randn(3, 8) * torch.tensor([[0.1], [1.0], [30.0]]) + torch.tensor([[5.0], [0], [-9]])
    z = standardize(rewards)
    assert_close(z.mean(dim=1), torch.zeros(3))
    assert_close(z.std(dim=1, correction=0), torch.ones(3), 1e-4)
    assert_close(z[1], standardize(rewards[1:2])[0])


def test_weights_of_a_group_sum_to_zero_and_ignore_scale_and_shift_of_a_reward():
    streams = {"wer": randn(4, 8), "sim": randn(4, 8, seed=1)}
    lambdas = {"wer": 1.0, "sim": 0.3}
    w = weights(streams, lambdas)
    assert w.shape == (4, 8) and w.abs().max() > 1
    assert_close(w.sum(dim=1), torch.zeros(4))
    changed = {"wer": 100 * streams["wer"] - 7, "sim": 0.1 * streams["sim"] + 1}
    assert_close(weights(changed, lambdas), w, 1e-4)


def test_equal_rewards_give_exactly_zero_weights():
    constant = torch.full((1, 7), 0.1)              # 7 times 0.1 has no exact mean in float32
    assert (standardize(constant) == 0).all()
    varying = randn(1, 7)
    w = weights({"wer": constant, "sim": varying}, {"wer": 1.0, "sim": 1.0})
    assert torch.equal(w, standardize(varying))                     # the other one is unaffected


def test_epsilon_damps_differences_that_are_rounding():
    rewards = torch.tensor([[0.5, 0.5, 0.5, 0.5 + 6e-8]])
    assert 0 < standardize(rewards).abs().max() < 0.1


def test_one_rollout_has_no_baseline():
    with pytest.raises(ValueError, match="a group of 1 rollout has no baseline; wanted 2 or more"):
        standardize(torch.zeros(3, 1))


def test_a_group_is_usable_if_any_stream_varies():
    streams = {"wer": torch.tensor([[1.0, 1.0], [1.0, 0.5], [0.3, 0.3], [0.1, 0.2]]),
               "sim": torch.tensor([[0.2, 0.2], [0.2, 0.2], [0.1, 0.4], [0.3, 0.5]])}
    assert usable(streams).tolist() == [False, True, True, True]


def test_exponential_weightings_by_hand():
    streams = {"wer": torch.tensor([[0.0, 1.0]]), "sim": torch.tensor([[0.5, 0.5]])}
    lambdas = {"wer": 2.0, "sim": 1.0}                              # sums .5, 2.5; mean 1.5
    assert_close(weights(streams, lambdas, "exp_advantage", tau=0.5),
                 torch.tensor([[math.exp(-0.5), math.exp(0.5)]]))
    low, high = math.exp(0.25), math.exp(1.25)
    assert_close(weights(streams, lambdas, "exp_reward", tau=0.5),
                 2 * torch.tensor([[low, high]]) / (low + high))


def test_exponential_weightings_are_positive_and_differ_by_a_factor_per_group():
    streams, lambdas = {"wer": randn(3, 8), "sim": randn(3, 8, seed=1)}, {"wer": 1.0, "sim": 1.0}
    advantage = weights(streams, lambdas, "exp_advantage", 0.7)
    reward = weights(streams, lambdas, "exp_reward", 0.7)
    assert (advantage > 0).all() and (reward > 0).all()
    assert_close(reward.mean(dim=1), torch.ones(3))
    assert_close(advantage / advantage.mean(dim=1, keepdim=True), reward)


def test_a_small_tau_makes_exp_advantage_one_plus_tau_times_the_advantage():
    rewards = randn(2, 8)
    advantage = rewards - rewards.mean(dim=1, keepdim=True)
    errors = []
    for tau in (1e-2, 1e-3):
        w = weights({"r": rewards.double()}, {"r": 1.0}, "exp_advantage", tau)
        errors.append((w - 1 - tau * advantage).abs().max().item())
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.05)    # the rest is O(tau^2)


# ---- noise -------------------------------------------------------------------------------------

def keyed(*key):
    """A generator that is a pure function of its key, as train.py's."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def noise(groups, n_max=5, **changes):
    c = GrowConfig(**{"group_size": 3, **changes})
    return draw_noise(lambda group, k: keyed(group, k), groups, c, n_max, P, D)


OPTIONS = ({}, {"draws": 4}, {"draws": 4, "t_per": "patch"}, {"share_noise": True},
           {"draws": 2, "t_per": "patch", "share_noise": True})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_stratum_of_time_holds_one_t(options):
    t, x_0 = noise([0, 4], **options)
    K = options.get("draws", 1)
    assert t.shape == (K, 6, 5) and x_0.shape == (K, 6, 5, P, D)
    for k in range(K):
        assert (t[k] >= k / K).all() and (t[k] < (k + 1) / K).all()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_noise_of_a_patch_depends_on_neither_longer_rollouts_nor_other_groups(options):
    t, x_0 = noise([0, 4, 7], **options)
    t_long, x_0_long = noise([0, 4, 7], n_max=9, **options)
    assert torch.equal(t_long[:, :, :5], t) and torch.equal(x_0_long[:, :, :5], x_0)
    parts = [noise(groups, **options) for groups in ([0], [4, 7])]  # two ranks
    assert torch.equal(torch.cat([p[0] for p in parts], dim=1), t)
    assert torch.equal(torch.cat([p[1] for p in parts], dim=1), x_0)


def test_one_t_per_rollout_or_one_per_patch_and_noise_always_per_patch():
    t, x_0 = noise([0])
    assert (t == t[:, :, :1]).all() and t[0, :, 0].unique().numel() == 3
    assert x_0.unique().numel() == x_0.numel()
    t, x_0 = noise([0], t_per="patch", draws=2)
    assert t.unique().numel() == t.numel() and x_0.unique().numel() == x_0.numel()


def test_a_group_shares_its_noise_only_when_asked_and_groups_never_do():
    for options in ({"t_per": "patch"}, {"draws": 2}):
        t, x_0 = noise([0, 4], share_noise=True, **options)
        for values in (t, x_0):
            assert torch.equal(values[:, 0], values[:, 1]) and torch.equal(values[:, 0],
                                                                           values[:, 2])
            assert not torch.equal(values[:, 0], values[:, 3])
        t, x_0 = noise([0, 4], **options)
        assert not torch.equal(t[:, 0], t[:, 1]) and not torch.equal(x_0[:, 0], x_0[:, 1])


def test_times_are_uniform_and_noise_is_standard_normal():
    t, x_0 = noise(range(60), n_max=20, draws=2, t_per="patch")     # 60*3*20*2 = 7,200 times
    assert t.mean().item() == pytest.approx(0.5, abs=0.01)
    assert np.histogram(t.flatten().numpy(), bins=8, range=(0, 1))[0].std() < 0.15 * 900
    assert x_0.mean().abs() < 0.02 and x_0.std().item() == pytest.approx(1, abs=0.02)


# ---- Eq. (11) ----------------------------------------------------------------------------------

N_PROMPT, N_ALL = torch.tensor([2, 1, 3, 1]), torch.tensor([4, 4, 5, 2])        # 2, 3, 2, 1 spoken


def rollouts(seed=0):
    g = torch.Generator().manual_seed(seed)
    return Batch(torch.randint(0, 13, (4, 5), generator=g), torch.tensor([5, 2, 3, 4]),
                 torch.randn(4, 5, P, D, generator=g), N_PROMPT, N_ALL)


def loss_inputs(K=2, n_max=3, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(K, 4, n_max, generator=g), torch.randn(K, 4, n_max, P, D, generator=g)


W = torch.tensor([1.4, -0.3, -1.6, 0.5])


def moved(model, size=0.05):
    """A copy whose weights differ: the policy some steps after its reference."""
    other = tiny_ditar(chars_per_patch=model.config.chars_per_patch)
    with torch.no_grad():
        for i, (p, q) in enumerate(zip(other.parameters(), model.parameters())):
            p.copy_(q + size * randn(*q.shape, seed=i))
    return other


def numpy_loss(policy, reference, batch, w, t, x_0, beta, cfg_scale=None, total=None):
    """Eq. (11) as a loop over rollouts, patches and draws, in float64 outside the networks."""
    def velocity(model, row, patch, x_t, u):
        h = model.hidden(batch.text[row:row + 1], batch.text_len[row:row + 1],
                         batch.patches[row:row + 1])[:, patch]
        before = batch.patches[row, patch - 1] if patch else torch.zeros(P, D)
        x_t, u = torch.from_numpy(x_t).float()[None], torch.tensor([u]).float()
        v = model.velocity(x_t, u, h, before[None])[0].numpy().astype(np.float64)
        if cfg_scale is None:
            return v
        v_0 = model.velocity(x_t, u, 0 * h, before[None])[0].numpy().astype(np.float64)
        return (1 + cfg_scale) * v - cfg_scale * v_0

    l, a = [], []
    for row in range(len(batch.n)):
        errors, drifts = [], []
        for j, patch in enumerate(range(int(batch.n_prompt[row]), int(batch.n[row]))):
            for k in range(len(t)):
                x_1 = batch.patches[row, patch].numpy().astype(np.float64)
                start, u = x_0[k, row, j].numpy().astype(np.float64), t[k, row, j].item()
                x_t = start * (1 - u) + x_1 * u
                v = velocity(policy, row, patch, x_t, u)
                v_ref = velocity(reference, row, patch, x_t, u)
                errors.append(np.mean((v - (x_1 - start)) ** 2))
                drifts.append(np.mean((v - v_ref) ** 2))
        l.append(np.mean(errors))
        a.append(np.mean(drifts))
    total = total or len(l)
    policy_term, anchor = np.sum(w.numpy() * np.array(l)) / total, np.sum(a) / total
    return {"policy": policy_term, "anchor": anchor, "loss": policy_term + beta * anchor,
            "l": np.array(l), "a": np.array(a)}


@pytest.mark.parametrize("cfg_scale, total", ((None, None), (1.5, None), (None, 32)))
@torch.no_grad()
def test_grow_loss_equals_an_independent_loop_in_numpy(rate, cfg_scale, total):
    reference = tiny_ditar(chars_per_patch=rate)
    args = (moved(reference), reference, rollouts(), W, *loss_inputs(), 0.4, cfg_scale, total)
    ours, theirs = grow_loss(*args), numpy_loss(*args)
    assert theirs["a"].min() > 1e-4
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name].numpy(), value, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_long_rollouts_weigh_no_more_than_short_ones():
    # l_k is made equal by a zero velocity and a target of ones; lengths differ
    policy = tiny_ditar()
    torch.nn.init.zeros_(policy.locdit_out.weight)
    torch.nn.init.zeros_(policy.locdit_out.bias)
    batch, (t, x_0) = rollouts(), loss_inputs()
    batch.patches, x_0 = torch.ones(4, 5, P, D), torch.zeros_like(x_0)
    out = grow_loss(policy, policy, batch, W, t, x_0, 0.0)
    assert_close(out["l"], torch.ones(4))
    assert_close(out["policy"], W.sum() / 4, 1e-6)                  # 0 although lengths differ


@torch.no_grad()
def test_prompt_and_padding_carry_no_loss():
    policy, (t, x_0) = tiny_ditar(), loss_inputs()
    batch = rollouts()
    before = grow_loss(policy, moved(policy), batch, W, t, x_0, 0.1)
    junk = rollouts()
    junk.patches = torch.cat((junk.patches, randn(4, 2, P, D) * 99), dim=1)
    junk.patches[torch.arange(7) >= N_ALL[:, None]] = 77.0
    junk.text = torch.where(torch.arange(5) < junk.text_len[:, None], junk.text, 12)
    t, x_0 = t.clone(), x_0.clone()
    unused = torch.arange(3) >= (N_ALL - N_PROMPT)[:, None]
    t[:, unused], x_0[:, unused] = 0.123, 55.0                      # never read
    after = grow_loss(policy, moved(policy), junk, W, t, x_0, 0.1)
    for name in before:
        assert_close(after[name], before[name])
    # a prompt patch matters as context only: rollout 3 alone sees its own
    edited = rollouts()
    edited.patches[3, 0] += 1
    l = grow_loss(policy, policy, edited, W, *loss_inputs(), 0.1)["l"]
    assert_close(l[:3], before["l"][:3])
    assert (l[3] - before["l"][3]).abs() > 1e-4


def test_a_rollout_without_a_generated_patch_is_an_error():
    batch = replace(rollouts(), n=torch.tensor([4, 1, 5, 2]))
    with pytest.raises(ValueError, match="without a generated patch has no loss"):
        grow_loss(tiny_ditar(), tiny_ditar(), batch, W, *loss_inputs(), 0.1)


def test_zero_weights_leave_the_anchor_alone():
    reference = tiny_ditar()
    policy = moved(reference)
    out = grow_loss(policy, reference, rollouts(), 0 * W, *loss_inputs(), 0.4)
    assert out["policy"] == 0 and out["anchor"] > 1e-4
    assert out["loss"].item() == pytest.approx(0.4 * out["anchor"].item(), rel=1e-6)
    grads = torch.autograd.grad(out["policy"], list(policy.lm.parameters()), retain_graph=True)
    assert all((g == 0).all() for g in grads)
    grads = torch.autograd.grad(out["anchor"], list(policy.lm.parameters()))
    assert all(g.abs().max() > 0 for g in grads)


def test_at_the_reference_the_anchor_and_its_gradient_are_zero():
    policy, reference = tiny_ditar(), tiny_ditar()
    out = grow_loss(policy, reference, rollouts(), W, *loss_inputs(), 0.4)
    assert out["anchor"] == 0 and out["loss"] == out["policy"]
    parameters = [p for name, p in policy.named_parameters() if not name.startswith("stop_head")]
    for g in torch.autograd.grad(out["anchor"], parameters, retain_graph=True):
        assert (g == 0).all()
    with_anchor = torch.autograd.grad(out["loss"], parameters, retain_graph=True)
    for a, b in zip(with_anchor, torch.autograd.grad(out["policy"], parameters)):
        assert torch.equal(a, b)


def test_equal_rollouts_with_shared_noise_give_no_policy_gradient():
    policy = tiny_ditar()
    one, (t, x_0) = rollouts(), loss_inputs()
    same = Batch(*(v[1:2].repeat(4, *[1] * (v.ndim - 1)) for v in vars(one).values()))
    w = standardize(randn(1, 4)).flatten()
    out = grow_loss(policy, tiny_ditar(), same, w, t[:, :1].repeat(1, 4, 1),
                    x_0[:, :1].repeat(1, 4, 1, 1, 1), 0.0)
    out["policy"].backward()
    shared = max(p.grad.abs().max() for p in policy.lm.parameters())
    policy.zero_grad()
    grow_loss(policy, tiny_ditar(), same, w, t, x_0, 0.0)["policy"].backward()
    apart = max(p.grad.abs().max() for p in policy.lm.parameters())
    assert shared < 1e-5 < 1e-2 < apart                 # noise of one's own does not cancel


def test_the_gradient_reaches_lm_and_encoder_but_neither_stop_head_nor_reference():
    policy, reference = tiny_ditar(), moved(tiny_ditar())
    grow_loss(policy, reference, rollouts(), W, *loss_inputs(), 0.1)["loss"].backward()
    reached = {name for name, p in policy.named_parameters()
               if p.grad is not None and p.grad.abs().max() > 0}
    assert reached == {name for name, _ in policy.named_parameters()
                       if not name.startswith("stop_head")}
    assert all(p.grad is None for p in reference.parameters())


def test_one_conditional_call_each_and_no_dropped_condition(monkeypatch):
    policy, reference = tiny_ditar(), moved(tiny_ditar())
    calls = [count_velocity_calls(m, monkeypatch) for m in (policy, reference)]
    monkeypatch.setattr(grow, "pad_rows", lambda rows: (rows, torch.ones(len(rows))))
    grow_loss(policy, reference, rollouts(), W, *loss_inputs(), 0.1)
    for seen in calls:
        assert [len(call["x_t"]) for call in seen] == [2 * 8]       # draws x generated patches
        assert (seen[0]["h"].abs().amax(dim=1) > 0).all()
    for name in ("x_t", "t", "history"):                            # at the same points
        assert torch.equal(calls[0][0][name], calls[1][0][name])


def test_guided_velocity_adds_an_unconditional_call_and_its_gradient(monkeypatch):
    policy, reference = tiny_ditar(), moved(tiny_ditar())
    calls = count_velocity_calls(policy, monkeypatch)
    out = grow_loss(policy, reference, rollouts(), W, *loss_inputs(), 0.1, cfg_scale=1.5)
    assert [(call["h"] == 0).all().item() for call in calls] == [False, True]
    assert torch.equal(calls[0]["history"], calls[1]["history"])
    same = grow_loss(policy, reference, rollouts(), W, *loss_inputs(), 0.1, cfg_scale=0.0)
    plain = grow_loss(policy, reference, rollouts(), W, *loss_inputs(), 0.1)
    assert_close(same["loss"], plain["loss"])
    assert (out["loss"] - plain["loss"]).abs() > 1e-3


def test_a_small_step_lowers_the_weighted_loss_at_the_same_noise():
    policy, reference = tiny_ditar(), tiny_ditar()
    args = (reference, rollouts(), W, *loss_inputs(), 0.025)
    out = grow_loss(policy, *args)
    out["loss"].backward()
    with torch.no_grad():
        norm2 = sum(p.grad.pow(2).sum() for p in policy.parameters() if p.grad is not None)
        step = 1e-3 / norm2.sqrt()
        for p in policy.parameters():
            if p.grad is not None:
                p -= step * p.grad
        change = grow_loss(policy, *args)["loss"] - out["loss"]
    assert change.item() == pytest.approx(-(step * norm2).item(), rel=0.1)


def test_on_policy_gradient_equals_velocity_form_nft_and_awm():
    """Relatives of GROW agree with it at theta_old: DiffusionNFT's pair of mirrored velocities
    (times A_max, over b), and AWM's ratio exp(l_old - l) weighted by A."""
    batch, (t, x_0) = rollouts(), loss_inputs(K=1)

    def gradient(loss_of):
        policy = tiny_ditar()
        loss_of(policy).backward()
        return gradients(policy)

    def per_rollout(policy, error):
        """Mean over each rollout of error(v, v*), by way of the masked LocDiT call."""
        r, i = torch.tensor([(r, i) for r in range(4)
                             for i in range(int(N_PROMPT[r]), int(N_ALL[r]))]).T
        x_1, noise_ = batch.patches[r, i], x_0[0, r, i - N_PROMPT[r]]
        u = t[0, r, i - N_PROMPT[r]]
        h = policy.hidden(batch.text, batch.text_len, batch.patches)[r, i]
        v = policy.velocity(noise_ + u[:, None, None] * (x_1 - noise_), u, h,
                            batch.patches[r, i - 1])
        e = error(v, x_1 - noise_).pow(2).mean(dim=(1, 2))
        return torch.stack([e[r == k].mean() for k in range(4)])

    ours = gradient(lambda m: grow_loss(m, tiny_ditar(), batch, W, t, x_0, 0.0)["policy"])
    a_max, b = W.abs().max(), 0.4
    share = W / (2 * a_max) + 0.5                                   # NFT's optimality r
    nft = gradient(lambda m: a_max / b * (
        share * per_rollout(m, lambda v, target: b * v + (1 - b) * v.detach() - target)
        + (1 - share) * per_rollout(m, lambda v, target: (1 + b) * v.detach() - b * v - target)
    ).mean())
    assert_gradients_close(nft, ours, 1e-4)

    def awm_loss(m):
        l = per_rollout(m, lambda v, target: v - target)
        return -(W * torch.exp(l.detach() - l)).mean()              # ratio 1 with gradient -dl
    assert_gradients_close(gradient(awm_loss), ours, 1e-4)


def test_the_minimiser_of_a_free_velocity_is_the_weighted_mean_plus_anchor():
    # only locdit_out.bias is left: v_d = (sum w v* + beta sum v_ref) / (sum w + beta) per channel
    w, beta = torch.tensor([0.2, 1.7, 0.9, 1.2]), 0.6               # positive, as exp_reward's
    policy, reference = tiny_ditar(), moved(tiny_ditar())
    torch.nn.init.zeros_(policy.locdit_out.weight)
    torch.nn.init.zeros_(reference.locdit_out.weight)
    batch, (t, x_0) = rollouts(), loss_inputs()
    mean_target = torch.stack([
        (batch.patches[r, N_PROMPT[r]:N_ALL[r]] - x_0[:, r, :N_ALL[r] - N_PROMPT[r]]).mean(
            dim=(0, 1, 2)) for r in range(4)])                      # (4, D)
    with torch.no_grad():
        best = ((w[:, None] * mean_target).mean(0) + beta * reference.locdit_out.bias) / (
            w.mean() + beta)
        policy.locdit_out.bias.copy_(best)
    grow_loss(policy, reference, batch, w, t, x_0, beta)["loss"].backward()
    assert policy.locdit_out.bias.grad.abs().max() < 1e-6
    policy.locdit_out.bias.data += 0.1
    policy.zero_grad()
    grow_loss(policy, reference, batch, w, t, x_0, beta)["loss"].backward()
    assert_close(policy.locdit_out.bias.grad, torch.full((D,), 0.2 * (w.mean() + beta).item() / D))


def test_parts_of_a_batch_sum_to_its_gradient():
    policy, reference = tiny_ditar(), moved(tiny_ditar())
    batch, (t, x_0) = rollouts(), loss_inputs()
    grow_loss(policy, reference, batch, W, t, x_0, 0.3)["loss"].backward()
    whole = gradients(policy)
    policy.zero_grad(set_to_none=True)
    for part in ([0, 2], [1], [3]):
        piece = Batch(*(v[part] for v in vars(batch).values()))
        grow_loss(policy, reference, piece, W[part], t[:, part], x_0[:, part], 0.3,
                  total=4)["loss"].backward()
    assert_gradients_close(gradients(policy), whole, 1e-4)


def test_bfloat16_autocast_stays_near_float32_and_returns_float32():
    reference = tiny_ditar()
    policy, args = moved(reference), (reference, rollouts(), W, *loss_inputs(), 0.4)
    exact = grow_loss(policy, *args)
    with torch.autocast("cpu", torch.bfloat16):
        out = grow_loss(policy, *args)
        same = grow_loss(reference, *args)
    assert out["loss"].dtype == torch.float32
    assert_close(out["l"], exact["l"], 0.03)
    assert (out["l"] - exact["l"]).abs().max() > 1e-6               # it did run in bfloat16
    assert same["anchor"] == 0
    out["loss"].backward()
    assert policy.lm.layers[0].q_proj.weight.grad.dtype == torch.float32


# ---- one step of Algorithm 1 -------------------------------------------------------------------

class LinearVAE:
    """A waveform that holds each latent for HOP / D samples; encode is decode's exact inverse."""
    def __init__(self):
        self.encoded = []
        self.latent_mean = torch.zeros(1)       # tells the device

    def decode(self, latents, lengths):
        assert (lengths <= latents.shape[1]).all()
        return latents.repeat_interleave(HOP // D, dim=2).flatten(1)            # (B, T*HOP)

    def encode(self, wavs, lengths):
        self.encoded.append((wavs.clone(), lengths.clone()))
        mean = wavs.view(len(wavs), -1, D, HOP // D).mean(dim=-1)               # (B, T, D)
        return mean, torch.zeros_like(mean)


def loudness(wavs, texts, prompts):
    return torch.stack([wav.mean() for wav in wavs])


def late_loudness(wavs, texts, prompts):
    return torch.stack([wav[-100:].mean() for wav in wavs])


def make_prompt(slot, attempt=0):
    """Text and prompt lengths differ between slots."""
    latents = randn(1 + slot % 3, P, D, seed=1000 * attempt + slot)
    wav = LinearVAE().decode(latents.flatten(0, 1)[None], torch.tensor([P * len(latents)]))[0]
    ids = [(5 * slot + i) % 13 for i in range(3 + slot % 2)]
    return Prompt(ids, 1, f"slot {slot} attempt {attempt}", wav, latents)


def loudness_but_of_slot_1(wavs, texts, prompts):
    return torch.tensor([0.5 if text.startswith("slot 1") else wav.mean().item()
                         for wav, text in zip(wavs, texts)])


SLOT_1_IS_CONSTANT = {"loud": loudness_but_of_slot_1}
STREAMS, LAMBDAS = {"loud": loudness, "late": late_loudness}, {"loud": 1.0, "late": 0.5}


def one_process(number):
    """global_sum of a run without ranks."""
    return number


def step(policy, slots=(0, 1), global_sum=one_process, streams=STREAMS, draw_prompt=make_prompt,
         reference=None, vae=None, max_patches=3, **changes):
    """One grow_step; returns its log and the gradients, and clears them."""
    c = GrowConfig(**{"group_size": 4, "beta_w2": 0.1, **changes})
    s = SampleConfig(nfe=3, max_patches_per_token=0.0, max_patches_extra=max_patches)
    log = grow_step(policy, policy, reference or moved(tiny_ditar()), vae or LinearVAE(), streams,
                    LAMBDAS, draw_prompt, list(slots), keyed, c, s, global_sum,
                    contextlib.nullcontext)
    grads = gradients(policy)
    policy.zero_grad(set_to_none=True)
    return log, grads


def test_a_step_equals_its_parts_put_together_by_hand(monkeypatch):
    seen = {}
    monkeypatch.setattr(grow, "generate", lambda *a, _f=grow.generate, **k: seen.setdefault(
        "spoken", _f(*a, **k)))
    policy, reference = tiny_ditar(), moved(tiny_ditar())
    log, grads = step(policy, reference=reference)
    prompts = [make_prompt(slot) for slot in (0, 1) for _ in range(4)]
    wavs = [LinearVAE().decode(u.latents.flatten(0, 1)[None], torch.tensor([0]))[0]
            for u in seen["spoken"]]
    rewards = {name: f(wavs, None, None).view(2, 4) for name, f in STREAMS.items()}
    w = (standardize(rewards["loud"]) + 0.5 * standardize(rewards["late"])).flatten()
    assert w.abs().max() > 0.5
    batch = Batch(
        torch.tensor([p.token_ids + [0] * (4 - len(p.token_ids)) for p in prompts]),
        torch.tensor([len(p.token_ids) for p in prompts]),
        torch.stack([torch.cat((p.latents, u.latents, torch.zeros(2 - len(p.latents), P, D)))
                     for p, u in zip(prompts, seen["spoken"])]),
        torch.tensor([len(p.latents) for p in prompts]),
        torch.tensor([len(p.latents) + 3 for p in prompts]))
    t, x_0 = draw_noise(lambda slot, k: keyed("noise", slot, k), [0, 1],
                        GrowConfig(group_size=4), 3, P, D)
    out = grow_loss(policy, reference, batch, w, t, x_0, 0.1)
    out["loss"].backward()
    assert_gradients_close(grads, gradients(policy), 1e-4)
    assert log["policy"] == pytest.approx(out["policy"].item(), abs=1e-5)
    assert log["anchor"] == pytest.approx(out["anchor"].item(), abs=1e-5)
    assert log["flow"] == pytest.approx(out["l"].mean().item(), rel=1e-4)
    assert log["below_anchor"] == (w < -0.1).float().mean().item()
    assert (log["groups"], log["discarded"], log["caps"], log["bad"]) == (2, 0, 1, 0)
    assert log["patches"] == 3 and log["audio_sec"] == 8 * 3 * P * HOP / 16_000
    assert log["loud"] == pytest.approx(rewards["loud"].mean().item(), abs=1e-6)
    assert log["loud_spread"] == pytest.approx(
        rewards["loud"].std(dim=1, correction=0).mean().item(), abs=1e-6)


@pytest.mark.parametrize("changes", (
    {}, {"weighting": "exp_advantage"}, {"weighting": "exp_reward"}, {"velocity": "guided"},
    {"target": "latents"}, {"draws": 3, "t_per": "patch", "share_noise": True}), ids=str)
def test_every_option_runs_and_the_step_repeats_bit_for_bit(changes):
    policy = tiny_ditar()
    log, grads = step(policy, **changes)
    _, again = step(policy, **changes)
    for name in grads:
        if not name.startswith("stop_head"):
            assert torch.isfinite(grads[name]).all() and grads[name].abs().max() > 0, name
            assert torch.equal(grads[name], again[name]), name
    assert all(math.isfinite(value) for value in log.values())
    if changes:                                                     # the option does something
        name, plain = "locdit_out.weight", step(policy)[1]
        same = changes == {"target": "latents"}                     # this VAE loses nothing
        assert torch.allclose(grads[name], plain[name], atol=1e-5) == same


def test_reencoding_hands_the_vae_prompt_and_rollout_in_one_waveform():
    prompts = [make_prompt(2), make_prompt(0)]                      # 3 and 1 prompt patches
    utterances = [Utterance(randn(n, P, D, seed=n), True) for n in (2, 5)]
    wavs = [randn(n * P * HOP, seed=n) for n in (2, 5)]             # not the latents, decoded
    vae = LinearVAE()
    batch = assemble(vae, prompts, utterances, wavs, GrowConfig())
    (audio, lengths), = vae.encoded
    assert batch.n_prompt.tolist() == [3, 1] and batch.n.tolist() == [5, 6]
    assert lengths.tolist() == [5 * P * HOP, 6 * P * HOP]
    for i, (p, wav) in enumerate(zip(prompts, wavs)):
        assert torch.equal(audio[i, :lengths[i]], torch.cat((p.wav, wav)))
        assert batch.text[i, :batch.text_len[i]].tolist() == p.token_ids
        expected = wav.view(-1, P, D, HOP // D).mean(dim=-1)
        assert_close(batch.patches[i, batch.n_prompt[i]:batch.n[i]], expected)
    direct = assemble(vae, prompts, utterances, wavs, GrowConfig(target="latents"))
    assert len(vae.encoded) == 1                                    # not asked again
    for i, (p, u) in enumerate(zip(prompts, utterances)):
        assert torch.equal(direct.patches[i, :batch.n[i]], torch.cat((p.latents, u.latents)))


def test_a_sampled_target_depends_on_its_own_generator_alone_and_not_on_the_batch():
    prompts = [make_prompt(2), make_prompt(0)]
    utterances = [Utterance(randn(n, P, D, seed=n), True) for n in (2, 9)]
    wavs = [randn(n * P * HOP, seed=n) for n in (2, 9)]

    def sampled(rows):
        batch = assemble(LinearVAE(), *([x[i] for i in rows] for x in (prompts, utterances, wavs)),
                         GrowConfig(), "sample", [torch.Generator().manual_seed(i) for i in rows])
        return [p[:n] for p, n in zip(batch.patches, batch.n)]
    together, alone = sampled([0, 1]), [sampled([0])[0], sampled([1])[0]]
    mean = assemble(LinearVAE(), prompts, utterances, wavs, GrowConfig()).patches
    for i in range(2):
        assert torch.equal(together[i], alone[i])
        noise = together[i] - mean[i, :len(together[i])]            # of a posterior of variance 1
        assert 0.5 < noise.std() < 1.5


def test_more_rollouts_than_one_encoder_call_takes_keep_their_order():
    prompts = [make_prompt(slot) for slot in range(35)]
    utterances = [Utterance(randn(1, P, D, seed=i), True) for i in range(35)]
    wavs = [LinearVAE().decode(u.latents.flatten(0, 1)[None], torch.tensor([P]))[0]
            for u in utterances]
    for a, b in zip(*[vars(assemble(LinearVAE(), prompts, utterances, wavs,
                                    GrowConfig(target=target))).values()
                      for target in ("reencode", "latents")]):
        assert_close(a, b)


def test_micro_batches_change_memory_not_gradients():
    policy = tiny_ditar()
    log, whole = step(policy)
    for micro_batch in (1, 3):                                      # 3 cuts through the groups
        part_log, parts = step(policy, micro_batch=micro_batch)
        assert_gradients_close(parts, whole, 1e-4)
        for name in ("policy", "anchor", "flow"):
            assert part_log[name] == pytest.approx(log[name], abs=1e-5)


def test_two_ranks_sum_to_the_gradient_of_one():
    policy = tiny_ditar()
    whole_log, whole = step(policy, slots=(0, 1, 2))
    kept = []
    parts = [step(policy, slots=slots, global_sum=lambda n: kept.append(n) or 3)
             for slots in ((0, 2), (1,))]
    assert kept == [2, 1]                                           # what each rank adds to the 3
    total = {name: None if g is None else g + parts[1][1][name]
             for name, g in parts[0][1].items()}
    assert_gradients_close(total, whole, 1e-4)
    mean = (2 * parts[0][0]["policy"] + parts[1][0]["policy"]) / 3  # each logs its own groups' mean
    assert mean == pytest.approx(whole_log["policy"], abs=1e-4)


def test_a_rank_that_keeps_no_group_still_takes_part_in_the_sum():
    policy, kept = tiny_ditar(), []
    _, whole = step(policy, slots=(0, 1, 2), streams=SLOT_1_IS_CONSTANT, redraws=0)
    parts = [step(policy, slots=slots, streams=SLOT_1_IS_CONSTANT, redraws=0,
                  global_sum=lambda n: kept.append(n) or 2) for slots in ((0, 2), (1,))]
    assert kept == [2, 0]                           # else the other ranks would wait for ever
    assert all(g is None for g in parts[1][1].values())
    assert_gradients_close(parts[0][1], whole, 1e-4)


def test_groups_without_reward_spread_are_redrawn_and_counted():
    asked = []

    def draw_prompt(slot, attempt):
        asked.append((slot, attempt))
        return make_prompt(slot, attempt)

    def fails_first(wavs, texts, prompts):          # slot 1 is constant twice, slot 2 once
        flat = ("slot 1 attempt 0", "slot 1 attempt 1", "slot 2 attempt 0")
        return torch.tensor([0.5 if text in flat else wav.mean().item()
                             for wav, text in zip(wavs, texts)])
    log, grads = step(tiny_ditar(), slots=(0, 1, 2), streams={"loud": fails_first},
                      draw_prompt=draw_prompt)
    assert asked == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]
    assert log["groups"] == 3 and log["discarded"] == pytest.approx(3 / 6)
    assert grads["locdit_out.weight"].abs().max() > 0


def test_a_group_with_a_wav_that_is_not_finite_is_counted_and_redrawn(monkeypatch):
    sizes = []

    def decode(vae, prompts, utterances):
        wavs = decode_wavs(vae, prompts, utterances)
        if not sizes:                                   # the first time, a rollout of slot 0
            wavs[1][0] = math.nan
        sizes.append(len(wavs))
        return wavs
    monkeypatch.setattr(grow, "decode_wavs", decode)
    log, grads = step(tiny_ditar())
    assert sizes == [8, 4] and log["bad"] == pytest.approx(1 / 12)
    assert log["groups"] == 2 and log["discarded"] == pytest.approx(1 / 3)
    assert all(torch.isfinite(g).all() for g in grads.values() if g is not None)


def test_redraws_are_bounded_and_a_step_without_groups_has_no_gradient():
    asked = []

    def draw_prompt(slot, attempt):
        asked.append((slot, attempt))
        return make_prompt(slot, attempt)
    log, grads = step(tiny_ditar(), redraws=2, draw_prompt=draw_prompt,
                      streams={"loud": lambda wavs, texts, prompts: torch.full((len(wavs),), 0.1)})
    assert asked == [(slot, attempt) for attempt in range(3) for slot in (0, 1)]
    assert log["groups"] == 0 and log["discarded"] == 1
    assert all(g is None for g in grads.values())


def test_a_group_discarded_for_good_leaves_the_mean_of_the_others():
    policy = tiny_ditar()
    log, grads = step(policy, slots=(0, 1, 2), streams=SLOT_1_IS_CONSTANT, redraws=0)
    assert log["groups"] == 2 and log["discarded"] == pytest.approx(1 / 3)
    alone = [step(policy, slots=(slot,), streams={"loud": loudness}) for slot in (0, 2)]
    mean = {name: None if g is None else (g + alone[1][1][name]) / 2
            for name, g in alone[0][1].items()}
    assert_gradients_close(grads, mean, 1e-4)
    for name in ("policy", "anchor", "flow"):
        assert log[name] == pytest.approx((alone[0][0][name] + alone[1][0][name]) / 2, abs=1e-5)


def test_a_redraw_uses_noise_of_its_own():
    seen = []

    def first_patch(wavs, texts, prompts):
        seen.append(torch.stack([wav[:P * HOP] for wav in wavs]))
        return torch.zeros(len(wavs))
    step(tiny_ditar(), slots=(0,), redraws=1, streams={"loud": first_patch},
         draw_prompt=lambda slot, attempt: make_prompt(slot))       # even for the same prompt
    rows = torch.cat(seen)
    assert len(rows) == 8
    assert torch.pdist(rows).min() > 0.1


def test_rewards_see_no_graph_and_each_prompts_own_text_and_wav():
    def inspect(wavs, texts, prompts):
        assert not torch.is_grad_enabled()
        assert not any(wav.requires_grad for wav in (*wavs, *prompts))
        assert texts == ["slot 0 attempt 0"] * 4 + ["slot 1 attempt 0"] * 4
        for k in range(8):
            assert torch.equal(prompts[k], make_prompt(k // 4).wav)
        assert [len(wav) for wav in wavs] == [3 * P * HOP] * 8      # without the prompt
        return loudness(wavs, texts, prompts)
    step(tiny_ditar(), streams={"loud": inspect})


def test_a_step_touches_neither_reference_nor_weights_nor_the_global_generator():
    policy, reference = tiny_ditar(), moved(tiny_ditar())
    before = [p.clone() for m in (policy, reference) for p in m.parameters()]
    state = torch.get_rng_state()
    step(policy, reference=reference)
    assert torch.equal(torch.get_rng_state(), state)
    for p, old in zip((*policy.parameters(), *reference.parameters()), before):
        assert torch.equal(p, old)
    assert all(p.grad is None for p in reference.parameters())


def test_bad_rollouts_and_hit_caps_are_counted():
    class SilentVAE(LinearVAE):
        def decode(self, latents, lengths):
            wavs = super().decode(latents, lengths)
            wavs[0] = 0
            return wavs
    log, _ = step(tiny_ditar(), vae=SilentVAE())
    assert log["bad"] == 1 / 8 and log["caps"] == 1


@pytest.mark.parametrize("changes", ({}, {"draws": 2, "t_per": "patch", "share_noise": True}),
                         ids=("paper", "less_variance"))
def test_grow_raises_the_reward_of_a_bandit(changes):
    policy, reference = tiny_ditar(), tiny_ditar()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    c = GrowConfig(group_size=8, target="latents", **changes)
    s = SampleConfig(nfe=3, cfg_scale=0, max_patches_per_token=0.0, max_patches_extra=2)
    rewards = []
    for i in range(30):
        optimizer.zero_grad()
        log = grow_step(policy, policy, reference, LinearVAE(), {"loud": loudness}, {"loud": 1.0},
                        make_prompt, list(range(4)), lambda *key: keyed(i, *key), c, s,
                        one_process, contextlib.nullcontext)
        optimizer.step()
        rewards.append(log["loud"])
    spread = log["loud_spread"]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + spread
