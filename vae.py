"""Semantic-VAE: 16 kHz speech <-> 40 Hz x 64 latents, the codec of the paper's experiments.

Paper: GROW, section "Pre-training Configurations" and Eq. (10), whose E is `encode`; Niu et al.
2025 (Semantic-VAE); Kumar et al. 2023 (DAC: the encoder's convolutions and Snake); Lee et al. 2023
(BigVGAN: the decoder, SnakeBeta between two low-pass filters). Released weights load by path:

    python vae.py PATH/dac/ema_state_dict.pth in.wav out.wav        # reconstructs a file

    wavs (B, S) -> convolutions, hop 4*4*5*5 = 400 -> (B, 1024, T) -> causal attention and MLP ->
    (B, T, 64) -> mean, log_var -> latents (B, T, D) -> BigVGAN, 5*5*2*2*2*2 -> (B, 400 T) in [-1,1]

A frame's mean depends on ALL audio before it (attention) and on 12 frames after it (convolutions);
the decoder looks 28 frames to both sides. So utterances go through whole, and padding in a batch
would reach into the last frames: rows share a batch only with rows of their own length.

Differs from Semantic-VAE, or fills what the paper leaves open:
 1. Weight norm is folded into plain weights when a file is read; what trains here trains those.
 2. `encode` returns mean and log-variance and draws nothing; `sample_posterior` draws from the
    generator it is given. Upstream always draws, from the global generator.
 3. Latents are normalised per channel by the buffers latent_mean and latent_std. Upstream has
    none: its weights load with mean 0 and std 1. `latent_statistics` measures them.
 4. `encode` refuses lengths off the hop, where upstream pads inside; `reconstruct` pads and trims.
 5. `vae_loss` is log-mel distance and KL; see there for what is left out.
 6. `kl` lacks a stray constant of upstream's.
"""

import argparse
import json
import math
import os
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import soundfile
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import safe_open
from transformers.audio_utils import mel_filter_bank

from audio import SAMPLE_RATE, check_out, read_wav
from checks import run_main

MAX_AUDIO_SEC = 60      # audio that goes through the networks at once: about 2 GB at full size
MEL_SCALES = ((128, 10), (256, 20), (512, 40), (1024, 80))     # (window in samples, mel bands)
MEL_WEIGHT = 15.0       # of the reconstruction in vae_loss, upstream's


@dataclass(frozen=True)
class SemanticVAEConfig:
    """The released model; vae32 and vae16 differ in latent_dim alone."""
    latent_dim: int = 64                    # D
    enc_dim: int = 64                       # channels after the stem; doubled at every stride
    strides: tuple = (4, 4, 5, 5)           # their product is the hop in samples
    heads: int = 8                          # of the bottleneck's attention
    dec_dim: int = 1024                     # channels at the frame rate; halved at every stage
    up_rates: tuple = (5, 5, 2, 2, 2, 2)
    up_kernels: tuple = (9, 9, 4, 4, 4, 4)
    res_kernels: tuple = (3, 7, 11)         # one residual block each, at every stage
    res_dilations: tuple = (1, 3, 5)
    kl_weight: float = 0.01                 # training: per frame, summed over D (upstream's)

    def __post_init__(self):
        for name in ("strides", "up_rates", "up_kernels", "res_kernels", "res_dilations"):
            object.__setattr__(self, name, tuple(getattr(self, name)))      # json has lists
        head_dim = self.width // self.heads
        checks = (
            (min(self.strides) >= 2, f"strides={self.strides}; each must be 2 or more"),
            (self.hop == math.prod(self.up_rates),
             f"strides={self.strides} make a hop of {self.hop}, but up_rates={self.up_rates} "
             f"multiply to {math.prod(self.up_rates)}; make both products equal"),
            (len(self.up_kernels) == len(self.up_rates) and all(
                k >= u and (k - u) % 2 == 0 for k, u in zip(self.up_kernels, self.up_rates)),
             f"up_kernels={self.up_kernels} for up_rates={self.up_rates}; wanted one kernel per "
             "rate, larger by an even number"),
            (all(k % 2 for k in self.res_kernels),
             f"res_kernels={self.res_kernels}; kernels must be odd"),
            (self.dec_dim % 2 ** len(self.up_rates) == 0,
             f"dec_dim={self.dec_dim} cannot be halved {len(self.up_rates)} times"),
            (self.width % self.heads == 0,
             f"{self.heads} heads do not divide the encoder's width of {self.width}"),
            (self.width > self.latent_dim and head_dim % self.latent_dim == 0,
             f"latent_dim={self.latent_dim} must divide the head width {head_dim} = {self.width} "
             f"channels / {self.heads} heads and be less than {self.width}; change heads"))
        for fine, text in checks:
            if not fine:
                raise ValueError(f"SemanticVAEConfig: {text}")

    @property
    def hop(self):
        """Samples per latent frame."""
        return math.prod(self.strides)

    @property
    def width(self):
        """Channels that leave the convolutional encoder."""
        return self.enc_dim * 2 ** len(self.strides)


