"""What the stages need from a world of speech, in two worlds with the same attributes and methods:

    check(stages)                    refuses what is missing, before any slow step
    vae                              frozen, encode and decode (ToyVAE or SemanticVAE)
    make_corpus, make_vae, make_judges()            the stages before DiTAR's
    new_model(), pretrain_rows(step)                pre-training: DiTAR before its first step, and
                                     this rank's rows, [(generator, ids, (N, P, D) latents)]
    prompt(step, slot, attempt)      a grow.Prompt of the RL set
    streams()                        the reward streams that the config gives a weight
    held_out(n, split), judges       prompts, real speech and judges of an evaluation
    make_prompt(wav, prompt_text, text), clean(text), transcribe(wav, text)     for sample.py

ToyWorld speaks for itself with eSpeak NG; RealWorld reads corpora, a released VAE, Qwen3's
tokenizer and real judges by the paths in the config. To train on other data, write a third.
"""

import hashlib
import unicodedata
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F

import data
import rewards
import testsets
import toy
from grow import Prompt
from model import DiTAR, draw_latents
from toy_judges import load_judges, train_judges
from vae import SemanticVAE, SemanticVAEConfig, latent_statistics, load_semantic_vae


def make_world(run):
    return ToyWorld(run) if run.config.world == "toy" else RealWorld(run)


@dataclass(frozen=True)
class RealConfig:
    vae: str = ""                   # Semantic-VAE's dac/ema_state_dict.pth
    lm: str = "Qwen/Qwen3-0.6B"     # hub id or folder: the LM's weights and the tokenizer
    statistics: int = 512           # utterances that the latents' mean and deviation come from


STREAMS = ("wer", "sim")        # your own reward: its name here, and its making below


def check_weights(config):
    unknown = sorted(set(config.weights) - set(STREAMS))
    if unknown:
        raise ValueError(f"rewards.weights names {unknown}; the streams are {sorted(STREAMS)}")


def weighted_streams(config, judges):
    """name -> reward of the streams with a weight."""
    check_weights(config)
    streams = {"wer": rewards.WERReward(judges["asr"], config),
               "sim": rewards.SIMReward(judges["speaker"])}
    return {name: streams[name] for name, weight in config.weights.items() if weight != 0}


def check_start(run, stages, needs):
    """needs: stage -> the stages whose results it starts from. Raises ValueError where one is
    neither made in this run nor there already, and says how to make it."""
    for stage in stages:
        for need in needs.get(stage, ()):
            if need not in stages:
                run.find(need)


