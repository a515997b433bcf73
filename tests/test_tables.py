"""What tables.py promises: fair cells, runs that continue, gains and verdicts that add up."""
import contextlib
import io
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest

import tables
import toy
import train
from config import load_config
from evaluate import read_records

ROOT = Path(__file__).resolve().parents[1]
TOY, MICRO = str(ROOT / "toy.yaml"), str(ROOT / "tests" / "micro.yaml")
LR = "grpo.lr=3e-4"


def jobs_of(name, *words, path=TOY, seeds=2, out="out/tables"):
    return tables.make_jobs(name, path, [LR, *words], seeds, out)


# ---- the paper's numbers, and cells that can be compared ---------------------------------------

@pytest.mark.parametrize("name", ("1", "2", "3", "4", "5"))
def test_the_papers_gains_are_those_of_its_own_columns(name):
    base = tables.PRETRAINED
    rounding = 0.006 if name == "4" else 0.0011         # Table 4 prints two decimals
    cells = tables.TABLES[name][1]
    for cell in cells:
        assert mean(base.wer) - mean(cell.wer) == pytest.approx(cell.gain[0], abs=rounding), cell
        assert mean(cell.sim) - mean(base.sim) == pytest.approx(cell.gain[1], abs=rounding), cell
    assert [(c.wer, c.sim, c.gain) for c in cells].count(tables.GROW) == 1      # in all five
    assert round(mean(base.wer), 3) == 2.016 and round(mean(tables.GROW[0]), 3) == 1.558


def test_the_papers_speed_ups_stand_in_table_1_alone():
    assert {c.name: c.speed_up for c in tables.TABLES["1"][1] if c.speed_up} == {
        "grpo-nfe32": 1.0, "grpo-nfe10": 2.6, "grpo-nfe5": 4.0,
        "grow-nfe32": 1.1, "grow-nfe10": 2.9, "grow-nfe5": 4.3}


@pytest.mark.parametrize("name", tables.TABLES)
def test_all_cells_have_one_budget_and_one_evaluation(name):
    jobs, seeds = jobs_of(name, "grow.steps=7", "evaluate.n=9"), {}
    base = load_config(TOY, [LR, "grow.steps=7", "evaluate.n=9"])
    for job in jobs:
        rl = job.config.rl
        assert (rl.steps, rl.prompts_per_step, rl.group_size) == (7, 16, 8)
        for field in tables.SHARED:                     # the optimiser too
            assert getattr(rl, field) == getattr(base.grow, field), field
        assert job.config.seed == job.evaluation.seed == job.seed
        assert job.evaluation.evaluate == jobs[0].evaluation.evaluate
        assert (job.evaluation.evaluate.n, job.evaluation.evaluate.nfe) == (9, 32)
        assert job.evaluation.sample.cfg_scale == base.sample.cfg_scale == 1.5
        for section in ("corpus", "model", "weights_dir", "vae", "judges", "world"):
            assert getattr(job.config, section) == getattr(base, section)
        assert job.config.stages == ("grow",) and job.evaluation.stages == ("evaluate",)
        seeds.setdefault(job.cell.name, []).append(job.seed)
    assert set(map(tuple, seeds.values())) == {(0, 1)}
    assert list(seeds) == [cell.name for cell in tables.TABLES[name][1]]
    assert len({job.dir for job in jobs}) == len(jobs)


def test_cells_change_what_their_table_is_about():
    def changed(name):
        base, out = asdict(load_config(TOY, [LR])), {}
        for job in jobs_of(name, seeds=1):
            now = asdict(job.config)
            out[job.cell.name] = {
                f"{section}.{key}": value for section in ("grow", "sample", "rewards")
                for key, value in now[section].items() if value != base[section][key]}
        return out
    assert changed("1")["grow-nfe32"] == {"sample.nfe": 32}
    two = changed("2")
    assert two["signed"] == {} and two["exp-r-tau25"] == {
        "grow.weighting": "exp_reward", "grow.tau": 25}
    assert changed("3") == {"g1.5-vc": {}, "g1.5-vg": {"grow.velocity": "guided"},
                            "g0-vc": {"sample.cfg_scale": 0}}
    base = load_config(TOY).grow
    four = changed("4")
    assert four["lr1-beta0"] == {"grow.beta_w2": 0} and four["lr1-beta1"] == {}
    assert four["lr1-beta40"]["grow.beta_w2"] == pytest.approx(40 * base.beta_w2)
    assert four["lr2.5-beta4"] == pytest.approx(
        {"grow.lr": 2.5 * base.lr, "grow.beta_w2": 4 * base.beta_w2})
    assert changed("5")["sim"] == {"rewards.weights": {"wer": 0, "sim": 1}}
    for job in jobs_of("1", seeds=1):
        assert job.config.method == job.cell.name[:4]


