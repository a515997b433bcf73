"""What vae.py promises: Semantic-VAE's shapes, reach, files and arithmetic, against independent
forms of them. Released weights are not needed: the layout is checked on random ones."""
import copy
import math
from dataclasses import asdict

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F

import vae as module
from audio import read_wav
from run import save_tensors
from sample import Utterance, decode_wavs
from vae import (AliasFree, SemanticVAE, SemanticVAEConfig, SnakeBeta, equal_rows, fold, kl,
                 latent_statistics, load_semantic_vae, low_pass, main, reconstruct,
                 sample_posterior, snake, vae_loss)

HOP, P = 400, 4
# enc_dim 8 and one residual kernel; the heads are twice as wide as D, so that pooling shows
SLIM = SemanticVAEConfig(latent_dim=16, enc_dim=8, heads=4, dec_dim=128, res_kernels=(3,),
                         res_dilations=(1, 3))
UPSTREAM = ".parametrizations.weight.original0", ".parametrizations.weight.original1"


def random_vae(config=SLIM, seed=0):
    """A float64 VAE in which nothing stands at its initial 0 or 1, and no output is clamped."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae = SemanticVAE(config).double()
        for name, p in vae.named_parameters():
            if name.endswith(("alpha", "beta", "norm.weight", "q_bias", "v_bias")) \
                    or "norm" in name:
                p.data += 0.3 * torch.rand_like(p) - 0.1
    return vae.requires_grad_(False)


@pytest.fixture(scope="module")
def vae():
    return random_vae()


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_close(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


# ---- shapes and lengths ------------------------------------------------------------------------

def test_one_latent_frame_per_400_samples(vae):
    mean, log_var = vae.encode(randn(2, 3 * HOP))
    assert mean.shape == log_var.shape == (2, 3, 16)
    assert vae.decode(mean).shape == (2, 3 * HOP)
    assert SemanticVAEConfig().hop == HOP


@pytest.mark.parametrize("length, frames", ((1, 1), (399, 1), (400, 1), (401, 2), (1234, 4),
                                            (1600, 4), (16001, 41)))
def test_any_length_is_reconstructed_at_that_length(vae, monkeypatch, length, frames):
    decode, seen = vae.decode, []
    monkeypatch.setattr(vae, "decode", lambda z: seen.append(z.shape) or decode(z))
    assert reconstruct(vae, 0.1 * randn(length)).shape == (length,)
    assert seen == [(1, frames, 16)]                                # ceil(S / 400) frames


def test_lengths_off_the_hop_are_refused(vae):
    with pytest.raises(ValueError, match="401 samples is no multiple of the hop of 400"):
        vae.encode(randn(1, 401))
    with pytest.raises(ValueError, match="401 samples is no multiple"):
        vae.posterior(randn(1, 401))
    for lengths in ([800, 401], [800, 1200], [800], [800, -400]):
        with pytest.raises(ValueError, match="lengths .* wanted one per row"):
            vae.encode(randn(2, 800), torch.tensor(lengths))
    with pytest.raises(ValueError, match="wanted one per row"):
        vae.decode(randn(2, 3, 16), torch.tensor([3, 4]))
    with pytest.raises(ValueError, match="latents of 8 channels; this VAE has 16"):
        vae.decode(randn(2, 3, 8))


def test_whole_patches_encode_to_whole_patches(vae):
    prompt, generated = randn(1, 2 * P * HOP), randn(1, 3 * P * HOP, seed=1)
    assert vae.encode(torch.cat((prompt, generated), dim=1))[0].shape[1] == (2 + 3) * P


@pytest.mark.parametrize("changes, text", (
    ({"up_rates": (5, 5, 2, 2, 2, 1)}, "multiply to 200"),
    ({"up_kernels": (9, 9, 4, 4, 4, 5)}, "larger by an even number"),
    ({"up_kernels": (9, 9)}, "one kernel per rate"),
    ({"heads": 3}, "3 heads do not divide"),
    ({"latent_dim": 48}, "must divide the head width 128"),
    ({"enc_dim": 4, "heads": 1}, "be less than 64"),
    ({"dec_dim": 96}, "cannot be halved 6 times"),
    ({"res_kernels": (4,)}, "must be odd"),
    ({"strides": (1, 400)}, "2 or more")))
def test_a_config_that_does_not_fit_together_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        SemanticVAEConfig(**changes)


# ---- what depends on what ----------------------------------------------------------------------

def test_a_prefix_keeps_its_latents_but_for_the_last_12_frames(vae):
    n, x = 20, randn(1, 30 * HOP)
    alone, longer = vae.encode(x[:, :n * HOP])[0], vae.encode(x)[0][:, :n]
    assert_close(alone[:, :n - 12], longer[:, :n - 12])
    assert (alone - longer)[:, n - 1].abs().max() > 1e-3


def test_every_earlier_frame_reaches_a_mean(vae):
    x = randn(1, 40 * HOP)
    y = x.clone()
    y[:, :HOP] += 1
    assert (vae.encode(x)[0] - vae.encode(y)[0])[0, 39].abs().max() > 1e-8      # by attention


def test_the_bottleneck_is_causal(vae):
    x = randn(1, 9, SLIM.width)
    y = x.clone()
    y[:, 5] = randn(SLIM.width, seed=1)
    a, b = vae.pre_block(x), vae.pre_block(y)
    assert torch.equal(a[:, :5], b[:, :5])
    assert (a - b)[0, 5:].abs().amax(dim=-1).min() > 1e-8


def test_convolutional_features_see_12_frames_to_each_side(vae):
    x = randn(1, 1, 40 * HOP)
    y = x.clone()
    y[..., 20 * HOP:21 * HOP] += randn(HOP, seed=1)
    change = (vae.encoder(x) - vae.encoder(y)).abs().amax(dim=1)[0]
    assert change[:8].max() < 1e-12 and change[33:].max() < 1e-12
    assert change[8] > 0 and change[32] > 0


def test_features_move_with_the_sound_by_whole_frames_only(vae):
    x, k = randn(1, 1, 40 * HOP), 5
    features = vae.encoder(x)
    shifted = vae.encoder(x[..., k * HOP:])
    assert_close(shifted[..., 12:], features[..., k + 12:])
    half = vae.encoder(x[..., 200:-200])
    assert (half[..., 12:-12] - features[..., 12:-13]).abs().max() > 1e-3
    no_attention = copy.deepcopy(vae)
    no_attention.pre_block.attn.proj.weight.zero_()
    assert_close(no_attention.encode(x[0, :, k * HOP:])[0][:, 12:],
                 no_attention.encode(x[0])[0][:, k + 12:])
    assert (vae.encode(x[0, :, k * HOP:])[0][:, 12:]
            - vae.encode(x[0])[0][:, k + 12:]).abs().max() > 1e-8


def reach(config):
    """Samples (before its first, after its last) that one latent frame can touch, added up."""
    low, high = -3, 3                                               # conv_pre
    for u, k in zip(config.up_rates, config.up_kernels):
        low, high = low * u - (k - u) // 2, high * u + k - 1 - (k - u) // 2
        r = max(config.res_kernels) // 2
        block = sum(5 + r * d + 5 + r for d in config.res_dilations)    # activations reach 5
        low, high = low - block, high + block
    return -low + 5 + 3, high + 5 + 3 - (config.hop - 1)


@pytest.mark.parametrize("changes", ({}, {"res_kernels": (3, 7, 11), "res_dilations": (1, 3, 5),
                                          "dec_dim": 64}))
def test_a_latent_touches_only_the_samples_in_its_reach(changes):
    config = SemanticVAEConfig(**{**vars(SLIM), **changes})
    vae, z = random_vae(config), randn(1, 60, 16)
    y = z.clone()
    y[:, 30] += 3
    before, after = reach(config)
    change = (vae.decode(z) - vae.decode(y)).abs()[0]
    assert before < 29 * HOP and after < 29 * HOP
    assert change[:30 * HOP - before].max() < 1e-12
    assert change[31 * HOP + after:].max() < 1e-12
    assert change[30 * HOP:31 * HOP].max() > 1e-6


def test_sound_stays_in_range_for_wild_latents(vae):
    wav = vae.decode(50 * randn(1, 20, 16))
    assert wav.isfinite().all() and wav.abs().max() <= 1


# ---- batches -----------------------------------------------------------------------------------

def test_a_batch_equals_its_singles_whatever_their_lengths(vae):
    frames = torch.tensor([7, 20, 7, 0, 13])
    x = randn(5, 20 * HOP)                                          # noise past the ends too
    mean, log_var = vae.encode(x, frames * HOP)
    wavs = vae.decode(mean, frames)
    for i, n in enumerate(frames.tolist()):
        if n:
            single = vae.encode(x[i:i + 1, :n * HOP])
            assert_close(mean[i, :n], single[0][0])
            assert_close(log_var[i, :n], single[1][0])
            assert_close(wavs[i, :n * HOP], vae.decode(single[0])[0])
        assert (mean[i, n:] == 0).all() and (log_var[i, n:] == 0).all()
        assert (wavs[i, n * HOP:] == 0).all()


def test_zero_padding_would_change_the_last_frames(vae):
    n, x = 20, randn(1, 20 * HOP)
    alone, padded = vae.posterior(x)[0], vae.posterior(F.pad(x, (0, 8 * HOP)))[0][:, :n]
    assert_close(padded[:, :n - 12], alone[:, :n - 12])
    assert (padded - alone)[:, n - 12:].abs().max() > 1e-3          # why lengths are kept apart


def test_rows_are_split_by_length_and_by_amount():
    assert equal_rows(None, 3, 800, 400, 1600) == [([0, 1], 800), ([2], 800)]
    assert equal_rows([800, 400, 800, 0], 4, 1200, 400, 10_000) == [([1], 400), ([0, 2], 800)]
    assert equal_rows([1200], 1, 1200, 400, 400) == [([0], 1200)]   # one row always goes
    assert equal_rows([], 0, 0, 400, 400) == []


def test_pieces_do_not_change_a_batch(vae, monkeypatch):
    x = randn(3, 20 * HOP)
    whole = vae.encode(x)[0]
    sound, calls = vae.decode(whole), []
    monkeypatch.setattr(module, "MAX_AUDIO_SEC", 1)                 # two rows of half a second
    monkeypatch.setattr(vae.decoder, "forward", lambda z, forward=vae.decoder.forward:
                        calls.append(len(z)) or forward(z))
    assert_close(vae.encode(x)[0], whole)
    assert_close(vae.decode(whole), sound)
    assert calls == [2, 1]


def test_the_sampler_decodes_through_it(vae):
    prompts = [randn(3, P, 16), randn(2, P, 16, seed=1)]
    new = [randn(2, P, 16, seed=2), randn(4, P, 16, seed=3)]
    wavs = decode_wavs(random_vae().float(), [p.float() for p in prompts],
                       [Utterance(u.float(), True) for u in new])
    for wav, prompt, u in zip(wavs, prompts, new):
        whole = vae.decode(torch.cat((prompt[-2:], u)).flatten(0, 1)[None])[0]
        torch.testing.assert_close(wav.double(), whole[-len(u) * P * HOP:], atol=1e-4, rtol=1e-4)


# ---- the posterior -----------------------------------------------------------------------------

def test_kl_is_torchs_summed_over_channels():
    mean, log_var = randn(3, 5, 16), randn(3, 5, 16, seed=1)
    N = torch.distributions.Normal
    theirs = torch.distributions.kl_divergence(N(mean, torch.exp(log_var / 2)),
                                               N(torch.zeros(()).double(), 1.0))
    assert_close(kl(mean, log_var), theirs.sum(dim=-1).mean())
    assert kl(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)) == 0      # upstream: 0.5 * D * 1e-6


@pytest.mark.parametrize("extreme", (-1e4, 1e4))
def test_kl_and_its_gradient_survive_extreme_logits(extreme):
    vae = random_vae().requires_grad_(True)
    with torch.no_grad():
        vae.fc_var.bias += extreme
    mean, log_var = vae.posterior(randn(1, 4 * HOP))
    assert (log_var == 12 * math.copysign(1, extreme)).all()
    loss = kl(mean, log_var)
    loss.backward()
    assert loss.isfinite() and loss >= 0
    assert all(p.grad.isfinite().all() for p in vae.parameters() if p.grad is not None)


def test_encoding_draws_nothing(vae):
    state, x = torch.get_rng_state(), randn(1, 5 * HOP)
    assert torch.equal(vae.encode(x)[0], vae.encode(x)[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sample_depends_on_its_generator_alone():
    mean, log_var = randn(1, 4, 16), randn(1, 4, 16, seed=1)

    def draw(seed):
        return sample_posterior(mean, log_var, torch.Generator().manual_seed(seed))
    state = torch.get_rng_state()
    assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_have_the_posteriors_mean_and_variance():
    mean, log_var = torch.tensor([[[1.0, -2.0]]]), torch.tensor([[[0.5, -3.0]]])
    z = sample_posterior(mean.expand(1, 40_000, 2), log_var.expand(1, 40_000, 2),
                         torch.Generator().manual_seed(0))[0]
    std = torch.exp(log_var[0, 0] / 2)
    assert ((z.mean(dim=0) - mean[0, 0]).abs() < 4 * std / 200).all()
    assert z.var(dim=0) / std ** 2 == pytest.approx([1, 1], abs=0.03)


def test_normalised_latents_decode_to_the_same_sound(vae):
    other, x = copy.deepcopy(vae), 0.1 * randn(1, 6 * HOP)
    other.latent_mean.copy_(randn(16))
    other.latent_std.copy_(0.1 + randn(16, seed=1).abs())
    (mean, log_var), (mean_2, log_var_2) = vae.encode(x), other.encode(x)
    assert_close(mean_2 * other.latent_std + other.latent_mean, mean)
    assert_close(torch.exp(log_var_2 / 2) * other.latent_std, torch.exp(log_var / 2))
    assert_close(other.decode(mean_2), vae.decode(mean), 1e-6)
    assert {"latent_mean", "latent_std"} <= vae.state_dict().keys()


def test_statistics_are_those_of_all_frames_together():
    vae = random_vae()
    wavs = [0.3 * randn(n * HOP, seed=n) for n in (3, 9, 5)]
    frames = torch.cat([vae.encode(w[None])[0][0] for w in wavs])
    mean, std = latent_statistics(vae, iter(wavs))
    assert mean.dtype == std.dtype == torch.float32
    assert_close(mean, frames.mean(dim=0).float(), 1e-5)
    assert_close(std, frames.std(dim=0, correction=0).float(), 1e-5)
    vae.latent_mean.copy_(mean)
    vae.latent_std.copy_(std)
    frames = torch.cat([vae.encode(w[None])[0][0] for w in wavs])
    assert_close(frames.mean(dim=0), torch.zeros(16).double(), 1e-5)
    assert_close(frames.std(dim=0, correction=0), torch.ones(16).double(), 1e-5)
    assert_close(latent_statistics(vae, wavs)[0], mean, 1e-6)   # raw, whatever is set
    with pytest.raises(ValueError, match="0 frames"):
        latent_statistics(vae, [])


# ---- layers against other forms of them --------------------------------------------------------

def test_the_low_pass_has_the_known_taps():
    taps = low_pass()
    half = [0.00202896, 0.00938947, -0.02554346, -0.05765738, 0.12857258, 0.44320980]
    assert taps.tolist() == pytest.approx(half + half[::-1], abs=1e-6)
    assert torch.equal(taps, taps.flip(0)) and taps.sum().item() == pytest.approx(1, abs=1e-6)


def naive_alias_free(x, act, taps):
    """x: (S,). Zeros between the samples, the low-pass, act, the low-pass, every other sample."""
    stuffed = np.zeros(2 * (len(x) + 10))
    stuffed[::2] = np.pad(x, 5, mode="edge")
    y = act(2 * np.convolve(stuffed, taps)[15:15 + 2 * len(x)])
    y = np.convolve(np.pad(y, (5, 6), mode="edge"), taps, mode="valid")
    return y[::2]


@pytest.mark.parametrize("length", (1, 2, 7, 64))
def test_the_alias_free_activation_equals_its_slow_form(length):
    layer, x = AliasFree(3).double(), randn(2, 3, length)
    layer.act.alpha.data, layer.act.beta.data = randn(3), randn(3, seed=1)
    y = layer(x)
    assert y.shape == x.shape
    for b in range(2):
        for c in range(3):
            alpha, beta = (p[c].exp().item() for p in (layer.act.alpha, layer.act.beta))
            slow = naive_alias_free(x[b, c].numpy(), lambda v: v + np.sin(alpha * v) ** 2 / beta,
                                    layer.filter.numpy())
            assert y[b, c].tolist() == pytest.approx(slow, abs=1e-8)


def test_resampling_keeps_a_constant():
    layer = AliasFree(2)
    layer.act = torch.nn.Identity()
    assert_close(layer(torch.ones(1, 2, 50)), torch.ones(1, 2, 50), 1e-6)


def test_snake_is_x_plus_a_squared_sine():
    x = randn(1, 3, 20).requires_grad_()
    for layer in (SnakeBeta(3).double(), module.Snake(3).double()):
        y = layer(x)
        assert_close(y, x + x.sin() ** 2, 1e-8)
        slope, = torch.autograd.grad(y.sum(), x)
        assert_close(slope, 1 + (2 * x).sin(), 1e-8)
    y = snake(torch.tensor(0.5), torch.tensor(2.0), torch.tensor(4.0))
    assert y.item() == pytest.approx(0.5 + math.sin(1) ** 2 / 4)


@pytest.mark.parametrize("layer", (torch.nn.Conv1d(6, 4, 3), torch.nn.ConvTranspose1d(6, 4, 8)))
def test_folding_is_torchs_weight_norm(layer):
    layer = torch.nn.utils.parametrizations.weight_norm(copy.deepcopy(layer))
    g, v = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    g.data *= 1 + torch.rand_like(g)
    assert len(g) == len(layer.weight)          # 4 for Conv1d, its 6 inputs for ConvTranspose1d
    assert_close(fold(g, v), layer.weight, 1e-6)


def reference(state, c, x):
    """The whole VAE as functions of an upstream-style state dict: x (S,) -> mean (T, D), wav."""
    def conv(x, key, **how):
        g, v = (state[key + end] for end in UPSTREAM)
        return F.conv1d(x, torch._weight_norm(v, g, 0), state.get(key + ".bias"), **how)

    def dac_snake(x, key):
        a = state[key + ".alpha"]
        return x + (a * x).sin() ** 2 / a

    def act(x, key):
        a, b = (state[f"{key}.act.{k}"].exp().numpy() for k in ("alpha", "beta"))
        rows = [naive_alias_free(row, lambda v: v + np.sin(a[i] * v) ** 2 / b[i],
                                 state[key + ".upsample.filter"].flatten().numpy())
                for i, row in enumerate(x[0].numpy())]
        return torch.from_numpy(np.stack(rows))[None]

    def linear(x, key):
        return x @ state[key + ".weight"].T + state[key + ".bias"]

    def norm(x, key):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        return x * state[key + ".weight"] + state[key + ".bias"]

    h = conv(x[None, None], "encoder.block.0", padding=3)
    for i, s in enumerate(c.strides, start=1):
        key = f"encoder.block.{i}.block"
        for j, d in enumerate((1, 3, 9)):
            y = conv(dac_snake(h, f"{key}.{j}.block.0"), f"{key}.{j}.block.1", dilation=d,
                     padding=3 * d)
            h = h + conv(dac_snake(y, f"{key}.{j}.block.2"), f"{key}.{j}.block.3")
        h = conv(dac_snake(h, f"{key}.3"), f"{key}.4", stride=s, padding=math.ceil(s / 2))
    h = conv(dac_snake(h, "encoder.block.5"), "encoder.block.6", padding=1)[0].T        # (T, C)

    pre, C = "pre_block.", h.shape[1]
    bias = torch.cat([state[f"{pre}attn.{k}"] for k in ("q_bias", "zero_k_bias", "v_bias")])
    qkv = norm(h, pre + "norm1") @ state[pre + "attn.qkv.weight"].T + bias
    q, k, v = (qkv[:, i * C:(i + 1) * C].view(len(h), c.heads, -1) for i in range(3))
    heads = torch.stack([torch.stack([
        (q[t, head] @ k[:t + 1, head].T * q.shape[-1] ** -0.5).softmax(-1) @ v[:t + 1, head]
        for head in range(c.heads)]).mean(dim=0) for t in range(len(h))])
    pooled = F.adaptive_avg_pool1d(heads, c.latent_dim)
    h = linear(norm(h, pre + "norm3"), pre + "proj") + linear(pooled, pre + "attn.proj")
    y = norm(norm(h, pre + "norm2"), pre + "mlp.norm")
    y = F.gelu(linear(y, pre + "mlp.w0"), approximate="tanh") * linear(y, pre + "mlp.w1")
    mean = linear(h + linear(y, pre + "mlp.w2"), "fc_mu")

    z = conv(mean.T[None], "decoder.conv_pre", padding=3)
    for i, (u, k) in enumerate(zip(c.up_rates, c.up_kernels)):
        key, total = f"decoder.ups.{i}.0", 0
        weight = torch._weight_norm(state[key + UPSTREAM[1]], state[key + UPSTREAM[0]], 0)
        z = F.conv_transpose1d(z, weight, state[key + ".bias"], stride=u, padding=(k - u) // 2)
        for j, r in enumerate(c.res_kernels):
            key, y = f"decoder.resblocks.{len(c.res_kernels) * i + j}", z
            for n, d in enumerate(c.res_dilations):
                inner = conv(act(y, f"{key}.activations.{2 * n}"), f"{key}.convs1.{n}", dilation=d,
                             padding=d * (r - 1) // 2)
                y = y + conv(act(inner, f"{key}.activations.{2 * n + 1}"), f"{key}.convs2.{n}",
                             padding=(r - 1) // 2)
            total = total + y
        z = total / len(c.res_kernels)
    z = conv(act(z, "decoder.activation_post"), "decoder.conv_post", padding=3)
    return mean, z[0, 0].clamp(-1, 1)


def test_the_whole_network_equals_plain_functions_of_an_upstream_file():
    config = SemanticVAEConfig(**{**vars(SLIM), "dec_dim": 64, "res_kernels": (3, 5)})
    vae, x = random_vae(config), 0.3 * randn(3 * HOP)
    mean, wav = reference(upstream_state(vae), config, x)
    assert_close(vae.encode(x[None])[0][0], mean, 1e-8)
    assert_close(vae.decode(mean[None])[0], wav, 1e-8)
    assert wav.abs().max() < 1                                      # nothing hid behind the clamp


# ---- files -------------------------------------------------------------------------------------

def upstream_state(vae, style=UPSTREAM):
    """The keys that an upstream file has for this model, without the prefix of its EMA. style: the
    names of g and v, or None for a plain weight. v gets a length of its own, as training gives it.
    """
    out = {k: v.clone() for k, v in vae.state_dict().items() if not k.startswith("latent_")}
    for name, layer in vae.named_modules():
        if isinstance(layer, (torch.nn.Conv1d, torch.nn.ConvTranspose1d)) and style:
            w = out.pop(name + ".weight")
            size = w.flatten(1).norm(dim=1)[:, None, None]
            out[name + style[0]] = size
            out[name + style[1]] = w * torch.linspace(0.5, 2, len(w)).to(w)[:, None, None]
        elif isinstance(layer, AliasFree):
            for end in ("upsample.filter", "downsample.lowpass.filter"):
                out[f"{name}.{end}"] = layer.filter.view(1, 1, 12).clone()
    out["pre_block.attn.zero_k_bias"] = torch.zeros(vae.config.width).to(vae.latent_mean)
    return out


def ema_state(vae, style=UPSTREAM):
    """The same as an ema_state_dict.pth: prefix, training's own parts, counters."""
    extra = {"projectors.model.0.weight": torch.zeros(2, 3),
             "decoder_proj.norm1.bias": torch.ones(2)}
    return {"initted": torch.tensor(True), "step": torch.tensor(7),
            **{f"ema_model.{k}": v for k, v in {**upstream_state(vae, style), **extra}.items()}}


