"""What evaluate.py promises: honest intervals, a table from the files, failures that count."""
import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

import evaluate
from config import Config
from conftest import set_stop, tiny_ditar
from evaluate import EvalConfig, bootstrap, compare, score, table
from sample import SampleConfig


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- intervals ---------------------------------------------------------------------------------

def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    covered = []
    for seed in range(100):
        d = np.random.default_rng(seed).exponential(0.3, 100)       # mean 0.3, skewed
        low, high = bootstrap(d, samples=300)
        assert low < d.mean() < high
        covered.append(low < 0.3 < high)
    assert 0.85 <= np.mean(covered) < 1


def test_the_interval_is_as_wide_as_theory_says_and_the_same_each_time():
    d = np.random.default_rng(0).normal(2.0, 1.0, 400)
    low, high = bootstrap(d)
    assert high - low == pytest.approx(2 * 1.96 * d.std() / 20, rel=0.1)
    assert (low, high) == bootstrap(d)
    assert (low, high) != bootstrap(d, seed=1)


def test_a_clear_effect_excludes_zero_and_none_does_not():
    noise = np.random.default_rng(0).normal(0.0, 1.0, 300)
    low, high = bootstrap(noise - noise.mean() + 0.3)
    assert 0 < low < high
    low, high = bootstrap(noise - noise.mean() - 0.3)
    assert low < high < 0
    low, high = bootstrap(noise - noise.mean())
    assert low < 0 < high


def test_runs_that_disagree_widen_the_interval():
    prompts = np.random.default_rng(0).normal(0.5, 0.1, 200)
    agree = np.stack([prompts] * 4)
    disagree = agree + np.array([[-1.0], [-0.5], [0.5], [1.0]])     # the same mean
    assert disagree.mean() == pytest.approx(agree.mean())
    low, high = bootstrap(agree, samples=500)
    assert low > 0.4
    wide_low, wide_high = bootstrap(disagree, samples=500)
    assert wide_low < 0 and wide_high - wide_low > 5 * (high - low)


# ---- comparison and table ----------------------------------------------------------------------

def records(n=60, seed=0, **shift):
    """Made-up records whose means are exactly these, moved by `shift`."""
    means = {"wer": 0.3, "wer_held": 0.3, "sim": 0.6, "sim_held": 0.6, "severe": 0.2,
             "seconds": 2.0}
    noise = np.random.default_rng(seed).normal(0, 0.05, (n, len(means)))
    values = noise - noise.mean(axis=0) + [m + shift.get(name, 0.0) for name, m in means.items()]
    return [{"utt": i, "ref": f"text {i}", **dict(zip(means, row.tolist()))}
            for i, row in enumerate(values)]


def rows_of(text):
    """Heading -> cells of a table."""
    return {cells[0]: cells[1:] for cells in (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:])}


def test_a_comparison_is_paired_over_prompts_and_runs():
    before, after = [records(seed=0), records(seed=1)], [records(seed=2), records(seed=3)]
    c = compare(before, after, "sim")
    b, a = (np.array([[r["sim"] for r in run] for run in runs]) for runs in (before, after))
    assert c["before"] == pytest.approx(b.mean()) and c["after"] == pytest.approx(a.mean())
    assert c["diff"] == pytest.approx(a.mean() - b.mean())
    assert (c["low"], c["high"]) == bootstrap(a - b)
    # what a prompt adds to both cancels: pairing narrows the interval
    harder = [r | {"sim": r["sim"] + 5 * (r["utt"] % 2)} for r in before[0]]
    easier = [r | {"sim": r["sim"] + 5 * (r["utt"] % 2)} for r in after[0]]
    one, other = compare([before[0]], [after[0]], "sim"), compare([harder], [easier], "sim")
    assert other["high"] - other["low"] == pytest.approx(one["high"] - one["low"], rel=1e-6)


def test_systems_on_different_prompts_are_not_compared():
    other = records()
    other[7] = other[7] | {"ref": "another text"}
    for wrong in (other, records(59), list(reversed(records()))):
        with pytest.raises(ValueError, match="evaluated on different prompts"):
            compare([records()], [wrong], "wer")