def test_a_cell_that_changes_nothing_is_one_run_for_all_tables():
    same = {name: [job.cell.name for job in jobs_of(name, seeds=1) if "default" in str(job.dir)]
            for name in tables.TABLES}
    assert same == {"1": ["grow-nfe5"], "2": ["signed"], "3": ["g1.5-vc"], "4": ["lr1-beta1"],
                    "5": ["wer+sim"], "grpo": []}
    dirs = {str(job.dir) for name in "2345" for job in jobs_of(name, seeds=1)}
    assert len(dirs) == 9 + 3 + 8 + 3 - 3


def test_claims_name_cells_of_their_table():
    assert tables.CLAIMS.keys() == tables.TABLES.keys()
    for name, claims in tables.CLAIMS.items():
        known = {cell.name for cell in tables.TABLES[name][1]}
        for _, metrics, a, relation, b in claims:
            assert a in known and b in known | {"pretrained"} and a != b
            assert set(metrics.split()) <= {"wer", "sim"} and relation in ("better", "no better")


# ---- gains and verdicts on made-up numbers -----------------------------------------------------

def records(wer, sim, held=None):
    """One run over prompts; a metric's numbers, one a prompt."""
    wer_held, sim_held = held or (wer, sim)
    return [{"ref": f"text {i}", "wer": w, "sim": s, "wer_held": wh, "sim_held": sh, "severe": 0.0}
            for i, (w, s, wh, sh) in enumerate(zip(wer, sim, wer_held, sim_held))]


BEFORE = records([0.2] * 4, [0.5] * 4)


def test_less_wer_and_more_sim_are_gains():
    runs = {"a": [(BEFORE, records([0.1] * 4, [0.6] * 4))] * 2,
            "b": [(BEFORE, records([0.4] * 4, [0.3] * 4))] * 2}
    for metric, a, b in (("wer", 0.1, -0.2), ("sim", 0.1, -0.2), ("wer_held", 0.1, -0.2)):
        assert tables.gain(metric, runs, "a") == pytest.approx((a, a, a))
        assert tables.gain(metric, runs, "b") == pytest.approx((b, b, b))
        assert tables.gain(metric, runs, "a", "b") == pytest.approx((0.3,) * 3)
        assert tables.gain(metric, runs, "b", "a") == pytest.approx((-0.3,) * 3)
    assert tables.gain("wer", runs, "a", "c") is tables.gain("wer", runs, "c") is None
    assert tables.gain("wer_whisper", runs, "a") is None


def test_an_interval_runs_from_low_to_high_and_widens_with_what_differs():
    runs = {"a": [(BEFORE, records([0.0, 0.1, 0.2, 0.1], [0.6, 0.5, 0.4, 0.7]))]}
    for metric in ("wer", "sim"):
        mid, low, high = tables.gain(metric, runs, "a")
        assert low < mid < high and low > -0.1 - 1e-9 and high <= 0.2 + 1e-9
    assert tables.gain("wer", runs, "a")[0] == pytest.approx(0.1)
    assert tables.gain("sim", runs, "a")[0] == pytest.approx(0.05)


@pytest.mark.parametrize("low, high, better, no_better", (
    (0.1, 0.3, "reproduced", "contradicted"),
    (-0.1, 0.1, "not separable", "not separable"),
    (-0.3, -0.1, "contradicted", "reproduced"),
    (0.01, 0.04, "reproduced", "reproduced"),           # a gain, but below the margin
    (-0.1, 0.05, "not separable", "reproduced")))
def test_a_verdict_is_read_from_the_interval(low, high, better, no_better):
    found = ((low + high) / 2, low, high)
    assert tables.verdict(found, "better") == better
    assert tables.verdict(found, "no better", margin=0.05) == no_better
    assert tables.verdict(None, "better") == tables.verdict(None, "no better") == "not run"