def upstream_keys():
    """Every key of the released file but the projectors', written down from its layout."""
    conv = ("bias", "parametrizations.weight.original0", "parametrizations.weight.original1")
    filters = ("upsample.filter", "downsample.lowpass.filter")
    keys = {f"encoder.block.{i}.{k}" for i in (0, 6) for k in conv} | {"encoder.block.5.alpha"}
    for i in range(1, 5):
        keys |= {f"encoder.block.{i}.block.{j}.block.{n}.alpha" for j in range(3) for n in (0, 2)}
        keys |= {f"encoder.block.{i}.block.{j}.block.{n}.{k}"
                 for j in range(3) for n in (1, 3) for k in conv}
        keys |= {f"encoder.block.{i}.block.3.alpha"}
        keys |= {f"encoder.block.{i}.block.4.{k}" for k in conv}
    linear = "norm1 norm2 norm3 proj attn.proj mlp.norm mlp.w0 mlp.w1 mlp.w2".split()
    keys |= {f"pre_block.{n}.{k}" for n in linear for k in ("weight", "bias")}
    keys |= {f"pre_block.attn.{k}" for k in ("qkv.weight", "q_bias", "v_bias", "zero_k_bias")}
    keys |= {f"{n}.{k}" for n in ("fc_mu", "fc_var") for k in ("weight", "bias")}
    keys |= {f"decoder.{n}.{k}" for n in ("conv_pre", *(f"ups.{i}.0" for i in range(6)))
             for k in conv}
    for r in range(18):
        keys |= {f"decoder.resblocks.{r}.convs{n}.{d}.{k}"
                 for n in (1, 2) for d in range(3) for k in conv}
        keys |= {f"decoder.resblocks.{r}.activations.{a}.{k}" for a in range(6)
                 for k in ("act.alpha", "act.beta", *filters)}
    keys |= {f"decoder.activation_post.{k}" for k in ("act.alpha", "act.beta", *filters)}
    return keys | {f"decoder.conv_post.{k}" for k in conv[1:]}


