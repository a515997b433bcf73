"""The weights that come with the repository load, and do what their metadata claims."""
from pathlib import Path

import pytest
import torch

import evaluate
import toy
import train
from config import build, load_config
from model import ModelConfig
from run import Run
from toy_judges import judge_scores, load_judges
from worlds import ToyWorld

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "weights"
STAGES = ("vae", "judges", "pretrain")

pytestmark = pytest.mark.skipif(
    not (WEIGHTS / "pretrain.safetensors").exists(),
    reason="no weights/pretrain.safetensors; python train.py --config toy.yaml stages=all out_dir="
           "out/all makes it")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of toy.yaml with an empty out_dir, whose splits are small: their first utterances."""
    folder = tmp_path_factory.mktemp("weights")
    return Run(load_config(str(ROOT / "toy.yaml"), [
        f"out_dir={folder}", f"weights_dir={WEIGHTS}", f"corpus.cache_dir={folder / 'corpus'}",
        "corpus.eval=32", "corpus.judge=32", "corpus.tune=64", "autocast=off"]), "")


@pytest.fixture(scope="module")
def judges(run):
    return load_judges(run)


@pytest.fixture(scope="module")
def metadata(run):
    return {stage: run.load(stage)[1] for stage in STAGES}


def test_metadata_say_how_the_weights_were_made_and_with_this_config(run, metadata):
    for stage, meta in metadata.items():
        assert meta["command"].startswith("python train.py --config ") and meta["seconds"] > 0
        ours = run.fingerprint(stage)
        for section in {"vae", "judges", "pretrain"} & set(ours):
            assert meta["config"][section] == ours[section], (stage, section)
    assert build(ModelConfig, metadata["pretrain"]["config"]["model"]) == run.config.model
    assert metadata["judges"]["scores"].keys() >= {
        "asr_wer_real", "asr_held_wer_real", "speaker_same", "speaker_other"}
    assert metadata["pretrain"]["scores"].keys() >= {"wer", "sim"}


def test_the_weights_are_small_and_finite(run):
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()) <= 13e6
    for stage in STAGES:
        assert all(torch.isfinite(t).all() for t in run.load(stage)[0].values()), stage


@torch.no_grad()
def test_the_judges_know_words_and_voices_of_real_and_rebuilt_speech(run, judges, metadata):
    claimed, ours = metadata["judges"]["scores"], judge_scores(run, toy.load_vae(run), judges, 32)
    assert ours.keys() == claimed.keys()
    for name, score in ours.items():                    # 16 voices instead of 128
        if "wer" in name or name.endswith("other"):
            assert score <= claimed[name] + (0.02 if "wer" in name else 0.1), name
        else:
            assert score >= claimed[name] - 0.08, name


@torch.no_grad()
def test_the_vae_gives_speech_back_as_well_as_its_metadata_say(run, metadata):
    vae, data = toy.load_vae(run), toy.corpus("judge", run.config.corpus)
    error = sum(toy.log_mel_l1(vae, data.wav(i)) for i in range(32)) / 32
    assert error == pytest.approx(metadata["vae"]["scores"]["log_mel_l1"], abs=0.015)


def test_the_pretrained_model_speaks_held_out_texts_in_held_out_voices(run, judges, metadata):
    world = ToyWorld(run)
    prompts, _ = world.held_out(64, "tune")             # of the 256 that the metadata's scores mean
    wavs, utterances = evaluate.speak(train.load_ditar(run), world.vae, prompts,
                                      run.config.evaluate, run.config.sample)
    records = evaluate.score(wavs, [u.stopped for u in utterances], prompts, judges)
    assert len(records) == 64
    claimed = metadata["pretrain"]["scores"]
    for name in ("wer", "wer_held"):
        assert sum(r[name] for r in records) / 64 <= claimed[name] + 0.04, name
    for name in ("sim", "sim_held"):
        assert sum(r[name] for r in records) / 64 >= claimed[name] - 0.04, name
    assert sum(not u.stopped for u in utterances) <= 2
    assert not any(r["bad"] for r in records)