def test_the_table_marks_what_is_better_and_worse_for_metrics_of_either_direction():
    before = records(seed=0)
    text = table([before], [records(seed=1, wer=-0.2, wer_held=0.2, sim=0.2, sim_held=-0.2,
                                    seconds=1.0)], records(seed=2))
    rows = rows_of(text)
    mark = {name: cells[3].rpartition("]")[2].strip() for name, cells in rows.items()}
    assert mark == {"WER % (reward judge)": "better", "WER % (held-out judge)": "worse",
                    "SIM (reward judge)": "better", "SIM (held-out judge)": "worse",
                    "severe failures %": "", "seconds of speech": ""}
    assert "1 run(s) x 60 prompts" in text.splitlines()[0]
    assert "WER % (Whisper)" not in text                            # nobody measured it


def test_the_table_has_before_after_difference_and_real_speech():
    before, after, real = records(seed=0), records(seed=1, wer=-0.2), records(seed=2, wer=-0.25)
    mean = {name: 100 * np.mean([r["wer"] for r in rows])
            for name, rows in (("before", before), ("after", after), ("real", real))}
    cells = rows_of(table([before], [after], real))["WER % (reward judge)"]
    assert cells[0] == f"{mean['before']:.3f}" and cells[1] == f"{mean['after']:.3f}"
    assert cells[2] == f"{mean['after'] - mean['before']:+.3f}" and cells[2].startswith("-")
    assert cells[4] == f"{mean['real']:.3f}"
    low, high = map(float, cells[3].partition("]")[0].strip("[").split(","))
    assert low < float(cells[2]) < high
    rows = rows_of(table([before], [after], real))
    assert rows["severe failures %"][4] == ""                       # real speech has no cap
    assert rows_of(table([before], [after]))["WER % (reward judge)"][4] == ""
    header = table([before] * 3, [after] * 3, labels=("baseline", "ckpt")).splitlines()[0]
    assert "3 run(s) x 60 prompts | baseline | ckpt" in header


# ---- scoring -----------------------------------------------------------------------------------

class FakeASR:
    """Hears `texts`, one after the other, and counts the clips."""
    def __init__(self, texts):
        self.texts, self.heard = texts, []

    def transcribe(self, wavs):
        self.heard += wavs
        torch.rand(1)                                               # a judge may draw
        return self.texts[:len(wavs)]


class FakeSpeaker:
    """Embeds a clip as the direction of its first two samples."""
    def embed(self, wavs):
        assert wavs, "an empty batch has no embedding"
        return torch.nn.functional.normalize(torch.stack([w[:2] for w in wavs]), dim=-1)


def prompts_and_wavs():
    prompts = [SimpleNamespace(text=text, wav=torch.ones(3_200))
               for text in ("we ran to her", "he was old", "they saw it", "she went away")]
    wavs = [torch.full((n,), 0.5) for n in (16_000, 8_000, 3_200, 1_600)]
    wavs[1][1] = -0.5
    return prompts, wavs


def test_records_hold_each_judges_reading_of_each_utterance():
    prompts, wavs = prompts_and_wavs()
    heard = ["we ran to her", "he is old", "they saw", "yes she went away now"]
    judges = {"asr": FakeASR(heard), "asr_held": FakeASR(heard[::-1]), "speaker": FakeSpeaker(),
              "speaker_held": FakeSpeaker()}
    state = torch.get_rng_state()
    out = score(wavs, [True] * 4, prompts, judges, FakeASR(["we ran to her"] * 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert [r["hyp"] for r in out] == heard
    assert [r["wer"] for r in out] == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3])
    assert out[0]["wer_held"] == 1.25                               # more words than asked: > 1
    assert [r["wer_whisper"] for r in out] == pytest.approx([0, 4 / 3, 4 / 3, 4 / 3])
    assert [r["wer_whisper_capped"] for r in out] == [0, 1, 1, 1]
    assert [r["sim"] for r in out] == pytest.approx([1, 0, 1, 1], abs=1e-6)
    assert [r["sim_held"] for r in out] == [r["sim"] for r in out]
    assert [r["seconds"] for r in out] == [1.0, 0.5, 0.2, 0.1]
    assert [r["ref"] for r in out] == [p.text for p in prompts]
    assert [r["severe"] for r in out] == [0, 0, 0, 0]