def test_the_default_config_has_every_key_of_the_released_file():
    with torch.device("meta"):
        ours = upstream_state(SemanticVAE()).keys()
    assert ours == upstream_keys() and len(ours) == 928


@pytest.mark.parametrize("latent_dim, encoder, bottleneck, heads, decoder, total", (
    (64, 18_408_576, 3_246_784, 8_320, 50_638_305, 72_301_985),
    (32, 18_408_576, 3_192_160, 2_112, 50_408_929, 72_011_777),
    (16, 18_408_576, 3_170_224, 544, 50_294_241, 71_873_585)))
def test_parameters_of_each_part(latent_dim, encoder, bottleneck, heads, decoder, total):
    """Upstream's counts, which have weight norm's g on top: one number per row of a weight."""
    with torch.device("meta"):
        vae = SemanticVAE(SemanticVAEConfig(latent_dim=latent_dim))

    def count(*parts):
        return sum(p.numel() for part in parts for p in part.parameters()) + sum(
            len(m.weight) for part in parts for m in part.modules()
            if isinstance(m, (torch.nn.Conv1d, torch.nn.ConvTranspose1d)))
    assert count(vae.encoder) == encoder and count(vae.decoder) == decoder
    assert count(vae.pre_block) == bottleneck and count(vae.fc_mu, vae.fc_var) == heads
    assert count(vae) == total
    if latent_dim == 64:
        assert sum(p.numel() for p in vae.parameters()) == 72_272_032


