"""The real world end to end at a small size: a Semantic-VAE checkpoint, a Qwen3 folder with its
tokenizer, manifests of audio files. Only the judges are stand-ins."""
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import data
import train
import worlds
from config import load_config
from run import Run, load_tensors
from vae import SemanticVAE, SemanticVAEConfig
from worlds import RandomJudge, RealWorld

ROOT = Path(__file__).resolve().parents[1]
WORDS = "the old young man woman walked ran to river house and saw a dog".split()
VAE = SemanticVAEConfig(latent_dim=8, enc_dim=8, dec_dim=64)


def write_qwen3(folder):
    """A random Qwen3 checkpoint with a word tokenizer, in the layout of the hub."""
    vocab = {word: i for i, word in enumerate(["<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(3)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(vocab), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=48, rope_parameters={
            "rope_type": "default", "rope_theta": 1e6})).save_pretrained(folder)
    return len(vocab)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A folder with all that the real world reads, and the words that name it."""
    folder = tmp_path_factory.mktemp("real")
    with torch.random.fork_rng():
        vocab = write_qwen3(folder / "qwen3")
        torch.manual_seed(4)
        torch.save({f"ema_model.{k}": v for k, v in SemanticVAE(VAE).state_dict().items()
                    if not k.startswith("latent_")}, folder / "ema_state_dict.pth")
    rng, items = np.random.default_rng(5), []
    for i in range(12):
        seconds, text = 0.8 + 0.1 * (i % 4), " ".join(rng.choice(WORDS, 4))
        hum = 0.1 * np.sin(np.arange(int(24_000 * seconds)) * (0.02 + 0.005 * i))
        soundfile.write(folder / f"{i}.wav", hum + 0.01 * rng.standard_normal(len(hum)), 24_000)
        items.append({"audio": f"{i}.wav", "text": text, "lang": "en", "duration": seconds})
    for name, rows in (("train", items), ("prompts", [
            r | {"target_text": items[(i + 1) % 12]["text"]} for i, r in enumerate(items)])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    stack = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp_dim": 48}
    config = {
        "world": "real", "autocast": "off", "stages": ["vae", "pretrain", "grow"],
        "out_dir": str(folder / "out"),
        "real": {"vae": str(folder / "ema_state_dict.pth"), "lm": str(folder / "qwen3"),
                 "statistics": 4},
        "data": {"train": str(folder / "train.jsonl"), "prompts": str(folder / "prompts.jsonl"),
                 "max_batch_sec": 2.2, "train_max_sec": 2.0, "train_min_sec": 0.2, "threads": 1},
        "model": {"vocab_size": vocab, "latent_dim": 8, "latent": "sample", "encoder": stack,
                  "lm": stack | {"layers": 2, "rope_theta": 1e6}, "locdit": stack},
        "pretrain": {"steps": 3, "warmup": 1, "lr": 1e-3},
        "sample": {"nfe": 2, "max_patches_per_token": 0.5, "max_patches_extra": 2},
        "grow": {"steps": 2, "prompts_per_step": 2, "group_size": 3, "lr": 1e-4, "micro_batch": 2},
        "rewards": {"lang": "auto", "zh_asr": "whisper", "asr": "org/whisper",
                    "speaker": str(folder / "speaker.pth")}}
    (folder / "speaker.pth").write_bytes(b"")
    (folder / "real.yaml").write_text(yaml.safe_dump(config))
    return SimpleNamespace(dir=folder, yaml=str(folder / "real.yaml"))


@pytest.fixture
def stand_ins(monkeypatch):
    """Judges that give some number for any waveform; the rest of rewards.py as it is."""
    monkeypatch.setattr(worlds.rewards, "check_judges", lambda config, toy: None)
    for name in ("load_asr", "load_speaker"):
        monkeypatch.setattr(worlds.rewards, name, lambda *args, **kwargs: RandomJudge())


def real_run(real, folder, *words):
    return Run(load_config(real.yaml, [f"out_dir={folder}", *words]), "a command")


def test_every_stage_runs_on_files_and_a_second_time_is_skipped(real, stand_ins, tmp_path, capsys):
    words = ["--config", real.yaml, f"out_dir={tmp_path}"]
    train.main(words)
    vae, meta = load_tensors(tmp_path / "vae.safetensors")
    assert meta["semantic_vae"]["latent_dim"] == 8 and not (vae["latent_std"] == 1).all()
    before, after = (load_tensors(tmp_path / f"{s}.safetensors")[0] for s in ("pretrain", "grow"))
    assert any((before[k] != after[k]).any() for k in before)
    steps = [(r["stage"], r["step"]) for r in map(
        json.loads, (tmp_path / "log.jsonl").read_text().splitlines())]
    assert steps == [("pretrain", 0), ("pretrain", 1), ("pretrain", 2), ("grow", 0), ("grow", 1)]
    capsys.readouterr()
    train.main(words)
    assert capsys.readouterr().out.count("is there, skipped") == 3


def test_the_latent_statistics_are_those_of_the_data(real, tmp_path):
    for latent in ("mean", "sample"):
        run = real_run(real, tmp_path / latent, "real.statistics=12", f"model.latent={latent}")
        world = RealWorld(run)
        world.make_vae()
        means, log_vars = (torch.cat(v) for v in zip(*(
            (m[0], s[0]) for m, s in (world.vae.encode(data.read_audio(item)[None])
                                      for item in world.items))))
        assert means.mean(dim=0).abs().max() < 1e-4
        variance = means.var(dim=0, correction=0) + (latent == "sample") * log_vars.exp().mean(0)
        torch.testing.assert_close(variance, torch.ones(8), atol=1e-3, rtol=1e-3)


def test_pretraining_rows_repeat_and_cover_the_data_over_ranks(real, tmp_path):
    run = real_run(real, tmp_path)
    RealWorld(run).make_vae()
    world, again = RealWorld(run), RealWorld(run)
    seen = []
    for step in (2, 0, 1):
        rows, twice = world.pretrain_rows(step), again.pretrain_rows(step)
        for (g, ids, x_1), (h, ids_2, x_2) in zip(rows, twice, strict=True):
            assert ids == ids_2 and torch.equal(x_1, x_2)
            assert torch.equal(torch.rand(3, generator=g), torch.rand(3, generator=h))
            assert x_1.shape[1:] == (4, 8) and 0 not in ids
            seen.append(tuple(ids))
    assert len(seen) == len(set(seen))


def test_latents_are_samples_of_the_posterior_with_the_prompts_own_noise(real, tmp_path):
    run = real_run(real, tmp_path)
    RealWorld(run).make_vae()
    world = RealWorld(run)
    wav = data.read_audio(world.rl[0])
    prompts = [world.make_prompt(wav, "the man", text) for text in ("a dog ran", "to a house")]
    assert torch.equal(prompts[0].latents, prompts[1].latents)
    mean, log_var = (v[0].view(-1, 4, 8) for v in world.vae.encode(wav[None]))
    noise = (prompts[0].latents - mean) / torch.exp(0.5 * log_var)
    assert abs(noise.mean()) < 0.2 and 0.8 < noise.std() < 1.2
    assert prompts[0].n_target == 3 and len(prompts[0].token_ids) == 5


def test_broken_prompts_are_passed_over_and_too_many_are_an_error(real, tmp_path, capsys):
    run = real_run(real, tmp_path)
    RealWorld(run).make_vae()
    world = RealWorld(run)
    good = list(world.rl)
    for item in world.rl[::2]:
        item.audio += ".gone"
    for slot in range(4):
        assert world.prompt(0, slot, 0).text in {item.target_text for item in good}
    assert "note: skipped" in capsys.readouterr().out
    for item in world.rl[1::2]:
        item.audio += ".gone"
    with pytest.raises(RuntimeError, match="10 prompts in a row were broken; run python data.py"):
        world.prompt(1, 0, 0)


@pytest.mark.parametrize("word, message", (
    ("real.vae=none.pth", "real.vae='none.pth' is not there; wanted Semantic-VAE's"),
    ("real.vae=", "real.vae=None is a NoneType"),
    ("data.train=none", "data.train='none' is not there; wanted a manifest or corpus folder"),
    ("data.prompts=none", "data.prompts='none' is not there; wanted what data.py make-prompts"),
    ("stages=evaluate", "evaluate.lists is empty; name a test set"),
    ("evaluate.lists={seedtts-en: none}", "evaluate.lists.seedtts-en='none' is not there"),
    ("rewards.speaker=none.pth", "speaker='none.pth' is no file here"),
    ("world=rael", "world='rael'; wanted one of toy, real"),
    ("model.latent=median", "model.latent='median'; wanted mean or sample")))
def test_what_is_missing_is_named_before_any_work(word, message, real, tmp_path):
    words = [word] + (["stages=vae,grow,evaluate"] if "lists" in word else [])
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        train.main(["--config", real.yaml, f"out_dir={tmp_path / 'x'}", *words])
    assert message in str(error.value)
    assert not list((tmp_path / "x").glob("*"))


def test_full_yaml_is_a_config_and_its_plan_needs_neither_weights_nor_data(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    train.main(["--config", "full.yaml", "--plan", "--gpus", "4"])
    out = capsys.readouterr().out
    for word in ("DiTAR", "policy, fp32", "4 GPUs", "rollout", "pre-training", "disk"):
        assert word in out
    assert not (ROOT / "out" / "full").exists()
    c = load_config("full.yaml")
    assert (c.grow.group_size, c.grow.prompts_per_step * c.grow.group_size) == (8, 128)
    assert (c.grow.lr, c.grow.beta_w2, c.grow.lr_decay, c.grow.draws) == (2e-6, 0.025, False, 1)
    assert (c.sample.nfe, c.sample.cfg_scale, c.sample.sway, c.evaluate.nfe) == (10, 1.5, -1, 32)
    assert (c.pretrain.steps, c.pretrain.lr, c.pretrain.warmup) == (200_000, 1e-4, 10_000)
    assert asdict(c.rewards)["weights"] == {"wer": 1.0, "sim": 1.0}


def test_the_dry_run_takes_one_step_of_each_stage_on_two_processes(tmp_path):
    (tmp_path / "x-dry").mkdir()
    (tmp_path / "x-dry" / "of an earlier dry run").touch()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         "train.py", "--config", "full.yaml", "--dry-run", f"out_dir={tmp_path / 'x'}",
         "model.vocab_size=500", "autocast=off", "device=cpu"], cwd=ROOT, capture_output=True,
        text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3_000:]
    steps = [r["stage"] for r in map(
        json.loads, (tmp_path / "x-dry" / "log.jsonl").read_text().splitlines())]
    assert steps == ["pretrain", "grow"]
    assert not (tmp_path / "x-dry" / "of an earlier dry run").exists()
    assert "| 1 run(s) x 2 prompts | before | after |" in done.stdout