def test_bad_wavs_score_the_worst_and_no_judge_hears_them():
    prompts, wavs = prompts_and_wavs()
    wavs[0], wavs[2] = torch.zeros(16_000), torch.full((3_200,), float("nan"))
    asr = FakeASR(["he was old", "she went away"])
    out = score(wavs, [True] * 4, prompts, {"asr": asr, "speaker": FakeSpeaker()})
    assert [r["bad"] for r in out] == [True, False, True, False]
    assert [r["wer"] for r in out] == [1, 0, 1, 0]
    assert [r["sim"] for r in out] == pytest.approx([0, 0, 0, 1], abs=1e-6)
    assert [r["severe"] for r in out] == [1, 0, 1, 0]
    assert out[0]["hyp"] == "" and out[3]["hyp"] == "she went away"
    assert len(asr.heard) == 2


def test_a_set_of_bad_wavs_alone_is_scored_too():
    prompts, _ = prompts_and_wavs()
    out = score([torch.zeros(0)] * 4, [True] * 4, prompts,
                {"asr": FakeASR([]), "speaker": FakeSpeaker()})
    assert [(r["wer"], r["sim"], r["severe"], r["seconds"]) for r in out] == [(1, 0, 1, 0)] * 4


def test_an_utterance_that_hit_the_cap_is_a_severe_failure_whatever_it_says():
    prompts, wavs = prompts_and_wavs()
    out = score(wavs, [True, False, True, False], prompts,
                {"asr": FakeASR([p.text for p in prompts])})
    assert [r["severe"] for r in out] == [0, 1, 0, 1]
    assert [r["wer"] for r in out] == [0, 0, 0, 0]
    assert [r["bad"] for r in out] == [False] * 4


def test_what_is_spoken_depends_neither_on_the_batch_nor_on_the_prompts_behind():
    model = tiny_ditar()
    set_stop(model, 3 * randn(24, seed=1), 0.0)
    prompts = [SimpleNamespace(token_ids=[1 + i, 2, 3], n_target=2, text="", wav=None,
                               latents=randn(1 + i % 3, 2, 4, seed=i)) for i in range(5)]
    vae = SimpleNamespace(latent_mean=torch.zeros(4), decode=lambda z, lengths: (
        z.repeat_interleave(100, dim=2).flatten(1)))
    sample = SampleConfig(max_patches_per_token=1.0, max_patches_extra=4)

    def speak(n, **changes):
        return evaluate.speak(model, vae, prompts[:n], EvalConfig(nfe=2, **changes), sample)
    wavs, utterances = speak(5, batch=5)
    assert len(wavs) == len(utterances) == 5
    for other in (speak(5, batch=2), speak(3, batch=128)):
        for a, b in zip(other[0], wavs):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert (speak(1, batch=1, seed=1)[0][0][:400] - wavs[0][:400]).abs().max() > 1e-2


# ---- files and command line --------------------------------------------------------------------

def folder_of(path, before, after, real, **sections):
    path.mkdir()
    for name, rows in (("before", before), ("after", after), ("real", real)):
        evaluate.write_records(path / f"eval_{name}.jsonl", rows)
    (path / "config.json").write_text(json.dumps(asdict(Config(**sections))))
    return str(path)


def test_records_written_and_read_give_the_same_table(tmp_path):
    before, after, real = records(seed=0), records(seed=1, sim=0.1), records(seed=2)
    folder_of(tmp_path / "a", before, after, real)
    back = [evaluate.read_records(tmp_path / "a" / f"eval_{name}.jsonl")
            for name in ("before", "after", "real")]
    assert back == [before, after, real]
    assert table([back[0]], [back[1]], back[2]) == table([before], [after], real)


def test_the_command_line_prints_the_table_from_the_files_alone(tmp_path, capsys):
    before, after, real = records(seed=0), records(seed=1, sim=0.1), records(seed=2)
    a = folder_of(tmp_path / "a", before, after, real)
    evaluate.main(["--ckpt", a])
    assert capsys.readouterr().out.strip() == table([before], [after], real)
    later = records(seed=4, wer=-0.1)
    b = folder_of(tmp_path / "b", before, later, real)
    evaluate.main(["--ckpt", a, b])
    assert capsys.readouterr().out.strip() == table([before] * 2, [after, later], real)
    evaluate.main(["--ckpt", b, "--baseline", a])
    assert capsys.readouterr().out.strip() == table([after], [later], real, ("baseline", "ckpt"))