@pytest.fixture(scope="module")
def small():
    """fp32, and released but for its widths: a file of it needs no config."""
    return random_vae(SemanticVAEConfig(latent_dim=16, enc_dim=8, dec_dim=64)).float()


def save(tmp_path, state, name="x.pth"):
    torch.save(state, tmp_path / name)
    return tmp_path / name


def assert_same_vae(loaded, vae):
    x = 0.1 * randn(1, 2 * HOP, dtype=torch.float32)
    mean, log_var = vae.encode(x)
    assert loaded.config == vae.config
    assert_close(loaded.encode(x)[0], mean, 1e-5)
    assert_close(loaded.encode(x)[1], log_var, 1e-5)
    assert_close(loaded.decode(mean), vae.decode(mean), 1e-5)


@pytest.mark.parametrize("style", (UPSTREAM, (".weight_g", ".weight_v"), None))
def test_each_style_of_upstream_file_loads(small, tmp_path, style):
    state = torch.get_rng_state()
    loaded = load_semantic_vae(save(tmp_path, ema_state(small, style)))
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_vae(loaded, small)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert (loaded.latent_mean == 0).all() and (loaded.latent_std == 1).all()


def test_bare_nested_half_and_old_format_files_load(small, tmp_path):
    state = upstream_state(small)
    assert_same_vae(load_semantic_vae(save(tmp_path, state)), small)
    nested = {"state_dict": state, "metadata": {"kwargs": {"encoder_dim": 8}}}
    assert_same_vae(load_semantic_vae(str(save(tmp_path, nested))), small)
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert_same_vae(load_semantic_vae(tmp_path / "old.pth"), small)
    half = load_semantic_vae(save(tmp_path, {k: v.half() for k, v in state.items()}))
    assert half.fc_mu.weight.dtype == torch.float32