# ---------------------------------------------------------------- pure functions

def snake(x, alpha, beta):
    """Snake: x + sin^2(alpha x) / beta. x: (B, C, S); alpha, beta: (1, C, 1), positive."""
    return torch.addcmul(x, torch.sin(alpha * x).square(), 1 / (beta + 1e-9))


def low_pass():
    """The 12 taps of both resampling filters, (12,), sum 1: a sinc of cutoff 1/4 cycle per sample
    under the Kaiser window for a transition 0.3 * 4 wide (Kaiser's formulas)."""
    attenuation_db = 2.285 * 5 * math.pi * 4 * 0.3 + 7.95
    window = torch.kaiser_window(12, periodic=False, beta=0.1102 * (attenuation_db - 8.7),
                                 dtype=torch.float64)
    taps = window * torch.sinc((torch.arange(12, dtype=torch.float64) - 5.5) / 2)
    return (taps / taps.sum()).float()


def kl(mean, log_var):
    """KL(N(mean, var) || N(0, 1)): summed over D, averaged over (B, T), in nats. 0 at best.
    Upstream subtracts 1e-6 per channel inside the sum, a constant of no gradient; left out here.
    """
    return 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(dim=-1).mean()


def sample_posterior(mean, log_var, generator):
    """mean + std * noise: (B, T, D). The noise comes from `generator` (CPU) alone. Frames past a
    row's length, where encode gives zeros for both, become plain noise."""
    noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
    return mean + torch.exp(0.5 * log_var) * noise


def log_mel(wavs, n_fft, n_mels):
    """(B, S) -> (B, n_mels, 1 + S // (n_fft/4)), log10 of mel magnitudes, floor 1e-5."""
    mel = torch.as_tensor(mel_filter_bank(n_fft // 2 + 1, n_mels, 0, SAMPLE_RATE / 2, SAMPLE_RATE,
                                          norm="slaney", mel_scale="slaney")).to(wavs)
    window = torch.hann_window(n_fft, dtype=wavs.dtype, device=wavs.device)
    spec = torch.stft(wavs, n_fft, n_fft // 4, window=window, pad_mode="constant",
                      return_complex=True).abs()                    # (B, bins, frames)
    return torch.log10((mel.T @ spec).clamp(min=1e-5))


def equal_rows(lengths, B, longest, multiple, at_most):
    """Splits a batch into pieces of rows of one length, of `at_most` steps together or one row.
    lengths: (B,) or None, which is `longest` for all; at most `longest`, multiples of `multiple`.
    Returns [(row indices, length), ...]; rows of length 0 are in none."""
    if longest % multiple:
        raise ValueError(f"{longest} samples is no multiple of the hop of {multiple}; crop or pad "
                         "to whole frames first")
    lengths = [longest] * B if lengths is None else torch.as_tensor(lengths).tolist()
    if len(lengths) != B or any(not 0 <= n <= longest or n % multiple for n in lengths):
        raise ValueError(f"lengths {lengths} for {B} rows of {longest}; wanted one per row, from 0 "
                         f"to {longest}, multiples of {multiple}")
    pieces = []
    for n in sorted(set(lengths) - {0}):
        rows = [i for i, length in enumerate(lengths) if length == n]
        size = max(1, at_most // n)
        pieces += [(rows[k:k + size], n) for k in range(0, len(rows), size)]
    return pieces


# ---------------------------------------------------------------- encoder

class Snake(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, dim, 1))

    def forward(self, x):
        return snake(x, self.alpha, self.alpha)


