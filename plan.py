"""What a config will need, before anything is rented, downloaded or run:

    python train.py --config full.yaml --plan [--gpus 8] [--tflops 400]

prints parameters per part, memory per GPU, floating-point operations and time per step, and disk.
Parameters are counted on the meta device; the rest is arithmetic from the config and the
assumptions below, which are printed with it. Not in it: the CUDA context and fragmentation (2-4
GB), reading audio, and what a GPU loses on small products: the time is a lower bound, of which the
launches of many small kernels are shown as the second, often larger one.
"""

import torch

from model import DiTAR, TransformerConfig
from vae import SemanticVAE, SemanticVAEConfig

PROMPT_SEC = SPEECH_SEC = 6.0   # of a rollout: the prompt, and what is generated
TEXT_TOKENS = 40                # prompt text and target text together
LAUNCH_SEC = 4e-6               # a small kernel costs this whatever it computes
BLOCK_KERNELS = 24              # of one Block's forward pass
FRAME_HZ = 40
ENCODE_FLOPS, DECODE_FLOPS = 14.5e9, 47.8e9         # of Semantic-VAE, per second of audio
WHISPER_FLOPS, WAVLM_FLOPS = 2 * 0.64e9 * 1_500, 2 * 0.32e9 * 50    # a clip; a second of audio
JUDGES = {"Whisper large-v3, fp16": 3.1e9, "Paraformer-zh": 0.9e9, "WavLM-large + ECAPA": 1.3e9}
MP3_BYTES_PER_HOUR = 64e3 / 8 * 3_600               # at 64 kbit/s


def parameters(config):
    """Parameters of each part of DiTAR, counted without memory."""
    with torch.device("meta"):
        model = DiTAR(config)
    parts = {"text embedding": "embed", "LM": "lm.", "aggregation encoder": "encoder",
             "LocDiT": "locdit", "speech start, stop head": ("speech_start", "stop_head")}
    return {name: sum(p.numel() for key, p in model.named_parameters() if key.startswith(prefix))
            for name, prefix in parts.items()}


def saved_bytes(c: TransformerConfig):
    """Bytes that one Block's backward pass keeps per token under bf16 autocast on a GPU, where
    attention keeps its inputs and output but no scores: the normed inputs and their scales, q, k, v
    before and after norm and rotation, the attention's output, gate, up, their products, and the
    residual stream in fp32."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return 2 * (4 * c.dim + 4 * q + 5 * kv + 4 * c.mlp_dim) + 4 * 2 * c.dim


def block_flops(c, tokens, keys):
    """Forward operations of one Block for `tokens` tokens that attend to `keys` keys each."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return 2 * tokens * (c.dim * (2 * q + 2 * kv) + 3 * c.dim * c.mlp_dim + 2 * keys * q)