def test_claims_are_judged_by_both_judges_with_a_margin_of_half_the_default_gain():
    runs = {"wer+sim": [(BEFORE, records([0.1] * 4, [0.6] * 4))],
            # SIM +.04: below half of the default's +.1; the held-out judge hears +.06
            "wer": [(BEFORE, records([0.1] * 4, [0.54] * 4, ([0.3] * 4, [0.56] * 4)))]}
    rows = {row[0]: row[1:] for row in tables.judge_claims("5", runs)}
    assert rows["WER alone lowers WER"][-2:] == ("reproduced", "contradicted")
    assert rows["WER alone leaves SIM as it is"][:4] == ("sim", "wer", "no better", "pretrained")
    assert rows["WER alone leaves SIM as it is"][-2:] == ("reproduced", "contradicted")
    assert rows["both together: WER as by WER alone"][-2:] == ("reproduced", "reproduced")
    assert rows["SIM alone raises SIM"][-3:] == (None, "not run", "not run")
    del runs["wer+sim"]                                 # nothing to measure the margin by
    rows = {row[0]: row[1:] for row in tables.judge_claims("5", runs)}
    assert rows["WER alone leaves SIM as it is"][-3:] == (None, "not run", "not run")
    assert rows["WER alone lowers WER"][-2] == "reproduced"


def test_the_table_holds_hand_computed_numbers_beside_the_papers():
    runs = {"wer+sim": [(BEFORE, records([0.1] * 4, [0.6] * 4, ([0.15] * 4, [0.525] * 4)))] * 3}
    text = tables.table_text("5", runs, {})
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")
            for line in text.splitlines() if line.startswith("|")}
    assert rows["wer+sim"] == [
        "wer+sim", "10.00", "+10.00 (+50 %) [+10.00, +10.00]", "+5.00 [+5.00, +5.00]", "0.600",
        "+0.100 [+0.100, +0.100]", "+0.025 [+0.025, +0.025]", "0.0", "+0.458 (+23 %)", "+0.039"]
    assert rows["pretrained"][1] == "20.00" and rows["pretrained"][4] == "0.500"
    assert rows["pretrained"][-2:] == ["of 2.016", "of 0.676"]
    assert rows["sim"][1] == "not run" and rows["sim"][-1] == "+0.043"
    widths = {line.count(" | ") for line in text.split("\n\n")[1].splitlines()}
    assert widths == {9}                                # as many cells in every row
    assert "0 reproduced, 0 not separable, 0 contradicted, 7 not run" in text
    speed = {cell.name: 10.0 for cell in tables.TABLES["1"][1]} | {"grow-nfe10": 4.0}
    lines = tables.table_text("1", {}, speed).splitlines()
    assert any(line.startswith("| grow-nfe10 ") and line.endswith("| 2.5x | 2.9x |")
               for line in lines)


# ---- estimates and failures --------------------------------------------------------------------

def test_the_estimate_adds_up_and_follows_the_finished_runs(monkeypatch, capsys):
    jobs = jobs_of("2", seeds=1)[:3]
    one = 60 * (0.63 * 5 + 0.94 + 3.6) + 2 * 512 * 0.18
    assert tables.estimate(jobs) == pytest.approx(3 * one)
    assert tables.clock(90) == "1.5 min" and tables.clock(2 * 3600) == "2.0 h"
    monkeypatch.setattr(tables, "finished", lambda job: None)
    monkeypatch.setattr(tables, "run_job", lambda job, path: 2 * one)       # twice as slow here
    ended = []
    assert tables.run_jobs(jobs, TOY, ended.append) == [] and ended == [0]
    out = capsys.readouterr().out
    assert f"0 of 3 runs are there; the rest: about {tables.clock(3 * one)} on two" in out
    left = f"0.0 min so far, about {tables.clock(4 * one)} to go"
    assert f"[1/3] {tables.clock(2 * one)}; {left}" in out
    assert "[3/3] " in out and "about 0.0 min to go" in out


def test_a_run_that_fails_is_named_and_the_others_go_on(monkeypatch, capsys):
    jobs, ran = jobs_of("3", seeds=2), []

    def run_job(job, path):
        ran.append((job.cell.name, job.seed))
        if job.cell.name == "g1.5-vg":
            raise RuntimeError("the gradient was not finite")
        return 1.0
    monkeypatch.setattr(tables, "finished", lambda job: None)
    monkeypatch.setattr(tables, "run_job", run_job)
    ended = []
    failed = tables.run_jobs(jobs, TOY, ended.append)
    assert [(job.cell.name, job.seed) for job in failed] == [("g1.5-vg", 0), ("g1.5-vg", 1)]
    assert ran == [(cell.name, seed) for seed in (0, 1) for cell in tables.TABLES["3"][1]]
    assert ended == [0, 1] and "the gradient was not finite" in capsys.readouterr().err