def test_torchs_own_weight_norm_writes_the_keys_that_load(small, tmp_path):
    copied = copy.deepcopy(small)
    for layer in copied.modules():
        if isinstance(layer, (torch.nn.Conv1d, torch.nn.ConvTranspose1d)):
            torch.nn.utils.parametrizations.weight_norm(layer)
    assert_same_vae(load_semantic_vae(save(tmp_path, copied.state_dict())), small)


def test_a_saved_vae_comes_back_whole(tmp_path):
    vae, path = random_vae().float(), tmp_path / "vae.safetensors"
    vae.latent_mean.fill_(0.25)
    save_tensors(path, vae.state_dict(), {"semantic_vae": asdict(vae.config)})   # as stage vae does
    loaded = load_semantic_vae(path)                                # SLIM's layout from metadata
    assert loaded.config == SLIM
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(),
                                                 vae.state_dict().values(), strict=True))


def test_another_layout_needs_its_config(tmp_path):
    vae = random_vae().float()
    path = save(tmp_path, upstream_state(vae))
    assert_same_vae(load_semantic_vae(path, SLIM), vae)
    with pytest.raises(ValueError, match="does not fit .* missing"):
        load_semantic_vae(path)


def test_unreadable_files_are_named(small, tmp_path):
    with pytest.raises(ValueError, match="no such file; wanted Semantic-VAE's dac/ema_state_dict"):
        load_semantic_vae(tmp_path / "nowhere.pth")
    whole = save(tmp_path, upstream_state(small)).read_bytes()
    for name, data in (("half.pth", whole[:len(whole) // 2]), ("text.pth", b"<html>404</html>"),
                       ("empty.pth", b""), ("half.safetensors", whole[:1000])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name} .* may be cut off .* download it again"):
            load_semantic_vae(tmp_path / name)
    for name, content in (("code.pth", {"a": Utterance}), ("list.pth", [1, 2]),
                          ("mixed.pth", {"a": torch.ones(1), "b": "text"})):
        with pytest.raises(ValueError, match=f"{name} .*(cannot be read|no dict of tensors)"):
            load_semantic_vae(save(tmp_path, content, name))


@pytest.mark.parametrize("change, text", (
    (lambda s: s.pop("fc_var.bias"), r"1 missing \(fc_var.bias\)"),
    (lambda s: s.update({"fc_vra.bias": s.pop("fc_var.bias")}),
     r"1 missing \(fc_var.bias\); 1 left over \(fc_vra.bias\)"),
    (lambda s: s.pop("encoder.block.6" + UPSTREAM[0]), r"1 missing .*; 1 left over .*original1"),
    (lambda s: s.update({"stepper": torch.ones(1)}), r"1 left over \(stepper\)"),
    (lambda s: s.update({"fc_mu.bias": torch.ones(3)}),
     r"1 of another shape \(fc_mu.bias \(3,\), wanted \(16,\)\)"),
    (lambda s: s.update({"fc_mu.weight": torch.ones(10, 10)}), "latent_dim=10 must divide"),
    (lambda s: s["decoder.activation_post.upsample.filter"].mul_(1.01), "differs from the const"),
    (lambda s: s["pre_block.attn.zero_k_bias"].add_(1), "zero_k_bias differs"),
    (lambda s: [s.pop(k) for k in list(s) if k.startswith("decoder")], r"\d+ missing .*, \.\.\.\)"),
))
def test_a_file_that_does_not_fit_is_refused(small, tmp_path, change, text):
    state = upstream_state(small)
    change(state)
    with pytest.raises(ValueError, match=rf"x\.pth.*{text}.* another model or layout"):
        load_semantic_vae(save(tmp_path, state))


def test_a_foreign_checkpoint_is_refused(tmp_path):
    from safetensors.torch import save_file
    save_file({"embed.weight": torch.ones(3, 4)}, tmp_path / "lm.safetensors")
    with pytest.raises(ValueError, match=r"missing .* 1 left over \(embed.weight\)"):
        load_semantic_vae(tmp_path / "lm.safetensors")


# ---- training ----------------------------------------------------------------------------------

def test_the_loss_falls_on_sines():
    config = SemanticVAEConfig(enc_dim=8, heads=2, dec_dim=128, res_kernels=(3,),
                               res_dilations=(1, 3))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = SemanticVAE(config)
    seconds = torch.arange(16_000) / 16_000
    wavs = 0.5 * torch.sin(2 * math.pi * torch.tensor([[220.0], [440.0]]) * seconds)[:, :8_000]
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.8, 0.99))
    losses = []
    for step in range(20):
        loss, logs = vae_loss(vae, wavs, randn(2, 20, 64, seed=step, dtype=torch.float32))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            silent = [name for name, p in vae.named_parameters() if p.grad is None
                      or not p.grad.abs().sum() > 0]
            assert silent == []                                     # all of it learns
        optimizer.step()
        losses.append(loss.item())
    assert math.isfinite(losses[-1]) and losses[-1] < 0.7 * losses[0]
    assert logs.keys() == {"mel", "kl"} and logs["kl"] >= 0