def step_costs(config, gpus):
    """(operations, kernels) per GPU and step of each phase of GROW and of pre-training."""
    m, g, s = config.model, config.grow, config.sample
    P = m.patch_frames
    patches = round(SPEECH_SEC * FRAME_HZ / P)
    context = TEXT_TOKENS + 1 + round(PROMPT_SEC * FRAME_HZ / P)
    prompts = g.prompts_per_step / gpus
    rows = prompts * g.group_size
    passes = 2 if s.cfg_scale else 1

    def lm(tokens, keys):
        return m.lm.layers * block_flops(m.lm, tokens, keys)

    def encoder(n):
        return m.encoder.layers * block_flops(m.encoder, n * (P + 1), P + 1)

    def locdit(n):
        return m.locdit.layers * block_flops(m.locdit, n * (2 + 2 * P), 2 + 2 * P)

    def whole(n_rows, with_draws):              # a teacher-forced forward pass
        tokens = context + patches
        return n_rows * (lm(tokens, tokens / 2) + encoder(tokens - TEXT_TOKENS)
                         + locdit(patches * with_draws))
    rollout = (prompts * lm(context, context / 2)
               + rows * patches * (lm(1, context + patches / 2) + encoder(1)
                                   + s.nfe * passes * locdit(1)))
    kernels = BLOCK_KERNELS * patches * (m.lm.layers + m.encoder.layers
                                         + s.nfe * m.locdit.layers)
    audio = rows * SPEECH_SEC
    forward = BLOCK_KERNELS * (m.lm.layers + m.encoder.layers + m.locdit.layers)
    pieces = -(-rows // g.micro_batch)
    seconds = config.data.max_batch_sec
    tokens = seconds * FRAME_HZ / P * (1 + TEXT_TOKENS / (SPEECH_SEC * FRAME_HZ / P))
    pretrain = 3 * (lm(tokens, tokens / seconds * SPEECH_SEC / 2)
                    + encoder(seconds * FRAME_HZ / P)
                    + m.noise_mult * locdit(seconds * FRAME_HZ / P))
    return {
        "rollout": (rollout, kernels),
        "decode": (audio * DECODE_FLOPS, rows * 700),
        "reward": (rows * WHISPER_FLOPS + 2 * audio * WAVLM_FLOPS, rows * 24 * 40),
        "update": (4 * whole(rows, g.draws) + (audio + rows * PROMPT_SEC) * ENCODE_FLOPS,
                   4 * forward * pieces),
    }, {"pre-training": (pretrain + seconds * ENCODE_FLOPS, 3 * forward)}


def memory(config, gpus, total):
    """Bytes per GPU of each thing that GROW holds at once."""
    m, g = config.model, config.grow
    P = m.patch_frames
    patches = round(SPEECH_SEC * FRAME_HZ / P)
    tokens = TEXT_TOKENS + 1 + round(PROMPT_SEC * FRAME_HZ / P) + patches
    speech = tokens - TEXT_TOKENS
    rows = min(g.micro_batch, g.prompts_per_step * g.group_size / gpus)
    activations = rows * (
        m.lm.layers * tokens * saved_bytes(m.lm)
        + m.encoder.layers * speech * (P + 1) * saved_bytes(m.encoder)
        + m.locdit.layers * g.draws * patches * (2 + 2 * P) * saved_bytes(m.locdit))
    cache = (g.prompts_per_step * g.group_size / gpus * (tokens + 10)
             * m.lm.layers * 2 * m.lm.kv_heads * m.lm.head_dim * 2)
    with torch.device("meta"):
        vae = SemanticVAE(SemanticVAEConfig(latent_dim=m.latent_dim))
    return {"policy, fp32": 4 * total, "its gradients, fp32": 4 * total,
            "AdamW's two moments, fp32": 8 * total, "frozen reference, fp32": 4 * total,
            "copy for rollouts, bf16": 2 * total, "autocast's copies, bf16": 2 * total,
            **({"averaged weights, fp32": 4 * total} if g.ema > 0 else {}),
            "Semantic-VAE, fp32": 4 * sum(p.numel() for p in vae.parameters()), **JUDGES,
            f"activations of {rows:.0f} rollouts (a micro batch)": activations,
            "key-value cache of the rollouts": cache}


def show(config, gpus=8, tflops=400.0):
    """Print the plan."""
    parts = parameters(config.model)
    total = sum(parts.values())
    print("parameters")
    for name, number in parts.items():
        print(f"  {name:42}{number / 1e6:10.1f} M")
    print(f"  {'DiTAR':42}{total / 1e6:10.1f} M")
    print(f"\nmemory per GPU in GROW, {gpus} GPUs, prompts of {PROMPT_SEC:g} s and speech of "
          f"{SPEECH_SEC:g} s, {TEXT_TOKENS} text tokens")
    held = memory(config, gpus, total)
    for name, number in held.items():
        print(f"  {name:42}{number / 1e9:10.1f} GB")
    print(f"  {'in all, without the CUDA context':42}{sum(held.values()) / 1e9:10.1f} GB"
          "   (grow.micro_batch sets the activations)")
    grow, pretrain = step_costs(config, gpus)
    print(f"\ntime per step at {tflops:g} TFLOP/s and {LAUNCH_SEC * 1e6:g} us a kernel launch; "
          "the larger of the two is the bound")
    for costs, steps in ((grow, config.grow.steps), (pretrain, config.pretrain.steps)):
        whole = 0.0
        for name, (flops, kernels) in costs.items():
            by_flops, by_launch = flops / (tflops * 1e12), kernels * LAUNCH_SEC
            whole += max(by_flops, by_launch)
            print(f"  {name:14}{flops / 1e12:9.1f} TFLOP {by_flops:8.2f} s   "
                  f"{kernels:9,.0f} kernels {by_launch:8.2f} s")
        print(f"  {'step':14}{'':16}{whole:8.2f} s   {steps:,} steps: {steps * whole / 3600:.1f} h")
    downloads = 1.5e9 + 0.3e9 + sum(JUDGES.values())
    print(f"\ndisk\n  {'a checkpoint to continue from':42}{12 * total / 1e9:10.1f} GB"
          f"   (keep_last={config.keep_last} of them)"
          f"\n  {'results of pretrain and grow':42}{8 * total / 1e9:10.1f} GB"
          f"\n  {'Qwen3-0.6B, Semantic-VAE, judges':42}{downloads / 1e9:10.1f} GB"
          f"\n  {'95,000 h of speech as mp3 at 64 kbit/s':42}"
          f"{95e3 * MP3_BYTES_PER_HOUR / 1e9:10.0f} GB")
