"""The weights that come with the repository load, and do what their metadata claims."""
from pathlib import Path

import pytest
import torch

import evaluate
import toy
import train
from config import build, load_config
from model import ModelConfig
from rewards import wer
from run import Run
from toy_judges import load_judges
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
    """A run of toy.yaml with an empty out_dir, whose eval split is small: its first utterances."""
    folder = tmp_path_factory.mktemp("weights")
    return Run(load_config(str(ROOT / "toy.yaml"), [
        f"out_dir={folder}", f"weights_dir={WEIGHTS}", f"corpus.cache_dir={folder / 'corpus'}",
        "corpus.eval=32", "evaluate.n=16", "evaluate.nfe=8", "autocast=off"]), "")


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


def test_the_judges_know_words_and_voices_of_real_speech(run, judges, metadata):
    claimed = metadata["judges"]["scores"]
    data = toy.corpus("eval", run.config.corpus)
    wavs = [data.wav(i) for i in range(32)]
    for name in ("asr", "asr_held"):
        rates = [wer(ref, hyp) for ref, hyp in zip(data.texts, judges[name].transcribe(wavs))]
        assert sum(rates) / 32 <= claimed[f"{name}_wer_real"] + 0.03, name
    for name in ("speaker", "speaker_held"):
        e = judges[name].embed(wavs)                    # 2k and 2k+1 are one voice
        margin = ((e[0::2] * e[1::2]).sum(1) - (e[0::2] * e[1::2].roll(1, dims=0)).sum(1)).mean()
        assert margin > claimed[f"{name}_same"] - claimed[f"{name}_other"] - 0.2, name
        assert margin > 0.3 or name == "speaker_held"


def test_the_pretrained_model_speaks_held_out_texts_in_held_out_voices(run, judges, metadata):
    world = ToyWorld(run)
    prompts, _ = world.held_out(16)
    wavs, utterances = evaluate.speak(train.load_ditar(run), world.vae, prompts,
                                      run.config.evaluate, run.config.sample)
    records = evaluate.score(wavs, [u.stopped for u in utterances], prompts, judges)
    assert len(records) == 16
    claimed = metadata["pretrain"]["scores"]
    assert sum(r["wer"] for r in records) / 16 <= claimed["wer"] + 0.2
    assert sum(r["sim"] for r in records) / 16 >= claimed["sim"] - 0.2
    assert sum(not u.stopped for u in utterances) <= 2
    assert not any(r["bad"] for r in records)
