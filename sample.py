"""Sampling: Euler steps on a sway grid, guidance, and batched autoregressive generation.

Paper: "Rollout CFG and training velocity" (v_g), "RL Fine-tuning Configurations" (Euler, sway -1).
`stream` speaks patch by patch, `generate` collects it for rollouts, evaluation and this command
line:

    python sample.py --ckpt out/toy --text "the old man walked to the river" \\
        --prompt some.wav --prompt-text "what some.wav says" --out x.wav

A result depends on its own seed alone: not on the batch, its order, or the number of ranks.
"""

import argparse
import math
from dataclasses import dataclass, replace

import soundfile
import torch

from audio import SAMPLE_RATE, check_out, read_wav
from checks import run_main
from model import Cache, round_up

PATCH_SAMPLES = 1_600


@dataclass(frozen=True)
class SampleConfig:
    nfe: int = 10               # Euler steps per patch in rollouts (paper: 10)
    cfg_scale: float = 1.5      # gamma in rollouts and evaluation (paper: 1.5); 0 is off
    sway: float = -1.0          # sway sampling coefficient (paper, F5-TTS)
    max_patches_per_token: float = 1.5      # length cap from the target text (open)
    max_patches_extra: int = 10

    def __post_init__(self):
        if self.nfe < 1:
            raise ValueError(f"sample.nfe={self.nfe}; wanted at least one Euler step per patch")
        if not 0 <= self.cfg_scale < math.inf:
            raise ValueError(f"sample.cfg_scale={self.cfg_scale}; wanted 0 (off) or more")
        if not -1 <= self.sway <= 1.75:         # 2 / (pi - 2) = 1.752: beyond, t runs backwards
            raise ValueError(f"sample.sway={self.sway}; wanted -1 (the paper) to 1.75, where t "
                             "grows at every step")
        if self.cap(1) < 1:
            raise ValueError("sample.max_patches_per_token and max_patches_extra leave no patch to "
                             "generate; raise one of them")

    def cap(self, n_tokens):
        """Most patches that a target text of n_tokens may take."""
        return math.ceil(self.max_patches_per_token * n_tokens) + self.max_patches_extra


def times(nfe, sway=-1.0):
    """The sway grid t = u + s (cos(pi u / 2) - 1 + u): (nfe+1,) from exactly 0 to exactly 1."""
    u = torch.linspace(0, 1, nfe + 1, dtype=torch.float64)
    t = u + sway * (torch.cos(math.pi / 2 * u) - 1 + u)
    t[0], t[-1] = 0, 1
    return t.float()


def guided(v_c, v_0, cfg_scale):
    """v_g = v_c + gamma (v_c - v_0)."""
    return v_c + cfg_scale * (v_c - v_0)


def solve(v_fn, x, grid):
    """Euler's method for dx/dt = v_fn(x, t) along the grid."""
    for t, t_next in zip(grid[:-1], grid[1:]):
        x = x + (t_next - t) * v_fn(x, t)
    return x


def utterance_noise(seed, cap, P, D):
    """x_0 of one utterance's patches: (cap, P, D), from a CPU generator of its own. Patch i's
    noise does not depend on the cap."""
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(P, D, generator=g) for _ in range(cap)])


@dataclass
class Utterance:
    """What one row of `generate` produced."""
    latents: torch.Tensor       # (n, P, D), generated patches only
    stopped: bool               # False: the cap was hit
    h: torch.Tensor | None = None   # (n, C) LM states, when traced


def velocity_fn(model, h, history, cfg_scale):
    """The function (x, t) -> velocity of a batch of rows: h (M, C), history and x (M, P, D), t ()
    or (M,). With guidance, conditional and unconditional rows go through LocDiT in one call."""
    dtype = model.speech_start.dtype
    use_cfg = cfg_scale != 0
    if use_cfg:                                 # h = 0 is the unconditional pass; history stays
        h = torch.cat((h, torch.zeros_like(h)))
        history = torch.cat((history, history))

    def v_fn(x, t):
        x, t = x.to(dtype), t[None] if t.ndim == 0 else t.repeat(1 + use_cfg)
        v = model.velocity(torch.cat((x, x)) if use_cfg else x, t, h, history).float()
        return guided(*v.chunk(2), cfg_scale) if use_cfg else v
    return v_fn


def next_patch(model, h, history, noise, grid, cfg_scale):
    """Solve one patch for a batch of rows: h (B, C), history and noise (B, P, D) -> (B, P, D)."""
    return solve(velocity_fn(model, h, history, cfg_scale), noise.float(), grid)