class ResidualUnit(nn.Module):
    def __init__(self, dim, dilation):
        super().__init__()
        self.block = nn.Sequential(
            Snake(dim), nn.Conv1d(dim, dim, 7, dilation=dilation, padding=3 * dilation),
            Snake(dim), nn.Conv1d(dim, dim, 1))

    def forward(self, x):
        return x + self.block(x)


def nested(*layers):
    """A Sequential whose parameters are called block.0, block.1, ..., as in upstream's files."""
    return nn.Sequential(OrderedDict(block=nn.Sequential(*layers)))


def conv_encoder(c):
    """DAC's encoder: (B, 1, S) -> (B, 16 * enc_dim, S/hop)."""
    layers, dim = [nn.Conv1d(1, c.enc_dim, 7, padding=3)], c.enc_dim
    for stride in c.strides:
        down = nn.Conv1d(dim, 2 * dim, 2 * stride, stride=stride, padding=(stride + 1) // 2)
        layers.append(nested(*(ResidualUnit(dim, d) for d in (1, 3, 9)), Snake(dim), down))
        dim *= 2
    return nested(*layers, Snake(dim), nn.Conv1d(dim, dim, 3, padding=1))


class CausalAttention(nn.Module):
    """Full-history attention without positions, whose heads are averaged, not concatenated."""

    def __init__(self, dim, out_dim, heads):
        super().__init__()
        self.heads, self.out_dim = heads, out_dim
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))                # keys have no bias
        self.proj = nn.Linear(out_dim, out_dim)

    def forward(self, x):
        """(B, T, C) -> (B, T, D)"""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for y in (q + self.q_bias, k, v + self.v_bias))  # (B, H, T, C/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).mean(dim=1)
        y = y.unflatten(-1, (self.out_dim, -1)).mean(dim=-1)        # (B, T, D)  neighbours pooled
        return self.proj(y)


class GatedMLP(nn.Module):
    """GEGLU with a LayerNorm of its own."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w0, self.w1 = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x):
        x = self.norm(x)
        return self.w2(F.gelu(self.w0(x), approximate="tanh") * self.w1(x))


class Bottleneck(nn.Module):
    """From the encoder's width to D: (B, T, C) -> (B, T, D)."""

    def __init__(self, dim, out_dim, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), CausalAttention(dim, out_dim, heads)
        self.norm3, self.proj = nn.LayerNorm(dim), nn.Linear(dim, out_dim)
        self.norm2, self.mlp = nn.LayerNorm(out_dim), GatedMLP(out_dim, 2 * out_dim)

    def forward(self, x):
        x = self.proj(self.norm3(x)) + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))      # normalised twice, as upstream does


# ---------------------------------------------------------------- decoder

class SnakeBeta(nn.Module):
    """Snake with a magnitude apart from the frequency, both kept as logarithms."""

    def __init__(self, dim):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return snake(x, self.alpha.exp()[:, None], self.beta.exp()[:, None])


class AliasFree(nn.Module):
    """SnakeBeta at twice the rate, so that its overtones do not fold back. Length is kept.

    This takes most of the decoder's time on CPUs. Depthwise convolutions that crop as they go were
    the fastest form over all widths; polyphase ones are slower, and products with a banded matrix
    win at few channels only."""

    def __init__(self, dim):
        super().__init__()
        self.act = SnakeBeta(dim)
        self.register_buffer("filter", low_pass(), persistent=False)

    def forward(self, x):
        C = x.shape[1]
        taps = self.filter.expand(C, 1, -1)                         # (C, 1, 12)
        x = F.conv_transpose1d(F.pad(x, (5, 5), mode="replicate"), 2 * taps, stride=2, padding=15,
                               groups=C)                            # (B, C, 2 S)
        x = F.pad(self.act(x), (5, 6), mode="replicate")
        return F.conv1d(x, taps, stride=2, groups=C)                # (B, C, S)