def test_the_command_line_refuses_missing_files_and_unequal_numbers_of_runs(tmp_path):
    rows = records()
    a = folder_of(tmp_path / "a", rows, rows, rows)
    with pytest.raises(ValueError, match="no .*eval_after.jsonl; run the evaluate stage"):
        evaluate.main(["--ckpt", str(tmp_path)])
    with pytest.raises(ValueError, match="2 runs in --ckpt, 1 in --baseline"):
        evaluate.main(["--ckpt", a, a, "--baseline", a])
    b = folder_of(tmp_path / "b", rows, rows, rows, evaluate=evaluate.EvalConfig(nfe=8))
    for pair in ([a, b], [a, "--baseline", b]):         # not the same noise to the same end
        with pytest.raises(ValueError, match=r"another way than .*\(evaluate.nfe 8, not 32\)"):
            evaluate.main(["--ckpt", *pair])
    with pytest.raises(ValueError, match="another way"):            # before any speech
        evaluate.main(["--ckpt", a, b, "--whisper", "x"])
    for words, message in ((["--baseline", a, "--whisper", "x"], "without --baseline"),
                           (["--limit", "9"], "--limit goes with --whisper or --lists")):
        with pytest.raises(ValueError, match=message):
            evaluate.main(["--ckpt", a, *words])
    (tmp_path / "a" / "eval_before.jsonl").unlink()
    with pytest.raises(ValueError, match="no .*eval_before.jsonl"):
        evaluate.main(["--ckpt", a])


# ---- figure and report -------------------------------------------------------------------------

def log_of(n):
    rng = np.random.default_rng(0)
    return [{"stage": "grow", "step": i, "anchor": i / n, "flow": 0.5, "patches": 20.0,
             **{name: rng.random() for name in ("wer", "sim", "wer_spread", "sim_spread")}}
            for i in range(n)]


def test_smoothing_keeps_length_and_constants_and_narrows_noise():
    assert np.allclose(evaluate.smooth([0.3] * 20), 0.3)
    for n in (1, 2, 5, 40):
        assert len(evaluate.smooth(range(n))) == n
    noise = np.random.default_rng(0).normal(size=200)
    assert evaluate.smooth(noise).std() < 0.5 * noise.std()


@pytest.mark.parametrize("steps, pairs", ((30, 3), (1, 1), (4, 0)))
def test_the_figure_is_a_png_of_curves_and_spectrograms(steps, pairs, tmp_path):
    wav = 0.1 * randn(16_000).numpy()
    evaluate.figure(tmp_path / "f.png", log_of(steps), [("a text", wav, wav[:8_000])] * pairs)
    data = (tmp_path / "f.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000


def test_the_report_keeps_the_wavs_that_changed_most_and_no_bad_ones(tmp_path):
    n = 5
    prompts = [SimpleNamespace(wav=0.1 * randn(3_200, seed=i)) for i in range(n)]
    spoken = [[0.1 * randn(4_800, seed=seed + i) for i in range(n)] for seed in (10, 20)]
    before, after, real = (records(n, seed) for seed in (0, 1, 2))
    for i, (b, a) in enumerate(zip((0.5, 0.9, 0.5, 1.0, 0.1), (0.4, 0.0, 0.5, 0.0, 0.6))):
        before[i] |= {"wer": b, "bad": i == 3}
        after[i] |= {"wer": a, "bad": False}
    text = evaluate.write_report(tmp_path, *spoken, prompts, real, before, after, keep=2)
    assert text == (tmp_path / "table.md").read_text().strip() == table([before], [after], real)
    assert sorted(p.name for p in (tmp_path / "wavs").iterdir()) == [
        f"{i:04d}_{kind}.wav" for i in (1, 4) for kind in ("after", "before", "prompt")]
    wav, rate = soundfile.read(tmp_path / "wavs" / "0004_after.wav", dtype="float32")
    assert rate == 16_000 and np.abs(wav - spoken[1][4].numpy()).max() < 1e-4
    assert not (tmp_path / "figure.png").exists()                   # no training log, no curves
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (
        {"stage": "vae", "step": 0, "kl": 1.0}, {"stage": "grow", "step": 0, "groups": 0},
        *log_of(3))))
    evaluate.write_report(tmp_path, *spoken, prompts, real, before, after, keep=2)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