@torch.no_grad()
def stream(model, texts, prompts, caps, seeds, *, group=1, nfe=10, cfg_scale=1.5, sway=-1.0,
           solver=None):
    """Speak a batch patch by patch: each prompt with its text, `group` rollouts each.

    texts: B lists of token ids, prompt text and target text together; prompts: B tensors
    (N0, P, D) of normalised latents, N0 may differ; caps: B ints, most patches to generate;
    seeds: B*G ints, a prompt's rollouts adjacent.
    Yields, once per patch, of the S rollouts that still speak: their numbers (S,), the patch
    (S, P, D), the LM's state that made it (S, C), and (S,) True where the stop head ends it there.
    solver: takes next_patch's place (grpo.py) and is told each row's rollout and the patch's index.
    The prefix is prefilled once per prompt and its cache repeated. Finished rows leave the batch
    by sixteens, so that the cache is not copied at every patch and few shapes occur.
    """
    device, dtype = model.speech_start.device, model.speech_start.dtype
    P, D = model.config.patch_frames, model.config.latent_dim
    B = len(texts)
    assert len(prompts) == len(caps) == B and len(seeds) == B * group, "one of each per prompt"
    text_len = torch.tensor([len(t) for t in texts], device=device)
    n_prompt = torch.tensor([len(p) for p in prompts], device=device)
    text = torch.zeros(B, round_up(text_len.max(), 16), dtype=torch.long, device=device)
    patches = torch.zeros(B, max(8, round_up(n_prompt.max(), 8)), P, D, device=device, dtype=dtype)
    for i in range(B):
        text[i, :len(texts[i])] = torch.as_tensor(texts[i])
        patches[i, :len(prompts[i])] = prompts[i]

    # prefill once per prompt, then one row per rollout
    x, positions = model.lm_inputs(text, text_len, patches)
    cache = Cache(model.config.lm, B, x.shape[1] + max(caps), device, dtype)
    out = model.lm(x, positions, cache=cache)                       # (B, S, C)
    cache.lengths = text_len + 1 + n_prompt
    rows = torch.arange(B, device=device)
    h = out[rows, cache.lengths - 1].repeat_interleave(group, 0)    # (B*G, C)
    history = patches[rows, n_prompt - 1].repeat_interleave(group, 0)
    history = history * (n_prompt > 0).repeat_interleave(group)[:, None, None]
    cache.select(rows, group)
    text_len, n_spoken = (v.repeat_interleave(group) for v in (text_len, n_prompt))
    caps = torch.tensor(caps, device=device).repeat_interleave(group)
    noise = torch.zeros(B * group, int(caps.max()), P, D)
    for i, (seed, cap) in enumerate(zip(seeds, caps.tolist())):
        noise[i, :cap] = utterance_noise(seed, cap, P, D)
    noise = noise.to(device)

    grid = times(nfe, sway).to(device)
    row = torch.arange(B * group, device=device)                    # who is still in the batch
    done = torch.zeros(B * group, dtype=torch.bool, device=device)
    for i in range(noise.shape[1]):
        given = model, h, history, noise[row, i], grid, cfg_scale
        patch = solver(*given, row, i) if solver else next_patch(*given)
        stop = model.stop_head(h).argmax(-1) == 1
        speaks = (~done).nonzero()[:, 0]
        yield row[speaks], patch[speaks], h[speaks], stop[speaks]
        done = done | stop | (i + 1 >= caps[row])
        if done.all():
            break
        left = round_up((~done).sum(), 16)
        if left < len(done):                                        # finished rows leave
            keep = done.long().argsort(stable=True)[:left]
            row, patch, done = row[keep], patch[keep], done[keep]
            cache.select(keep)
        history = patch.to(dtype)
        n_spoken_now = n_spoken[row] + i + 1
        x = model.encode_patches(history[:, None])                  # (B', 1, C)
        cache.begin_step()
        h = model.lm(x, model.speech_positions(text_len[row], n_spoken_now)[:, None],
                     cache=cache)[:, 0]
        cache.end_step()


def generate(model, texts, prompts, caps, seeds, *, group=1, trace=False, **how):
    """`stream` to its end: B*G Utterances, a prompt's rollouts adjacent. trace: keep the states."""
    P, D, C = model.config.patch_frames, model.config.latent_dim, model.config.lm.dim
    R, device = len(seeds), model.speech_start.device
    latents = torch.zeros(R, max(caps), P, D, device=device)
    states = torch.zeros(R, max(caps), C, device=device) if trace else None
    n = torch.zeros(R, dtype=torch.long, device=device)
    stopped = torch.zeros(R, dtype=torch.bool, device=device)
    steps = stream(model, texts, prompts, caps, seeds, group=group, **how)
    for i, (row, patch, h, stop) in enumerate(steps):
        latents[row, i], n[row], stopped[row] = patch, i + 1, stop
        if trace:
            states[row, i] = h.float()
    return [Utterance(latents[i, :length], s, states[i, :length] if trace else None)
            for i, (length, s) in enumerate(zip(n.tolist(), stopped.tolist()))]