# ---- bad input ---------------------------------------------------------------------------------

@pytest.mark.parametrize("words, message", (
    (["7"], "unknown table '7'; known are 1, 2, 3, 4, 5, grpo and speed"),
    (["2", "--only", "signd"], "table 2 has no cell signd; it has exp-A-tau1"),
    (["2", "--seeds", "0"], "--seeds 0; wanted 1 or more"),
    (["speed", "--plan"], "speed has no cells to plan"),
    (["speed", "--rounds", "0"], "--rounds 0; wanted 1 or more"),
    (["2", "seed=3"], "seed=3: each cell has its own seed; use --seeds"),
    (["2", "out_dir=x"], "out_dir=x: each cell has its own out_dir"),
    (["2", "weights_dir=''"], "no vae.safetensors in weights_dir=''; all cells start from one"),
    (["2", "weights_dir=nowhere"], "no vae.safetensors in weights_dir='nowhere'"),
    (["2", "grow.stepz=3"], "did you mean grow.steps"),
    (["2", "--config", "none.yaml"], "no config file 'none.yaml'"),
    (["1", "grpo.lr=2e-6", "--only", "grpo-nfe5"], "the baseline would stand still; set grpo.lr"),
))
def test_bad_input_is_refused_before_any_run(words, message, tmp_path, monkeypatch):
    weights = tmp_path / "weights"
    weights.mkdir()
    for stage in ("vae", "judges", "pretrain"):
        (weights / f"{stage}.safetensors").touch()
    monkeypatch.setattr(train, "main", lambda words: pytest.fail("a run was started"))
    given = [] if any(w.startswith("weights_dir") for w in words) else [f"weights_dir={weights}"]
    config = [] if "--config" in words else ["--config", TOY]
    with pytest.raises(ValueError) as error:
        tables.main([*words, *config, "--out", str(tmp_path / "out"), *given])
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


# ---- end to end --------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    """tests/micro.yaml up to pre-training, and the words that make a table's runs tiny."""
    folder = tmp_path_factory.mktemp("tables")
    words = [f"corpus.cache_dir={folder / 'corpus'}", "autocast=off", "corpus.pretrain=16",
             "corpus.judge=16", "corpus.rl=4", "corpus.tune=2", "corpus.eval=4", "vae.steps=2",
             "judges.asr_steps=2", "judges.speaker_steps=2", "pretrain.steps=2",
             "grow.prompts_per_step=1", "grow.group_size=2", "grow.steps=2", "evaluate.n=4",
             "evaluate.keep_wavs=0", "grpo.lr=1e-4"]
    with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "_speak_alone", toy._speak_chunk)    # no process of its own per chunk
        train.main(["--config", MICRO, *words, f"out_dir={folder / 'weights'}",
                    "stages=corpus,vae,judges,pretrain"])
    return SimpleNamespace(out=folder / "out", words=[
        *words, f"weights_dir={folder / 'weights'}", "--config", MICRO, "--out",
        str(folder / "out")])


@pytest.fixture
def steps_taken(monkeypatch):
    """(cell, step) of each update, and (cell, "evaluate"); stop_at: where SIGTERM comes."""
    seen = SimpleNamespace(taken=[], stop_at=None)
    gradients, evaluate = train.GrowTrainer.gradients, train.run_evaluate

    def noting(self, step):
        seen.taken.append((self.run.dir.parent.name, step))
        if seen.taken[-1] == seen.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return gradients(self, step)

    def noting_evaluate(run, world):
        seen.taken.append((run.dir.parent.name, "evaluate"))
        return evaluate(run, world)
    monkeypatch.setattr(train.GrowTrainer, "gradients", noting)
    monkeypatch.setattr(train, "run_evaluate", noting_evaluate)
    return seen


