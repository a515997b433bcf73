"""DiTAR: a causal LM over text and speech patches, and a small diffusion transformer per patch.

Paper: GROW, section "DiTAR: Autoregressive-Diffusion TTS" (Eq. 1, 2) and "Pre-training
Configurations"; Jia et al. 2025. Read this file first, then sample.py, grow.py, train.py.

Conventions of the whole repository
    time       t=0 is noise, t=1 is data; x_t = (1-t) x_0 + t x_1; target v* = x_1 - x_0
    guidance   v = v_c + gamma (v_c - v_0), where v_0 sees h=0; gamma=0 is off
    NFE        Euler steps per patch (with guidance each step runs LocDiT on 2B rows)
    audio      16 kHz mono in [-1,1]; latent frame = 400 samples; patch = P=4 frames = 0.1 s
    shapes     B utterances, G rollouts per prompt, L text tokens, N patches, P frames per patch,
               D latent width, C hidden width, M patches of all utterances, flattened

Sequence of one utterance:  [text ids] [speech start] [patch 0] [patch 1] ...
h_i, which generates patch i, is the LM's output at the position before patch i.

Differs from the paper or fills what it leaves open:
 1. t enters LocDiT as a token of its own beside h (the paper does not say how).
 2. `chars_per_patch` > 0 (toy only; 0 = the paper) makes speech positions advance at the rate of
    the text's, from 0, so that rotary attention finds the spoken character near the diagonal.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from checks import at_least, shares


@dataclass(frozen=True)
class TransformerConfig:
    dim: int = 1024             # C
    layers: int = 6
    heads: int = 16             # query heads
    kv_heads: int = 8           # grouped-query attention
    head_dim: int = 128
    mlp_dim: int = 4096         # SwiGLU's inner width
    rope_theta: float = 1e6
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 151_936   # Qwen3's tokenizer
    latent_dim: int = 64        # D, Semantic-VAE
    patch_frames: int = 4       # P
    latent: str = "mean"        # x_1 is the VAE posterior's mean, or a sample of it (open)
    lm: TransformerConfig = TransformerConfig(layers=28, mlp_dim=3072)      # Qwen3-0.6B
    encoder: TransformerConfig = TransformerConfig()                        # aggregation
    locdit: TransformerConfig = TransformerConfig()                         # 120 M
    chars_per_patch: float = 0.0    # see departure 2; 0 is the paper's plain positions
    drop_h: float = 0.1         # pretraining: share of patches whose h is zeroed (for guidance)
    stop_weight: float = 1.0    # pretraining: weight of the stop head's cross-entropy (open)
    noise_mult: int = 1         # pretraining: (t, x_0) draws per patch that share one LM pass

    def __post_init__(self):
        if self.latent not in ("mean", "sample"):
            raise ValueError(f"model.latent={self.latent!r}; wanted mean or sample")
        at_least("model", self, vocab_size=1, latent_dim=1, patch_frames=1, chars_per_patch=0,
                 stop_weight=0, noise_mult=1)
        shares("model", self, "drop_h")
        for name in ("lm", "encoder", "locdit"):
            c = getattr(self, name)
            at_least(f"model.{name}", c, dim=1, layers=1, heads=1, kv_heads=1, head_dim=2,
                     mlp_dim=1)
            if c.heads % c.kv_heads or c.head_dim % 2:
                raise ValueError(f"model.{name}: heads={c.heads}, kv_heads={c.kv_heads}, head_dim="
                                 f"{c.head_dim}; wanted heads a multiple of kv_heads, which they "
                                 "share, and an even head_dim, which rotary positions halve")


# ---------------------------------------------------------------- the transformer

def rope(positions, heads, head_dim, theta):
    """Rotary tables: positions (..., S) -> cos, sin, each (..., S, heads, head_dim). Spread over
    the heads so that the products run over contiguous memory; sin carries the rotation's sign."""
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = (positions[..., None].float() * inv_freq).unsqueeze(-2)
    angles = angles.expand(*angles.shape[:-2], heads, -1)
    return (torch.cat((angles.cos(),) * 2, dim=-1),
            torch.cat((-angles.sin(), angles.sin()), dim=-1))