def decode_wavs(vae, prompts, utterances, context_patches=2):
    """Waveforms of the generated parts, on the CPU: list of (n*P*hop,). The last `context_patches`
    of each prompt go through the decoder in front, so that its receptive field has no hard edge."""
    wavs, device = [], vae.latent_mean.device
    for i in range(0, len(utterances), 32):
        rows = [torch.cat((p[-context_patches:].to(u.latents), u.latents)).flatten(0, 1)
                for p, u in zip(prompts[i:i + 32], utterances[i:i + 32])]       # (T, D) each
        lengths = torch.tensor([len(r) for r in rows])
        batch = torch.zeros(len(rows), round_up(lengths.max(), 32), rows[0].shape[1])
        for row, x in zip(batch, rows):
            row[:len(x)] = x
        audio = vae.decode(batch.to(device), lengths.to(device)).cpu()              # (32, T*hop)
        hop = audio.shape[1] // batch.shape[1]
        for wav, length, u in zip(audio, lengths.tolist(), utterances[i:i + 32]):
            n = u.latents.shape[0] * u.latents.shape[1]
            wavs.append(wav[(length - n) * hop:length * hop].clone())
    return wavs


# ---------------------------------------------------------------- command line

MIN_PROMPT_SEC = 0.5
MAX_PROMPT_SEC = 30     # pre-training heard nothing longer, and Whisper reads no more
MAX_TEXT_SEC = 60
BYTES_PER_SEC = 15      # of speech: 15 letters, or five Chinese characters in UTF-8


def read_prompt(path):
    """A prompt wav as (S,) float32 at 16 kHz, cropped at its start to whole patches. Other rates
    and stereo are converted with a note. Raises ValueError if it cannot serve as a prompt."""
    wav = read_wav(path, silence=False, max_sec=MAX_PROMPT_SEC)
    if len(wav) < MIN_PROMPT_SEC * SAMPLE_RATE:
        raise ValueError(f"--prompt {path} lasts {len(wav) / SAMPLE_RATE:.2f} s; a voice needs "
                         f"{MIN_PROMPT_SEC} s at least")
    return wav[len(wav) % PATCH_SAMPLES:]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ckpt", required=True, help="output folder of train.py")
    parser.add_argument("--text", required=True)
    parser.add_argument("--prompt", required=True, help="wav of the voice to speak in")
    parser.add_argument("--prompt-text", help="what it says; default: the recogniser's reading")
    parser.add_argument("--out", required=True)
    parser.add_argument("--stage", choices=("grow", "grow.best", "pretrain"), default="grow",
                        help="grow.best: at the best probe (guards.probe_every)")
    parser.add_argument("--nfe", type=int, default=32)
    parser.add_argument("--cfg-scale", type=float, help="gamma; 0 is off; default: the run's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    from train import load_ditar, open_run
    from worlds import make_world
    run = open_run(args.ckpt)
    world, c = make_world(run), run.config.sample
    c = replace(c, nfe=args.nfe,
                cfg_scale=c.cfg_scale if args.cfg_scale is None else args.cfg_scale)
    text, wav = world.clean(args.text), read_prompt(args.prompt)   # refuse before the slow part
    if (sec := len(text.encode()) / BYTES_PER_SEC) > MAX_TEXT_SEC:
        raise ValueError(f"--text is about {sec:.0f} s of speech; wanted {MAX_TEXT_SEC} s at most: "
                         "split it into sentences")
    check_out(args.out)
    prompt_text = None if args.prompt_text is None else world.clean(args.prompt_text)
    model = load_ditar(run, args.stage)
    if prompt_text is None:
        prompt_text = world.transcribe(wav, text)
        print(f"note: no --prompt-text; the recogniser hears {prompt_text!r}")
    prompt = world.make_prompt(wav, prompt_text, text)
    out = generate(model, [prompt.token_ids], [prompt.latents], [c.cap(prompt.n_target)],
                   [args.seed], nfe=c.nfe, cfg_scale=c.cfg_scale, sway=c.sway)
    speech = decode_wavs(world.vae, [prompt.latents], out)[0]
    soundfile.write(args.out, speech.numpy(), SAMPLE_RATE)
    end = "" if out[0].stopped else ", cut at the length cap"
    print(f"{args.out}: {len(speech) / SAMPLE_RATE:.2f} s{end}")


if __name__ == "__main__":
    run_main(main)