def test_a_table_that_was_stopped_continues_and_runs_only_what_is_missing(micro, steps_taken,
                                                                          capsys):
    command = ["1", "--only", "grpo-nfe5", "grow-nfe5", "--seeds", "1", *micro.words]
    steps_taken.stop_at = ("grow-nfe5", 0)              # the first cell done, the second half done
    with pytest.raises(SystemExit) as stopped:
        tables.main(command)
    assert stopped.value.code == 1
    first = [("grpo-nfe5", 0), ("grpo-nfe5", 1), ("grpo-nfe5", "evaluate"), ("grow-nfe5", 0)]
    assert steps_taken.taken == first
    steps_taken.taken.clear()
    steps_taken.stop_at = None
    tables.main(command)
    assert steps_taken.taken == [("grow-nfe5", 1), ("grow-nfe5", "evaluate")]
    text = capsys.readouterr().out
    assert "1 of 2 runs are there" in text and "[1/1] " in text

    folder = micro.out / "1"
    table = (folder / "table.md").read_text()
    assert table in text and (folder / "figure.png").stat().st_size > 10_000
    pair = [read_records(folder / "grow-nfe5" / "seed-0" / f"eval_{part}.jsonl")
            for part in ("before", "after")]
    wer, sim = ([mean(r[m] for r in run) for run in pair] for m in ("wer", "sim"))
    row = next(line for line in table.splitlines() if line.startswith("| grow-nfe5 "))
    row = row.split(" | ")
    assert row[1] == f"{100 * wer[1]:.2f}" and row[4] == f"{sim[1]:.3f}"
    assert row[2].startswith(f"{100 * (wer[0] - wer[1]):+.2f} ")
    assert row[5].startswith(f"{sim[1] - sim[0]:+.3f} [")
    assert "| grow-nfe32 | not run |" in table and "seeds 0 to 0, 4 prompts" in table
    assert "WER: grow-nfe5 better than grpo-nfe5" in table

    steps_taken.taken.clear()
    tables.main(command)                                # nothing is left to do
    assert steps_taken.taken == [] and "2 of 2 runs are there" in capsys.readouterr().out
    tables.main([*command, "evaluate.n=2"])             # other prompts: evaluated anew, not trained
    assert steps_taken.taken == [("grpo-nfe5", "evaluate"), ("grow-nfe5", "evaluate")]
    with pytest.raises(ValueError, match="grpo section: steps 2 there, 3 now; use another"):
        tables.main([*command, "grow.steps=3"])


def test_guidance_of_rollouts_leaves_evaluation_as_it_is(micro, steps_taken, monkeypatch):
    scales = []
    rollouts, evaluation = train.grow_step, train.evaluate.speak
    monkeypatch.setattr(train, "grow_step", lambda *args: (
        scales.append(("rollout", args[10].cfg_scale)), rollouts(*args))[1])
    monkeypatch.setattr(train.evaluate, "speak", lambda *args: (
        scales.append(("evaluation", args[4].cfg_scale)), evaluation(*args))[1])
    tables.main(["3", "--only", "g0-vc", "--seeds", "1", *micro.words, "grow.steps=1"])
    assert scales == [("rollout", 0)] + 2 * [("evaluation", 1.5)]


def test_speed_times_every_method_and_nfe_in_turn(micro, capsys):
    tables.main(["speed", "--rounds", "1", *micro.words])
    out = capsys.readouterr().out
    order = [line.split(": ")[1].split(" ")[0] for line in out.splitlines()
             if line.startswith("round ")]
    assert order == 2 * [cell.name for cell in tables.TABLES["1"][1] if cell.speed_up]
    speed = json.loads((micro.out / "speed.json").read_text())
    assert list(speed) == order[:6] and all(value > 0 for value in speed.values())
    ours = speed["grpo-nfe32"] / speed["grow-nfe5"]
    assert f"{ours:.1f}x | 4.3x |" in (micro.out / "speed.md").read_text()
    assert speed["grpo-nfe32"] > speed["grpo-nfe5"]


def test_a_plan_prints_cells_and_hours_and_starts_nothing(micro, capsys, monkeypatch):
    monkeypatch.setattr(train, "main", lambda words: pytest.fail("a run was started"))
    tables.main(["4", "--plan", *micro.words, "--out", str(micro.out / "new")])
    out = capsys.readouterr().out
    assert all(cell.name in out for cell in tables.TABLES["4"][1])
    assert "grow.lr=5e-05" in out and "with 3 seeds 24 runs, about " in out
    assert not (micro.out / "new").exists()