class ResBlock(nn.Module):
    """BigVGAN's AMP block: for each dilation a dilated and a plain convolution, added to x."""

    def __init__(self, dim, kernel, dilations):
        super().__init__()
        def convs(spread):
            return nn.ModuleList(nn.Conv1d(dim, dim, kernel, dilation=d,
                                           padding=d * (kernel // 2)) for d in spread)
        self.convs1, self.convs2 = convs(dilations), convs([1] * len(dilations))
        self.activations = nn.ModuleList(AliasFree(dim) for _ in range(2 * len(dilations)))

    def forward(self, x):
        for i, (conv1, conv2) in enumerate(zip(self.convs1, self.convs2)):
            y = conv1(self.activations[2 * i](x))
            x = x + conv2(self.activations[2 * i + 1](y))
        return x


class Decoder(nn.Module):
    """BigVGAN on latents: (B, D, T) -> (B, 1, hop * T) in [-1, 1]."""

    def __init__(self, c):
        super().__init__()
        dim = c.dec_dim
        self.conv_pre = nn.Conv1d(c.latent_dim, dim, 7, padding=3)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for u, k in zip(c.up_rates, c.up_kernels):
            up = nn.ConvTranspose1d(dim, dim // 2, k, stride=u, padding=(k - u) // 2)
            self.ups.append(nn.ModuleList([up]))
            dim //= 2
            self.resblocks.extend(ResBlock(dim, r, c.res_dilations) for r in c.res_kernels)
        self.activation_post = AliasFree(dim)
        self.conv_post = nn.Conv1d(dim, 1, 7, padding=3, bias=False)

    def forward(self, z):
        x, n = self.conv_pre(z), len(self.resblocks) // len(self.ups)
        for i, (up,) in enumerate(self.ups):
            x = up(x)
            x = sum(block(x) for block in self.resblocks[n * i:n * (i + 1)]) / n
        return self.conv_post(self.activation_post(x)).clamp(-1, 1)


# ---------------------------------------------------------------- the VAE

class SemanticVAE(nn.Module):
    """encode -> (mean, log-variance), decode; the interface of toy.ToyVAE. Module names are those
    of upstream's files. Latents that leave and enter are normalised (departure 3)."""

    def __init__(self, config=SemanticVAEConfig()):
        super().__init__()
        c = self.config = config
        self.encoder = conv_encoder(c)
        self.pre_block = Bottleneck(c.width, c.latent_dim, c.heads)
        self.fc_mu = nn.Linear(c.latent_dim, c.latent_dim)
        self.fc_var = nn.Linear(c.latent_dim, c.latent_dim)
        self.decoder = Decoder(c)
        self.register_buffer("latent_mean", torch.zeros(c.latent_dim))
        self.register_buffer("latent_std", torch.ones(c.latent_dim))

    def posterior(self, wavs):
        """(B, S) without padding, S a multiple of the hop -> raw mean, log_var (B, S/hop, D)."""
        if wavs.shape[1] % self.config.hop:
            raise ValueError(f"{wavs.shape[1]} samples is no multiple of the hop of "
                             f"{self.config.hop}; crop or pad to whole frames first")
        x = self.encoder(wavs[:, None]).transpose(1, 2)             # (B, T, C)
        x = self.pre_block(x)                                       # (B, T, D)
        return self.fc_mu(x), self.fc_var(x).clamp(-12, 12)

    def synthesize(self, z):
        """Raw latents (B, T, D) -> (B, hop * T)."""
        return self.decoder(z.transpose(1, 2))[:, 0]

    def encode(self, wavs, lengths=None):
        """Deterministic. wavs: (B, S), S a multiple of the hop; lengths: (B,) samples or None.
        Returns normalised mean and log-variance, (B, S/hop, D) each; frames past a length are 0.
        Raises ValueError for a length that is no multiple of the hop."""
        (B, S), hop = wavs.shape, self.config.hop
        pieces = equal_rows(lengths, B, S, hop, MAX_AUDIO_SEC * SAMPLE_RATE)
        mean = wavs.new_zeros(B, S // hop, self.config.latent_dim)
        log_var = torch.zeros_like(mean)
        for rows, n in pieces:
            mu, lv = self.posterior(wavs[rows, :n])
            mean[rows, :n // hop] = (mu - self.latent_mean) / self.latent_std
            log_var[rows, :n // hop] = lv - 2 * torch.log(self.latent_std)
        return mean, log_var

    def decode(self, latents, lengths=None):
        """latents: (B, T, D) normalised; lengths: (B,) frames or None. Returns (B, hop * T);
        samples past a length are 0."""
        (B, T, D), hop = latents.shape, self.config.hop
        if D != self.config.latent_dim:
            raise ValueError(f"latents of {D} channels; this VAE has {self.config.latent_dim}")
        wavs = latents.new_zeros(B, T * hop)
        for rows, n in equal_rows(lengths, B, T, 1, MAX_AUDIO_SEC * SAMPLE_RATE // hop):
            z = latents[rows, :n] * self.latent_std + self.latent_mean
            wavs[rows, :n * hop] = self.synthesize(z)
        return wavs


def reconstruct(vae, wav):
    """Encode and decode one waveform of any length: (S,) -> (S,). Zeros fill its last frame."""
    padded = F.pad(wav, (0, -len(wav) % vae.config.hop))
    return vae.decode(vae.encode(padded[None])[0])[0, :len(wav)]


def vae_loss(vae, wavs, noise):
    """Multi-scale log-mel L1 + KL. wavs: (B, S); noise: (B, T, D) standard normal.
    Returns loss and a dict of floats. Enough for a small VAE; upstream's recipe also has
    discriminators (adversarial and feature-matching loss: crisp sound) and pulls latents towards
    WavLM's features (the "semantic" in its name). Both need networks larger than the VAE and days
    of training, and GROW starts from the released weights anyway."""
    mean, log_var = vae.posterior(wavs)
    out = vae.synthesize(mean + torch.exp(0.5 * log_var) * noise)
    mel = sum(F.l1_loss(log_mel(out, *scale), log_mel(wavs, *scale)) for scale in MEL_SCALES)
    divergence = kl(mean, log_var)
    return MEL_WEIGHT * mel + vae.config.kl_weight * divergence, {
        "mel": mel.item(), "kl": divergence.item()}


@torch.no_grad()
def latent_statistics(vae, wavs, sampled=False):
    """Mean and standard deviation of each channel of the raw posterior means (of its samples with
    sampled), (D,) each, for the buffers latent_mean and latent_std. wavs: any iterable of (S,),
    read once."""
    n, total, squares = 0, 0.0, 0.0
    for wav in wavs:
        mean, log_var = (v[0].double() for v in vae.posterior(wav[None]))           # (T, D)
        n, total, squares = n + len(mean), total + mean.sum(0), squares + mean.square().sum(0)
        if sampled:
            squares = squares + log_var.exp().sum(0)
    if n < 2:
        raise ValueError(f"latent statistics of {n} frames; give more speech")
    std = (squares / n - (total / n).square()).clamp(min=0).sqrt()
    if not (std > 0).all():
        raise ValueError(f"latent channels {(~(std > 0)).nonzero().flatten().tolist()} have no "
                         "finite spread over these waveforms; give speech, not silence")
    return (total / n).float(), std.float()


# ---------------------------------------------------------------- files

# Dropped when a file is read: what only training had, and constants that this code has itself.
TRAIN_ONLY = ("projectors.", "decoder_proj.")
EMA_STATE = ("initted", "step")
CONSTANTS = (".upsample.filter", ".downsample.lowpass.filter", ".zero_k_bias")
WEIGHT_NORM = ((".parametrizations.weight.original0", ".parametrizations.weight.original1"),
               (".weight_g", ".weight_v"))


def fold(g, v):
    """Weight norm: g v / |v|, the norm over all dimensions but the first."""
    return g * v / torch.linalg.vector_norm(v, dim=tuple(range(1, v.ndim)), keepdim=True)


def plain_weights(state):
    """An upstream state dict with this file's keys: no prefix, what inference lacks dropped, weight
    norm folded, fp32. Raises ValueError if a dropped constant is not the one assumed here."""
    out = {}
    for key, tensor in state.items():
        key = key.removeprefix("ema_model.")
        if key.endswith(CONSTANTS):
            tensor = tensor.float().flatten()
            ours = low_pass() if key.endswith("filter") else torch.zeros_like(tensor)
            if tensor.shape != ours.shape or not torch.allclose(tensor, ours, atol=1e-3):
                raise ValueError(f"{key} differs from the constant that this code has in its place")
        elif not key.startswith(TRAIN_ONLY) and key not in EMA_STATE:
            out[key] = tensor.float()
    for g_end, v_end in WEIGHT_NORM:
        for stem in [key.removesuffix(v_end) for key in out if key.endswith(v_end)]:
            if stem + g_end in out:
                out[stem + ".weight"] = fold(out.pop(stem + g_end), out.pop(stem + v_end))
    return out


def read_checkpoint(path):
    """A .pth or .safetensors file -> (dict of tensors, config dict or None)."""
    wanted = ("wanted Semantic-VAE's dac/ema_state_dict.pth or dac/weights.pth, or the "
              "vae.safetensors of train.py")
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file; {wanted}")
    try:
        if Path(path).suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                meta = json.loads((file.metadata() or {}).get("semantic_vae", "null"))
                return {key: file.get_tensor(key) for key in file.keys()}, meta
        state = torch.load(path, map_location="cpu", weights_only=True,
                           mmap=zipfile.is_zipfile(path))
    except Exception as error:                      # each reader has classes of its own
        raise ValueError(f"{path} ({os.path.getsize(path):,} bytes) cannot be read as tensors "
                         f"({type(error).__name__}); it may be cut off or hold other objects: "
                         f"download it again; {wanted}") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(torch.is_tensor(v) for v in state.values()):
        raise ValueError(f"{path} holds no dict of tensors; {wanted}")
    return state, None


def load_semantic_vae(path, config=None):
    """The frozen VAE of a file, fp32, on the CPU. `config` is needed only for an upstream file
    whose layout is not the released one: latent_dim, enc_dim and dec_dim are read off its shapes.
    Raises ValueError if anything is missing, left over or of another shape."""
    state, meta = read_checkpoint(path)
    first = {"latent_dim": "fc_mu.weight", "enc_dim": "encoder.block.0.weight",
             "dec_dim": "decoder.conv_pre.weight"}
    try:
        state = plain_weights(state)
        config = config or SemanticVAEConfig(**(meta or {
            name: len(state[key]) for name, key in first.items() if key in state}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; is it of another model or layout?") from error
    with torch.random.fork_rng(devices=()):         # its random start is overwritten
        vae = SemanticVAE(config)
    ours = vae.state_dict()
    if meta is None:                                # upstream does not normalise
        state = {"latent_mean": ours["latent_mean"], "latent_std": ours["latent_std"], **state}
    problems = {
        "missing": sorted(ours.keys() - state.keys()),
        "left over": sorted(state.keys() - ours.keys()),
        "of another shape": [f"{key} {tuple(state[key].shape)}, wanted {tuple(ours[key].shape)}"
                             for key in sorted(ours.keys() & state.keys())
                             if state[key].shape != ours[key].shape]}
    if any(problems.values()):
        raise ValueError(f"{path} does not fit {config}: " + "; ".join(
            f"{len(keys)} {what} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"
            for what, keys in problems.items() if keys) + "; is it of another model or layout?")
    vae.load_state_dict(state)
    return vae.requires_grad_(False).eval()


# ---------------------------------------------------------------- command line

@torch.no_grad()
def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("ckpt", help="ema_state_dict.pth, weights.pth or a .safetensors file")
    parser.add_argument("wav", help="audio file to reconstruct")
    parser.add_argument("out", help="wav file to write")
    args = parser.parse_args(words)
    wav = read_wav(args.wav, silence=False)                 # refuse before the slow part
    check_out(args.out)
    vae = load_semantic_vae(args.ckpt)
    out = reconstruct(vae, wav)
    distance = 20 * F.l1_loss(log_mel(out, 1024, 80), log_mel(wav, 1024, 80)).item()
    soundfile.write(args.out, out.numpy(), SAMPLE_RATE)
    print(f"{args.out}: {len(out) / SAMPLE_RATE:.2f} s, log-mel distance {distance:.2f} dB")


if __name__ == "__main__":
    run_main(main)