class ToyWorld:
    """eSpeak NG's voices, the toy's own VAE and judges (toy.py, toy_judges.py)."""
    half = True         # results are kept as small fp16 files

    def __init__(self, run):
        self.run = run
        self.frames = run.config.model.patch_frames
        self.prompt_latents = {}

    def check(self, stages):
        """Refuses what is missing or does not fit, before any slow step."""
        c = self.run.config
        if c.model.latent_dim != c.vae.latent_dim:
            raise ValueError(f"model.latent_dim={c.model.latent_dim} and vae.latent_dim="
                             f"{c.vae.latent_dim}; the model speaks the VAE's latents: set both to "
                             "one number")
        if c.model.vocab_size < len(toy.ALPHABET):
            raise ValueError(f"model.vocab_size={c.model.vocab_size}; the toy alphabet has "
                             f"{len(toy.ALPHABET)} characters, use {len(toy.ALPHABET)}")
        if c.rewards.lang != "en":
            raise ValueError(f"rewards.lang={c.rewards.lang!r}, but the toy world speaks English: "
                             "use en")
        check_start(self.run, stages, {
            "judges": ("vae",), "pretrain": ("vae", "judges"),
            "grow": ("vae", "judges", "pretrain"),
            "evaluate": ("vae", "judges", "pretrain") + ("grow",) * (not c.evaluate.lists)})
        if {"pretrain", "grow", "evaluate"} & set(stages):
            check_weights(c.rewards)
            rewards.check_judges(c.rewards)

    def make_corpus(self):
        for split in ("pretrain", "judge", "rl", "tune", "eval"):
            toy.corpus(split, self.run.config.corpus)

    def make_vae(self):
        toy.train_vae(self.run)

    def make_judges(self):
        train_judges(self.run)

    def new_model(self):
        return DiTAR(self.run.config.model)

    @cached_property
    def vae(self):
        return toy.load_vae(self.run)

    @cached_property
    def judges(self):
        """Those that give the reward, which the config may name, and the toy's held-out ones."""
        c, device, own = self.run.config.rewards, self.run.device, load_judges(self.run)
        return own | {"asr": rewards.load_asr(c, device, own["asr"]),
                      "speaker": rewards.load_speaker(c, device, own["speaker"])}

    def latents(self, wav):
        """Posterior means of one waveform: (N, P, D), normalised."""
        mean = self.vae.encode(wav[None])[0][0]                     # (T, D)
        return mean.view(-1, self.frames, mean.shape[-1])

    @cached_property
    def spoken(self):
        """The pre-training split: corpus, its latents, and each speaker's utterances."""
        data = toy.corpus("pretrain", self.run.config.corpus)
        mates = {s: (data.speakers == s).nonzero()[0].tolist()
                 for s in set(data.speakers.tolist())}
        return data, [self.latents(data.wav(i)) for i in range(len(data.wavs))], mates

    def pretrain_rows(self, step):
        """(prompt, target) pairs of one speaker, some utterances alone."""
        (data, latents, mates), run, rows = self.spoken, self.run, []
        for slot in range(run.rank, run.config.pretrain.pairs_per_step, run.ranks):
            g = run.generator("pretrain", step, slot)
            i = int(torch.randint(len(latents), (1,), generator=g))
            others = mates[data.speakers[i]]
            j = others[int(torch.randint(len(others), (1,), generator=g))]
            if float(torch.rand(1, generator=g)) < run.config.pretrain.single_share:
                text, x_1 = data.texts[i], latents[i]
            else:
                text, x_1 = f"{data.texts[i]} {data.texts[j]}", torch.cat((latents[i], latents[j]))
            rows.append((g, toy.encode_text(text), x_1))
        return rows

    def make_prompt(self, wav, prompt_text, text, latents=None):
        """A voice, what it says, and what it is to say."""
        return Prompt(toy.encode_text(f"{prompt_text} {text}"), len(text), text, wav,
                      self.latents(wav) if latents is None else latents)

    def clean(self, text):
        """A user's text as the model reads it. Raises ValueError where it cannot."""
        text = rewards.normalize(text, "en")
        toy.encode_text(text)
        if strange := sorted(set(text.split()) - set(toy.WORDS)):
            print(f"note: the toy model never heard {strange}; expect babble there")
        return text

    def transcribe(self, wav, text):
        """What a prompt says; text: what is to be said in its voice, whose language it shares."""
        return self.judges["asr"].transcribe([wav])[0]

    @cached_property
    def rl(self):
        return toy.corpus("rl", self.run.config.corpus)

    def prompt(self, step, slot, attempt):
        """Prompt i of the RL split, to say the text of another."""
        g = self.run.generator("prompt", step, slot, attempt)
        i, j = torch.randperm(len(self.rl.wavs), generator=g)[:2].tolist()
        prompt = self.make_prompt(self.rl.wav(i), self.rl.texts[i], self.rl.texts[j],
                                  self.prompt_latents.get(i))
        self.prompt_latents[i] = prompt.latents
        return prompt

    def streams(self):
        return weighted_streams(self.run.config.rewards, self.judges)

    def held_out(self, n, split="eval"):
        """Prompt i of a held-out split is to say the text of utterance i^1 (the same voice), whose
        own audio is the real speech that bounds the scores. Returns prompts and real wavs."""
        data = toy.corpus(split, self.run.config.corpus)
        n = min(n, len(data.wavs) // 2 * 2)
        return ([self.make_prompt(data.wav(i), data.texts[i], data.texts[i ^ 1])
                 for i in range(n)],
                [data.wav(i ^ 1) for i in range(n)])


class RealWorld:
    """Corpora (data.py), Semantic-VAE (vae.py), Qwen3's weights and tokenizer, real judges."""
    half = False

    def __init__(self, run):
        self.run = run

    def check(self, stages):
        """Refuses what is missing before any slow step."""
        c = self.run.config
        wanted = []
        if "vae" in stages and not self.run.done("vae"):
            wanted.append(("real.vae", c.real.vae, "Semantic-VAE's dac/ema_state_dict.pth"))
        if {"vae", "pretrain"} & set(stages):
            wanted.append(("data.train", c.data.train, "a manifest or corpus folder; see data.py"))
        if "grow" in stages:
            wanted.append(("data.prompts", c.data.prompts, "what data.py make-prompts wrote"))
        if "evaluate" in stages:
            wanted += [(f"evaluate.lists.{name}", path, "a test set's list file; see testsets.py")
                       for name, path in c.evaluate.lists.items()]
            if not c.evaluate.lists:
                raise ValueError("evaluate.lists is empty; name a test set, as full.yaml does, or "
                                 "leave evaluate out of stages")
        for field, path, what in wanted:
            if not Path(path).exists() or not path:
                raise ValueError(f"{field}={path!r} is not there; wanted {what}")
        if not (Path(c.real.lm).exists() or rewards.HUB_ID.fullmatch(c.real.lm)):
            raise ValueError(f"real.lm={c.real.lm!r} is no folder here and no hub id (org/name); "
                             "wanted a Qwen3 checkpoint with its tokenizer")
        if "judges" in stages:
            self.make_judges()                      # raises: there are none to train
        check_start(self.run, stages, {"pretrain": ("vae",), "grow": ("vae", "pretrain"),
                                       "evaluate": ("vae",)})
        if {"grow", "evaluate"} & set(stages):
            check_weights(c.rewards)
            rewards.check_judges(c.rewards, toy=False)
        for stage, what in (("vae", "items"), ("pretrain", "items"), ("grow", "rl")):
            if stage in stages and not self.run.done(stage):
                getattr(self, what)                 # read now, as a list may have a bad line
        if "evaluate" in stages:
            sets = testsets.read_lists(c.evaluate.lists, c.evaluate.librispeech_root,
                                       clean=self.clean)
            for name, items in sets.items():
                testsets.require_prompts(name, items, spoken=True)

    # what is read from disk, when it is first needed

    @cached_property
    def vae(self):
        vae = load_semantic_vae(self.run.find("vae"))
        return vae.requires_grad_(False).eval().to(self.run.device)

    @cached_property
    def tokenizer(self):
        from transformers import AutoTokenizer                      # slow import
        return AutoTokenizer.from_pretrained(self.run.config.real.lm)

    @cached_property
    def items(self):
        return data.training_items(self.run.config.data)

    @cached_property
    def loader(self):
        c = self.run.config.data
        return data.Loader(self.items, c.max_broken_share, c.threads)

    @cached_property
    def batches(self):
        c = self.run.config.data
        return data.Batches([item.duration for item in self.items], c.max_batch_sec,
                            self.run.ranks, c.seed)

    @cached_property
    def rl(self):
        return data.read_manifest(self.run.config.data.prompts, targets=True)

    @cached_property
    def judges(self):
        c, device = self.run.config.rewards, self.run.device
        return {"asr": rewards.load_asr(c, device), "speaker": rewards.load_speaker(c, device)}

    # stages before DiTAR's

    def make_corpus(self):
        print(f"{len(self.items)} utterances to pre-train on, {len(self.rl)} RL prompts")

    def make_judges(self):
        raise ValueError("real judges are not trained here; leave judges out of stages and name "
                         "them under rewards")

    def make_vae(self):
        """The released VAE with its latents' statistics over the first utterances of the run."""
        c = self.run.config.real
        vae, D = load_semantic_vae(c.vae), self.run.config.model.latent_dim
        if vae.config.latent_dim != D:
            raise ValueError(f"model.latent_dim={D}, but {c.vae} has {vae.config.latent_dim}; set "
                             "model.latent_dim to that")
        vae = vae.to(self.run.device)
        order = self.batches.batch(0)[0]
        step = 1
        while len(order) < min(c.statistics, len(self.items)):
            order = order + self.batches.batch(step)[0]
            step += 1
        wavs = (wav.to(self.run.device) for _, wav in self.loader.load(order[:c.statistics]))
        mean, std = latent_statistics(vae, wavs, self.run.config.model.latent == "sample")
        vae.latent_mean.copy_(mean)
        vae.latent_std.copy_(std)
        self.run.finish("vae", vae.state_dict(), {
            "latent_mean": mean.abs().mean().item(), "latent_std": std.mean().item()},
            half=False, semantic_vae=asdict(vae.config))

    # rows and prompts

    def new_model(self):
        return DiTAR.from_qwen3(self.run.config.real.lm, self.run.config.model)

    def tokens(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def latents(self, wav, generator):
        """x_1 of one waveform: (N, P, D), normalised, on the CPU."""
        mean, log_var = (v[0].cpu() for v in self.vae.encode(wav[None].to(self.run.device)))
        x_1 = draw_latents(mean, log_var, self.run.config.model.latent, generator)
        return x_1.view(-1, self.run.config.model.patch_frames, x_1.shape[-1])

    def pretrain_rows(self, step):
        """Single utterances, batched by length; an utterance's noise is not its rank's."""
        mine, after = (self.batches.batch(s)[self.run.rank] for s in (step, step + 1))
        rows = []
        for i, wav in self.loader.load(mine, after):
            g = self.run.generator("pretrain", step, i)
            rows.append((g, self.tokens(self.items[i].text), self.latents(wav, g)))
        return rows

    def make_prompt(self, wav, prompt_text, text):
        """A voice, what it says, and what it is to say."""
        blank = "" if rewards.lang_of(prompt_text) == rewards.lang_of(text) == "zh" else " "
        seed = int.from_bytes(hashlib.sha256(wav.numpy().tobytes()).digest()[:7], "little")
        return Prompt(self.tokens(f"{prompt_text}{blank}{text}".strip()), len(self.tokens(text)),
                      text, wav, self.latents(wav, torch.Generator().manual_seed(seed)))

    def prompt(self, step, slot, attempt):
        """A random prompt of the RL set with its own target text; broken files are passed over."""
        g = self.run.generator("prompt", step, slot, attempt)
        for i in torch.randint(len(self.rl), (10,), generator=g).tolist():
            item = self.rl[i]
            try:
                return self.make_prompt(data.read_audio(item), item.text, item.target_text)
            except data.BrokenAudio as error:
                print(f"note: skipped {error}", flush=True)
        raise RuntimeError(f"10 prompts in a row were broken; run python data.py check "
                           f"{self.run.config.data.prompts}")

    def streams(self):
        return weighted_streams(self.run.config.rewards, self.judges)

    def held_out(self, n, split="eval"):
        """The real world is evaluated on test lists (evaluate.py), not on a split of its own."""
        return [], []

    def clean(self, text):
        if not data.has_words(text):
            raise ValueError(f"the text {text!r} has no word to speak; give at least one")
        text = " ".join(text.split())
        if odd := sorted({c for c in text if unicodedata.category(c) in ("Cc", "Cs")}):
            raise ValueError(f"control characters {odd} in the text {text!r}; remove them")
        known = "LATIN", "FULLWIDTH LATIN", "CJK"
        if strange := sorted({c for c in text if c.isalpha()
                              and not unicodedata.name(c, "").startswith(known)}):
            print(f"note: letters {strange} are of neither English nor Chinese, which the model "
                  "learned; expect babble there")
        return text

    def transcribe(self, wav, text):
        langs = [[rewards.lang_of(text)]] if self.run.config.rewards.lang == "auto" else []
        return self.judges["asr"].transcribe([wav], *langs)[0]


# ---------------------------------------------------------------- dry run

def dry_config(c, ranks):
    """The config with one layer a stack, one step a stage and a few short rollouts."""
    shallow = {name: replace(getattr(c.model, name), layers=1) for name in ("lm", "encoder",
                                                                           "locdit")}
    return replace(
        c, out_dir=f"{c.out_dir}-dry", world="real", model=replace(c.model, **shallow),
        pretrain=replace(c.pretrain, steps=1, warmup=0),
        sample=replace(c.sample, max_patches_per_token=0.0, max_patches_extra=4),
        grow=replace(c.grow, steps=1, prompts_per_step=2 * ranks, group_size=2, redraws=0,
                     micro_batch=2),
        grpo=replace(c.grpo, steps=1, prompts_per_step=2 * ranks, group_size=2, redraws=0,
                     micro_batch=2),
        evaluate=replace(c.evaluate, n=2, lists={}))


class RandomJudge:
    """Hears some word in a waveform, and some voice; always the same in the same one."""

    def transcribe(self, wavs, langs=None):
        return ["target" if float(wav.sum()) > 0 else "nothing" for wav in wavs]

    def embed(self, wavs):
        return torch.stack([F.normalize(torch.fft.rfft(wav.float(), 64).abs(), dim=0)
                            for wav in wavs])


class DryWorld(RealWorld):
    """Random weights and data of the right shapes, so that every stage can run once anywhere."""

    def check(self, stages):
        """Nothing is missing where all is random."""

    def __init__(self, run):
        super().__init__(run)
        self.judges = {"asr": RandomJudge(), "speaker": RandomJudge()}
        g = torch.Generator().manual_seed(0)
        self.wavs = [0.1 * torch.randn(data.PATCH_SAMPLES * n, generator=g)
                     for n in (8, 9, 10, 12) for _ in range(run.ranks)]

    def make_vae(self):
        D = self.run.config.model.latent_dim
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            vae = SemanticVAE(SemanticVAEConfig(latent_dim=D, res_kernels=(3,), res_dilations=(1,)))
        self.run.finish("vae", vae.state_dict(), {}, half=False, semantic_vae=asdict(vae.config))

    def new_model(self):
        return DiTAR(self.run.config.model)

    def tokens(self, text):
        return [ord(c) % self.run.config.model.vocab_size for c in text]

    def pretrain_rows(self, step):
        rows = []
        for i in range(self.run.rank, len(self.wavs), self.run.ranks):
            g = self.run.generator("pretrain", step, i)
            rows.append((g, self.tokens(f"random words {i}"), self.latents(self.wavs[i], g)))
        return rows

    def prompt(self, step, slot, attempt):
        return self.make_prompt(self.wavs[slot % len(self.wavs)], "a prompt", f"target {slot}")

    def held_out(self, n, split="eval"):
        prompts = [self.prompt(0, i, 0) for i in range(n if split == "eval" else 0)]
        return prompts, [p.wav for p in prompts]