def rotate(x, cos, sin):
    """Apply rotary tables to heads: x (B, S, H, head_dim), halves paired as Qwen3 does."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = (table[..., :x.shape[-2], :].to(x.dtype) for table in (cos, sin))
    return x * cos + torch.cat((b, a), dim=-1) * sin


class RMSNormFunction(torch.autograd.Function):
    """y = w x / rms(x), with its gradient by hand: on CPUs torch's own is a chain of a dozen
    passes over memory, and this one three times as fast."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True,
                                        dtype=torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(norm.square() / x.shape[-1] + eps).to(x.dtype)      # 1 / rms
        unit = x * scale
        ctx.save_for_backward(unit, weight, scale)
        return unit * weight

    @staticmethod
    def backward(ctx, grad):
        unit, weight, scale = ctx.saved_tensors
        grad_weight = (grad * unit).flatten(0, -2).sum(dim=0)
        grad = grad * weight
        along = torch.linalg.vecdot(grad, unit).unsqueeze(-1) / unit.shape[-1]
        return torch.addcmul(grad, unit, along, value=-1) * scale, grad_weight, None


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        weight = self.weight.to(x.dtype)                            # under autocast, bf16 stays
        if x.device.type == "cpu":
            return RMSNormFunction.apply(x, weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def attend(q, k, v, mask, causal):
    """Softmax attention. q: (B, H, S, d); k, v: (B, KV, S', d), KV divides H; mask: bool,
    broadcastable to (B, H, S, S'), or None; causal: query i of the last S sees keys up to its own.
    On CPUs torch's fused kernel is several times slower than two products on rows this short."""
    H, KV, S, S_k = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    if causal and mask is None and S != S_k:
        mask = torch.ones(S, S_k, dtype=torch.bool, device=q.device).tril(S_k - S)
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=H != KV,
                                              is_causal=causal and mask is None)
    if causal and mask is None:
        mask = torch.ones(S, S_k, dtype=torch.bool).tril()
    q = (q * q.shape[-1] ** -0.5).unflatten(1, (KV, H // KV)).flatten(2, 3)
    scores = (q @ k.transpose(-1, -2)).unflatten(2, (H // KV, S))   # (B, KV, H/KV, S, S')
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-3), float("-inf"))
    y = scores.softmax(dim=-1).flatten(2, 3) @ v                    # (B, KV, H/KV * S, d)
    return y.unflatten(2, (H // KV, S)).flatten(1, 2)


class Block(nn.Module):
    """Qwen3's block: pre-RMSNorm, grouped-query attention with per-head q/k RMSNorm and RoPE,
    SwiGLU, no biases. The LM, the aggregation encoder and LocDiT are all stacks of this class."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.input_layernorm = RMSNorm(c.dim, eps=c.norm_eps)
        self.q_proj = nn.Linear(c.dim, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.q_norm = RMSNorm(c.head_dim, eps=c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, eps=c.norm_eps)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)
        self.post_attention_layernorm = RMSNorm(c.dim, eps=c.norm_eps)
        self.gate_proj = nn.Linear(c.dim, c.mlp_dim, bias=False)
        self.up_proj = nn.Linear(c.dim, c.mlp_dim, bias=False)
        self.down_proj = nn.Linear(c.mlp_dim, c.dim, bias=False)

    def forward(self, x, cos, sin, causal, cache=None, last=None):
        """x: (B, S, C). cache: this layer's view of a Cache. last: return only the last `last`
        tokens (all S are still attended to), for a stack's final layer."""
        c = self.c
        h = self.input_layernorm(x)
        if last is not None:
            x, h_q = x[:, -last:], h[:, -last:]
            cos_q, sin_q = cos[..., -last:, :, :], sin[..., -last:, :, :]
        else:
            h_q, cos_q, sin_q = h, cos, sin
        q = self.q_norm(self.q_proj(h_q).unflatten(-1, (c.heads, c.head_dim)))
        k = self.k_norm(self.k_proj(h).unflatten(-1, (c.kv_heads, c.head_dim)))
        v = self.v_proj(h).unflatten(-1, (c.kv_heads, c.head_dim))
        q = rotate(q, cos_q, sin_q).transpose(1, 2)                 # (B, H, S, head_dim)
        k = rotate(k, cos, sin).transpose(1, 2)                     # (B, KV, S, head_dim)
        v = v.transpose(1, 2)
        mask = None
        if cache is not None:
            k, v, mask = cache.update(k, v)
        y = attend(q, k, v, mask, causal)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Transformer(nn.Module):
    """A stack of Blocks and a final RMSNorm. causal=True for the LM, False for the other two."""

    def __init__(self, c, causal):
        super().__init__()
        self.c, self.causal = c, causal
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim, eps=c.norm_eps)

    def forward(self, x, positions=None, cache=None, last=None):
        """x: (B, S, C); positions: (S,) or (B, S), default 0..S-1. Returns (B, S or last, C)."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = rope(positions, self.c.heads, self.c.head_dim, self.c.rope_theta)
        for i, block in enumerate(self.layers):
            final = i == len(self.layers) - 1
            x = block(x, cos, sin, self.causal, cache and cache.layer(i), last if final else None)
        return self.norm(x)


class Cache:
    """Keys and values of all layers, preallocated; every row fills its own slots from 0 on.

    The first call (prefill) writes slots 0..S-1 of all rows and may be right-padded: `lengths`
    then says where each row really ends, and the next patch overwrites the padding.
    """

    def __init__(self, c, batch, max_len, device, dtype):
        shape = (c.layers, batch, c.kv_heads, max_len, c.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = None     # (B,) slots in use per row, set after the prefill
        self.index = 0

    def layer(self, i):
        self.index = i
        return self

    def update(self, k, v):
        """k, v: (B, KV, S, head_dim) new entries. Returns keys, values and mask to attend with."""
        keys, values = self.k[self.index], self.v[self.index]
        if self.lengths is None:                                    # prefill: plain causal
            keys[:, :, :k.shape[2]], values[:, :, :k.shape[2]] = k, v
            return k, v, None
        rows = torch.arange(len(k), device=k.device)
        keys[rows, :, self.lengths], values[rows, :, self.lengths] = k[:, :, 0], v[:, :, 0]
        return keys[:, :, :self.reach], values[:, :, :self.reach], self.mask

    def begin_step(self):
        """Before each one-token call: the mask that all layers share, over few different widths
        (see pad_rows)."""
        self.reach = min(self.k.shape[3], int(self.lengths.max()) // 16 * 16 + 16)
        slots = torch.arange(self.reach, device=self.k.device)
        self.mask = (slots <= self.lengths[:, None])[:, None, None]     # (B, 1, 1, reach)

    def end_step(self):
        self.lengths = self.lengths + 1

    def select(self, rows, repeats=1):
        """Keep these rows, in this order, each `repeats` times."""
        rows = rows.repeat_interleave(repeats)
        self.k, self.v = self.k[:, rows], self.v[:, rows]
        self.lengths = self.lengths[rows]


# ---------------------------------------------------------------- DiTAR

def qwen3_config(c):
    """A transformers Qwen3Config in the names of TransformerConfig, with vocab_size. Raises
    ValueError for what Block does not have: scaled rotary tables, biases, sliding windows."""
    rope = c.rope_parameters
    if rope.get("rope_type", "default") != "default" or c.attention_bias or any(
            kind != "full_attention" for kind in c.layer_types) or c.hidden_act != "silu":
        raise ValueError("this Qwen3 has scaled rotary tables, biases, a sliding window or another "
                         "activation; Block has none of them: use one of the dense 0.6B to 32B")
    return {"dim": c.hidden_size, "layers": c.num_hidden_layers, "heads": c.num_attention_heads,
            "kv_heads": c.num_key_value_heads, "head_dim": c.head_dim,
            "mlp_dim": c.intermediate_size, "rope_theta": rope["rope_theta"],
            "norm_eps": c.rms_norm_eps, "vocab_size": c.vocab_size}


class TimeEmbedding(nn.Module):
    """Sinusoids of 1000 t, then a small MLP: (M,) -> (M, C)."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        half = self.dim // 2
        freq = torch.exp(-math.log(10_000) * torch.arange(half, device=t.device) / (half - 1))
        angles = 1000 * t.float()[:, None] * freq
        angles = torch.cat((angles.sin(), angles.cos()), dim=-1)
        return self.mlp(angles.to(self.mlp[0].weight.dtype))


class DiTAR(nn.Module):
    """Eq. (1): theta_a is encoder + LM, theta_b is LocDiT; a linear stop head ends the speech."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab_size, c.lm.dim)
        self.speech_start = nn.Parameter(0.02 * torch.randn(c.lm.dim))
        self.lm = Transformer(c.lm, causal=True)
        self.stop_head = nn.Linear(c.lm.dim, 2)
        self.encoder_in = nn.Linear(c.latent_dim, c.encoder.dim)
        self.encoder_token = nn.Parameter(0.02 * torch.randn(c.encoder.dim))
        self.encoder = Transformer(c.encoder, causal=False)
        self.encoder_out = nn.Linear(c.encoder.dim, c.lm.dim)
        self.locdit_h = nn.Linear(c.lm.dim, c.locdit.dim)
        self.locdit_t = TimeEmbedding(c.locdit.dim)
        self.locdit_history = nn.Linear(c.latent_dim, c.locdit.dim)
        self.locdit_in = nn.Linear(c.latent_dim, c.locdit.dim)
        self.locdit = Transformer(c.locdit, causal=False)
        self.locdit_out = nn.Linear(c.locdit.dim, c.latent_dim)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 if name == "embed.weight" else p.shape[1] ** -0.5)
        for stack in (self.lm, self.encoder, self.locdit):          # residual branches start small
            for block in stack.layers:
                for out in (block.o_proj, block.down_proj):
                    nn.init.normal_(out.weight, std=(out.weight.shape[1] * 2
                                                     * len(stack.layers)) ** -0.5)
        nn.init.zeros_(self.locdit_out.weight)
        nn.init.zeros_(self.locdit_out.bias)

    @classmethod
    def from_qwen3(cls, name_or_path, config):
        """A new DiTAR whose text embedding and LM have the released weights of a Qwen3 checkpoint.
        name_or_path: hub id or folder; config: a ModelConfig, whose lm and vocab_size have to be
        the checkpoint's. Raises ValueError where they are not, OSError if there is no checkpoint."""
        from transformers import AutoConfig, Qwen3Model             # slow import
        theirs = AutoConfig.from_pretrained(name_or_path)
        if theirs.model_type != "qwen3":
            raise ValueError(f"{name_or_path} is a {theirs.model_type} checkpoint; wanted qwen3")
        there = qwen3_config(theirs)
        here = asdict(config.lm) | {"vocab_size": config.vocab_size}
        wrong = [f"{k} {there[k]} there, {here[k]} in the config" for k in here
                 if here[k] != there[k]]
        if wrong:
            raise ValueError(f"{name_or_path} has another shape than model.lm: {', '.join(wrong)}; "
                             "set these fields to the checkpoint's")
        released = Qwen3Model.from_pretrained(name_or_path, dtype=torch.float32).state_dict()
        model = cls(config)
        model.embed.weight.data.copy_(released.pop("embed_tokens.weight"))
        model.lm.load_state_dict({k.replace("self_attn.", "").replace("mlp.", ""): v
                                  for k, v in released.items()})
        return model

    # theta_a: text and past patches -> h

    def encode_patches(self, patches):
        """Aggregation: (B, N, P, D) -> (B, N, C), one LM input per patch."""
        B, N, P, D = patches.shape
        x = self.encoder_in(patches.reshape(B * N, P, D))           # (B*N, P, C)
        token = self.encoder_token.expand(B * N, 1, -1)
        out = self.encoder(torch.cat((x, token), dim=1), last=1)    # only the token's output
        return self.encoder_out(out[:, 0]).unflatten(0, (B, N))     # (B, N, C)

    def speech_positions(self, text_len, index):
        """RoPE position of speech token `index` (0: speech start) of rows with text_len tokens."""
        rate = self.config.chars_per_patch
        return index * rate if rate > 0 else (text_len + index).float()

    def lm_inputs(self, text, text_len, patches):
        """[text][speech start][patches], rows of different text length packed to the left.
        text: (B, L) ids; text_len: (B,); patches: (B, N, P, D).
        Returns inputs (B, L+1+N, C) and positions (B, L+1+N); what lies past a row's end is junk
        that causal attention never shows to the row."""
        B, L = text.shape
        start = self.speech_start.expand(B, 1, -1)
        x = torch.cat((self.embed(text), start, self.encode_patches(patches)), dim=1)
        slot = torch.arange(x.shape[1], device=x.device)[None]
        speech = slot - text_len[:, None]                           # 0 at speech start
        source = torch.where(speech < 0, slot, (L + speech).clamp(max=x.shape[1] - 1))
        x = x.gather(1, source[..., None].expand(-1, -1, x.shape[2]))
        positions = torch.where(speech < 0, slot.float(),
                                self.speech_positions(text_len[:, None], speech))
        return x, positions                                         # (B, L+1+N, C), (B, L+1+N)

    def hidden(self, text, text_len, patches):
        """h_i for every patch: (B, N, C). h_i sees the text and patches before i, no other."""
        N = patches.shape[1]
        x, positions = self.lm_inputs(text, text_len, patches[:, :-1])
        h = self.lm(x, positions)                                   # (B, L+N, C)
        index = text_len[:, None] + torch.arange(N, device=h.device)
        return h.gather(1, index[..., None].expand(-1, -1, h.shape[2]))

    # theta_b: h and the previous patch -> velocity of the next

    def velocity(self, x_t, t, h, history):
        """LocDiT: v_theta(x_t, t | h, history).
        x_t: (M, P, D); t: (M,) or (1,) in [0,1]; h: (M, C), zeros for the unconditional pass;
        history: (M, P, D), the patch before. Returns (M, P, D)."""
        M, P, _ = x_t.shape
        tokens = torch.cat((self.locdit_h(h)[:, None],
                            self.locdit_t(t)[:, None].expand(M, 1, -1),
                            self.locdit_history(history), self.locdit_in(x_t)), dim=1)
        return self.locdit_out(self.locdit(tokens, last=P))         # (M, P, D)


def draw_latents(mean, log_var, latent, generator):
    """x_1 from the VAE's posterior, (T, D) each: its mean, or a sample with that generator."""
    if latent == "mean":
        return mean
    noise = torch.randn(mean.shape, generator=generator).to(mean)
    return mean + torch.exp(0.5 * log_var) * noise


def history_of(patches):
    """The previous patch of each, zeros before the first: (B, N, P, D) -> the same shape."""
    return F.pad(patches, (0, 0, 0, 0, 1, 0))[:, :-1]


def interpolate(x_0, x_1, t):
    """Eq. (10): the point x_t on the straight path and its velocity v*. t: (M,)."""
    t = t.view(-1, *[1] * (x_1.ndim - 1))
    return (1 - t) * x_0 + t * x_1, x_1 - x_0


def valid_patches(n, N):
    """Mask (B, N) that is True on the first n[b] patches of each row."""
    return torch.arange(N, device=n.device) < n[:, None]


def round_up(number, multiple):
    return -(-int(number) // multiple) * multiple


def pad_rows(rows, size=128):
    """Row indices (M,) padded to a multiple of `size` with row 0, and their weights, 0 on padding.
    On CPUs oneDNN compiles a kernel for every new shape (16 ms each, more than the product
    itself), so batches of any length come in a few sizes."""
    extra = -len(rows) % size
    return (torch.cat((rows, rows.new_zeros(extra))),
            torch.arange(len(rows) + extra, device=rows.device) < len(rows))


def pretrain_loss(model, text, text_len, patches, n, t, x_0, drop):
    """Eq. (2) and the stop head's cross-entropy, both means over the real patches.
    text: (B, L) ids; text_len: (B,); patches: (B, N, P, D) clean latents; n: (B,) patches a row;
    t: (K, B, N) in [0,1]; x_0: (K, B, N, P, D) noise, K draws that share the LM pass;
    drop: (K, B, N) bool, True where h is zeroed.
    Returns flow-matching loss, stop loss, and h (B, N, C) for auxiliary losses."""
    K, B, N = t.shape
    h = model.hidden(text, text_len, patches)
    valid = valid_patches(n, N)
    logits = model.stop_head(h)                                     # (B, N, 2)
    is_last = (torch.arange(N, device=n.device) == n[:, None] - 1).long()
    stop = F.cross_entropy(logits[valid].float(), is_last[valid])
    rows, weight = pad_rows(valid.flatten().nonzero()[:, 0])        # (M,) of B*N
    h_k = (h * ~drop[..., None]).flatten(1, 2)[:, rows].flatten(0, 1)           # (K*M, C)
    x_1 = patches.flatten(0, 1)[rows].repeat(K, 1, 1)               # (K*M, P, D)
    history = history_of(patches).flatten(0, 1)[rows].repeat(K, 1, 1)
    t, x_0 = t.flatten(1)[:, rows].flatten(), x_0.flatten(1, 2)[:, rows].flatten(0, 1)
    x_t, v_star = interpolate(x_0, x_1, t)
    error = (model.velocity(x_t, t, h_k, history).float() - v_star).pow(2).mean(dim=(1, 2))
    flow = (error * weight.repeat(K)).sum() / (K * weight.sum())
    return flow, stop, h