# ---- command line ------------------------------------------------------------------------------

def test_a_file_is_reconstructed_at_16_khz_and_its_length(small, tmp_path, capsys):
    rng = np.random.default_rng(0)
    soundfile.write(tmp_path / "in.wav", 0.1 * rng.standard_normal((11_025, 2)), 22_050)
    main([str(save(tmp_path, ema_state(small))), str(tmp_path / "in.wav"),
          str(tmp_path / "out.wav")])
    wav, rate = soundfile.read(tmp_path / "out.wav")
    assert rate == 16_000 and wav.shape == (8_000,)
    said = capsys.readouterr().out
    assert "2 channels; their mean is used" in said and "22050 Hz; resampled" in said
    assert "out.wav: 0.50 s, log-mel distance" in said and said.strip().endswith("dB")


def test_unusable_audio_is_refused_before_the_checkpoint_is_read(tmp_path):
    cases = (("empty.wav", np.zeros(0), "is empty"), ("silent.wav", np.zeros(800), "is silent"),
             ("nan.wav", np.full(800, np.nan), "NaN or infinite"))
    for name, samples, text in cases:
        soundfile.write(tmp_path / name, samples, 16_000, subtype="FLOAT")
        with pytest.raises(ValueError, match=f"{name}.*{text}"):
            main(["no.pth", str(tmp_path / name), "out.wav"])
    (tmp_path / "text.wav").write_text("no sound")
    for name in ("text.wav", "missing.wav"):
        with pytest.raises(ValueError, match="no readable audio file"):
            read_wav(tmp_path / name)
    soundfile.write(tmp_path / "good.wav", np.sin(np.arange(800)), 16_000)
    for out in ("x.mp3", str(tmp_path / "nowhere" / "x.wav")):
        with pytest.raises(ValueError, match="in a folder that exists"):
            main(["no.pth", str(tmp_path / "good.wav"), out])
    with pytest.raises(ValueError, match="no.pth: there is no such file"):
        main(["no.pth", str(tmp_path / "good.wav"), str(tmp_path / "out.wav")])
