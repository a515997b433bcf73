"""The paper's comparisons at toy scale: Tables 1 to 5, with intervals and verdicts on its claims.

    python tables.py 2 --plan                       cells, what each changes, hours; no run
    python tables.py 2                              all cells, seeds 0 to 2 -> out/tables/2/table.md
    python tables.py 2 --only signed exp-r-tau5 --seeds 1 grow.steps=30 --out out/tables-short
    python tables.py speed                          Table 1's seconds per step, on an idle machine
    python tables.py grpo --seeds 1                 settings for GRPO, compared on the tune split

A cell is train.py's grow and evaluate stages with the words that stand beside it below, from the
pretrained model in weights_dir. All cells share seeds, prompts and number of updates, and are
evaluated at evaluate.nfe and the config's own guidance on the same held-out prompts and noise.
Further words go to every cell. Results lie in out/tables/TABLE/CELL/seed-S; a cell that changes
nothing is the same run in every table: out/tables/default. What is there is not run again, and
after a stop the same command continues.

Intervals: paired 95 % bootstrap over prompts and seeds (evaluate.py), one by one: of forty
comparisons without any effect, two look separable; three seeds show the spread between runs only
roughly, and one not at all. A claim "A is better than B" is reproduced
where the interval lies above zero, contradicted where below. "A is no better than B" is reproduced
where it ends below half the gain of the table's GROW default, else contradicted where it lies above
zero. The reward judge decides, as in the paper; the held-out judge's verdict stands beside it.
Gains are improvements, as the paper's Δ: less WER and more SIM are positive.

Differs from the paper: 1. one test set, and no UTMOS in the toy world; 2. GROW's lr and beta are
toy.yaml's, Table 4 keeps the paper's factors; 3. the paper names no tau: TAUS spans self-imitation
to contrast (a group's sigma is .08 here), at one beta; tau 5 also at a tenth of the lr, which
was chosen with the signed weights; 4. with grpo.shift_every's default GRPO's window gets to starts
0, 1 and 2 of the grid in 60 updates, at NFE 32 all below t = .03: shift2 takes it over the grid.
"""

import argparse
import functools
import json
import statistics
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

import train
from checks import run_main
from config import Config, check_device, load_config
from evaluate import METRICS, compare, read_records
from grow import GrowConfig
from grpo import GrpoConfig
from run import Run, load_meta, write_text
from worlds import make_world


class Cell(NamedTuple):
    name: str
    words: str                      # overrides; x2 is twice the config's value
    wer: tuple = ()                 # the paper's, %: LibriSpeech test-clean, Seed-TTS EN, ZH
    sim: tuple = ()
    gain: tuple = ()                # its "Avg. Δ vs. Pretrain": WER, SIM
    speed_up: float = 0.0


# ---------------------------------------------------------------- the paper's tables

PRETRAINED = Cell("pretrained", "", (2.373, 2.406, 1.269), (0.648, 0.663, 0.717))
GROW = ((1.927, 1.763, 0.983), (0.701, 0.702, 0.742), (0.458, 0.039))   # stands in all five
EXP_A = ((2.223, 2.102, 1.127), (0.646, 0.662, 0.712), (0.199, -0.003))
EXP_R = ((2.361, 2.251, 1.151), (0.647, 0.666, 0.716), (0.095, 0.000))
GRPO_32 = ((2.149, 2.017, 1.144), (0.674, 0.688, 0.736), (0.246, 0.023))
TAUS = (1, 5, 25)
TABLES = {
    "1": ("GRPO and GROW by rollout NFE", [
        Cell("grpo-nfe32", "method=grpo sample.nfe=32", *GRPO_32, 1.0),
        Cell("grpo-nfe32-shift2", "method=grpo sample.nfe=32 grpo.shift_every=2", *GRPO_32),
        Cell("grpo-nfe10", "method=grpo sample.nfe=10",
             (2.332, 1.728, 1.180), (0.683, 0.699, 0.738), (0.269, 0.030), 2.6),
        Cell("grpo-nfe5", "method=grpo sample.nfe=5",
             (2.393, 1.873, 1.194), (0.665, 0.688, 0.730), (0.196, 0.018), 4.0),
        Cell("grow-nfe32", "sample.nfe=32",
             (1.868, 1.750, 1.000), (0.701, 0.703, 0.743), (0.477, 0.040), 1.1),
        Cell("grow-nfe10", "sample.nfe=10", *GROW, 2.9),
        Cell("grow-nfe5", "sample.nfe=5",
             (1.992, 1.721, 1.096), (0.697, 0.702, 0.742), (0.413, 0.038), 4.3)]),
    "2": ("weight of a rollout", [
        *(Cell(f"exp-A-tau{tau}", f"grow.weighting=exp_advantage grow.tau={tau}", *EXP_A)
          for tau in TAUS),
        *(Cell(f"exp-r-tau{tau}", f"grow.weighting=exp_reward grow.tau={tau}", *EXP_R)
          for tau in TAUS),
        Cell("exp-A-tau5-lr.1", "grow.weighting=exp_advantage grow.tau=5 grow.lr=x0.1", *EXP_A),
        Cell("exp-r-tau5-lr.1", "grow.weighting=exp_reward grow.tau=5 grow.lr=x0.1", *EXP_R),
        Cell("signed", "grow.weighting=signed", *GROW)]),
    "3": ("rollout guidance and training velocity", [
        Cell("g1.5-vc", "sample.cfg_scale=1.5 grow.velocity=conditional", *GROW),
        Cell("g1.5-vg", "sample.cfg_scale=1.5 grow.velocity=guided",
             (2.287, 2.283, 1.195), (0.657, 0.671, 0.723), (0.094, 0.007)),
        Cell("g0-vc", "sample.cfg_scale=0 grow.velocity=conditional",
             (1.953, 1.648, 1.052), (0.688, 0.695, 0.744), (0.465, 0.033))]),
    "4": ("learning rate (paper: 2e-6) and anchor (paper: .025), as factors", [
        Cell("lr1-beta0", "grow.beta_w2=0",
             (2.31, 2.23, 1.11), (0.64, 0.66, 0.71), (0.134, -0.003)),
        Cell("lr1-beta1", "grow.beta_w2=x1", *GROW),
        Cell("lr1-beta2", "grow.beta_w2=x2",
             (2.13, 1.89, 0.99), (0.69, 0.69, 0.74), (0.344, 0.030)),
        Cell("lr1-beta4", "grow.beta_w2=x4",
             (1.98, 1.84, 1.15), (0.67, 0.69, 0.73), (0.360, 0.020)),
        Cell("lr1-beta40", "grow.beta_w2=x40",
             (2.37, 2.28, 1.19), (0.65, 0.67, 0.72), (0.068, 0.004)),
        Cell("lr.5-beta1", "grow.lr=x0.5 grow.beta_w2=x1",
             (1.98, 1.87, 1.11), (0.69, 0.70, 0.74), (0.362, 0.035)),
        Cell("lr2.5-beta4", "grow.lr=x2.5 grow.beta_w2=x4",
             (2.14, 2.03, 1.13), (0.67, 0.68, 0.73), (0.251, 0.017)),
        Cell("lr5-beta4", "grow.lr=x5 grow.beta_w2=x4",
             (2.30, 2.00, 1.05), (0.67, 0.68, 0.73), (0.231, 0.018))]),
    "5": ("rewards", [
        Cell("wer", "rewards.weights.wer=1 rewards.weights.sim=0",
             (1.958, 1.646, 1.087), (0.649, 0.663, 0.720), (0.452, 0.001)),
        Cell("sim", "rewards.weights.wer=0 rewards.weights.sim=1",
             (2.291, 1.963, 1.047), (0.704, 0.706, 0.747), (0.249, 0.043)),
        Cell("wer+sim", "rewards.weights.wer=1 rewards.weights.sim=1", *GROW)]),
    # not the paper's: what it leaves open of its baseline, one setting changed at a time
    "grpo": ("settings of GRPO, on the tune split", [
        Cell(name, f"method=grpo sample.nfe=10 evaluate.split=tune {words}") for name, words in (
            ("lr3e-5", "grpo.lr=3e-5 grpo.same_noise=false"),
            ("lr1e-4", "grpo.lr=1e-4 grpo.same_noise=false"),
            ("lr3e-4", "grpo.lr=3e-4 grpo.same_noise=false"),
            ("same", "grpo.lr=3e-5"), ("start3", "grpo.lr=3e-5 grpo.window_start=3"),
            ("shift2", "grpo.lr=3e-5 grpo.shift_every=2"),
            ("shift2-lr1e-4", "grpo.lr=1e-4 grpo.shift_every=2"),
            ("eta.4", "grpo.lr=3e-5 grpo.eta=0.4"), ("kl.1", "grpo.lr=3e-5 grpo.kl=0.1"))]),
}
EXPS = [cell.name for cell in TABLES["2"][1] if cell.name.startswith("exp-")]
CLAIMS = {          # table -> what the paper says, metrics, A, relation, B
    "1": [("GROW improves both", "wer sim", "grow-nfe10", "better", "pretrained"),
          ("GRPO improves both", "wer sim", "grpo-nfe10", "better", "pretrained"),
          *((f"GROW improves more than GRPO at NFE {n}", "wer sim", f"grow-nfe{n}", "better",
             f"grpo-nfe{n}{shift}") for n, shift in ((32, ""), (32, "-shift2"), (10, ""), (5, ""))),
          ("NFE 10 costs GROW next to nothing", "wer sim", "grow-nfe32", "no better", "grow-nfe10"),
          ("NFE 5 costs GROW little", "wer sim", "grow-nfe32", "no better", "grow-nfe5"),
          ("NFE 10 costs GRPO nothing", "wer sim", "grpo-nfe32", "no better", "grpo-nfe10"),
          ("at NFE 5 GRPO falls clearly", "wer sim", "grpo-nfe10", "better", "grpo-nfe5")],
    "2": [*(("A/σ is far more effective", "wer sim", "signed", "better", e) for e in EXPS),
          *(("exponential weights lower WER somewhat", "wer", e, "better", "pretrained")
            for e in EXPS),
          *(("no tau lifts SIM", "sim", e, "no better", "pretrained") for e in EXPS)],
    "3": [("v_c is better than v_g", "wer sim", "g1.5-vc", "better", "g1.5-vg"),
          ("v_g is nearly ineffective", "wer sim", "g1.5-vg", "no better", "pretrained"),
          ("γ=0 lowers WER as much", "wer", "g1.5-vc", "no better", "g0-vc"),
          ("γ=1.5 raises SIM more", "sim", "g1.5-vc", "better", "g0-vc")],
    "4": [("without anchor SIM does not rise", "sim", "lr1-beta0", "no better", "pretrained"),
          *((f"the light anchor is better than beta x{n}", "wer sim", "lr1-beta1", "better",
             f"lr1-beta{n}") for n in (0, 2, 4, 40)),
          ("beta x40 pins the policy", "wer sim", "lr1-beta40", "no better", "pretrained"),
          ("half the lr gains less", "wer sim", "lr1-beta1", "better", "lr.5-beta1"),
          ("at beta x4, lr x2.5 lowers WER less", "wer", "lr1-beta4", "better", "lr2.5-beta4"),
          ("at beta x4, lr x5 still less", "wer", "lr2.5-beta4", "better", "lr5-beta4"),
          *((f"{cell}, too, lowers WER", "wer", cell, "better", "pretrained")
            for cell in ("lr1-beta0", "lr.5-beta1", "lr2.5-beta4", "lr5-beta4"))],
    "5": [("WER alone lowers WER", "wer", "wer", "better", "pretrained"),
          ("WER alone leaves SIM as it is", "sim", "wer", "no better", "pretrained"),
          ("SIM alone raises SIM", "sim", "sim", "better", "pretrained"),
          ("SIM alone lowers WER too", "wer", "sim", "better", "pretrained"),
          ("SIM alone lowers WER less than WER alone", "wer", "wer", "better", "sim"),
          ("both together: WER as by WER alone", "wer", "wer", "no better", "wer+sim"),
          ("both together: SIM nearly as by SIM alone", "sim", "sim", "no better", "wer+sim")],
    "grpo": [],
}
# GRPO gets GROW's budget and optimiser; its own settings stand in the config's grpo section.
SHARED = ("steps", "prompts_per_step", "group_size", "warmup", "lr_decay", "betas", "weight_decay",
          "grad_clip", "ema", "redraws")
# For the estimate before a first run is done, toy.yaml's README figures: seconds of 128 rollouts.
MACHINE = "on two cores of a server CPU"
SEC_NFE, SEC_JUDGE, SEC_UPDATE = 0.63, 0.94, {"grow": 3.6, "grpo": 3.2}
SEC_PROMPT = 0.18                                           # a prompt and system at NFE 32


# ---------------------------------------------------------------- cells -> runs

class Job(NamedTuple):
    """One cell with one seed."""
    cell: Cell
    seed: int
    words: list                     # of train.py, but for stages
    config: Config                  # of the grow stage
    evaluation: Config              # of the evaluate stage: with the config file's own guidance

    @property
    def dir(self):
        return Path(self.config.out_dir)


def cell_words(cell, base):
    """A cell's overrides with its factors multiplied out; GRPO's with GROW's budget."""
    words = []
    for word in cell.words.split():
        key, value = word.split("=")
        if value.startswith("x"):
            now = functools.reduce(getattr, key.split("."), base)
            word = f"{key}={now * float(value[1:]):.6g}"
        words.append(word)
    if "method=grpo" in words:
        words += [f"grpo.{name}={json.dumps(getattr(base.grow, name))}" for name in SHARED]
    return words


def make_jobs(name, path, overrides, seeds, out):
    """All jobs of a table, seed by seed, so that a whole table is there early."""
    overrides = [*overrides, "method=grow"]
    base, jobs = load_config(path, overrides), []
    for seed in range(seeds):
        for cell in TABLES[name][1]:
            words = overrides + cell_words(cell, base)
            place = "default" if load_config(path, words) == base else f"{name}/{cell.name}"
            words += [f"seed={seed}", f"out_dir={Path(out) / place / f'seed-{seed}'}"]
            jobs.append(Job(
                cell, seed, words, load_config(path, [*words, "stages=grow"]),
                load_config(path, [*words, f"sample.cfg_scale={base.sample.cfg_scale}",
                                   "stages=evaluate"])))
    return jobs


def evaluation_mark(job):
    """What a job's records depend on."""
    return {"evaluate": json.loads(json.dumps(asdict(job.evaluation.evaluate))),
            "cfg_scale": job.evaluation.sample.cfg_scale,
            "grow": Run(job.config, "").digest("grow")}


def finished(job):
    """Seconds that a finished job took, or None. Raises ValueError if it is of another config."""
    mark = job.dir / "evaluated.json"
    if not (job.dir / "grow.safetensors").exists() or not Run(job.config, "").done("grow"):
        return None
    there = json.loads(mark.read_text()) if mark.exists() else {}
    seconds = there.pop("seconds", None)
    return seconds if there == evaluation_mark(job) else None


def run_job(job, path):
    """Both stages, in this process: Ctrl-C and SIGTERM end it as they end train.py."""
    train.main(["--config", path, *job.words, "stages=grow"])
    started = time.time()
    train.main(["--config", path, *job.words, "stages=evaluate",
                f"sample.cfg_scale={job.evaluation.sample.cfg_scale}"])
    seconds = load_meta(job.dir / "grow.safetensors")["seconds"] + time.time() - started
    write_text(job.dir / "evaluated.json", json.dumps(evaluation_mark(job) | {"seconds": seconds}))
    return seconds


def estimate(jobs):
    """Seconds by the figures above."""
    total = 0.0
    for job in jobs:
        c, rl, e = job.config, job.config.rl, job.evaluation.evaluate
        step = (SEC_NFE * c.sample.nfe * (1 if c.sample.cfg_scale else 0.5) + SEC_JUDGE
                + SEC_UPDATE[c.method] * (1.5 if c.grow.velocity == "guided" else 1))
        total += rl.steps * step * rl.prompts_per_step * rl.group_size / 128
        total += 2 * e.n * SEC_PROMPT * e.nfe / 32
    return total


def clock(seconds):
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def run_jobs(jobs, path, after_seed):
    """Runs what is not finished; after_seed(seed) follows each seed's last. Returns failed jobs."""
    todo = [job for job in jobs if not finished(job)]
    started, factors, failed = time.time(), [], []
    print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are there; the rest: about "
          f"{clock(estimate(todo))} {MACHINE}", flush=True)
    for k, job in enumerate(todo):
        print(f"\n--- {job.cell.name} seed {job.seed}: {job.dir}", flush=True)
        try:
            seconds = run_job(job, path)
        except RuntimeError:                        # it diverged, say; the other cells still count
            traceback.print_exc()
            failed.append(job)
        else:
            factors.append(seconds / estimate([job]))
            rest = statistics.mean(factors) * estimate(todo[k + 1:])
            print(f"[{k + 1}/{len(todo)}] {clock(seconds)}; {clock(time.time() - started)} so far, "
                  f"about {clock(rest)} to go", flush=True)
        if job is todo[-1] or todo[k + 1].seed != job.seed:
            after_seed(job.seed)
    if not todo:
        after_seed(jobs[-1].seed)
    return failed


# ---------------------------------------------------------------- gains and verdicts

def mean(metric, records):
    return float(np.mean([[r[metric] for r in run] for run in records]))


def gain(metric, runs, a, b="pretrained"):
    """By how much cell A is better than B: (mean, low, high), positive is less WER or more SIM.
    runs: cell -> [(records before, records after), a pair per seed]; b: a cell or "pretrained".
    None where one is missing, or was not judged so."""
    if a not in runs or b not in (*runs, "pretrained") or metric not in runs[a][0][1][0]:
        return None
    other = [before for before, _ in runs[a]] if b == "pretrained" else [r for _, r in runs[b]]
    c = compare(other, [after for _, after in runs[a]], metric)
    if METRICS[metric][2] == "down":
        return 0.0 - c["diff"], 0.0 - c["high"], 0.0 - c["low"]
    return c["diff"], c["low"], c["high"]


def verdict(found, relation, margin=0.0):
    """found: (mean, low, high) of A's gain over B; margin: a gain that counts as none."""
    if found is None:
        return "not run"
    _, low, high = found
    if relation == "better":
        return "reproduced" if low > 0 else "contradicted" if high < 0 else "not separable"
    return "reproduced" if high <= margin else "contradicted" if low > 0 else "not separable"


def judge_claims(name, runs):
    """Rows (text, metric, A, relation, B, gain, verdict, the held-out judge's verdict)."""
    rows, default = [], next((c.name for c in TABLES[name][1] if c.wer == GROW[0]), None)
    gain_of_default = functools.cache(lambda judge: gain(judge, runs, default))
    for text, metrics, a, relation, b in CLAIMS[name]:
        for metric in metrics.split():
            founds, verdicts = [], []
            for judge in (metric, f"{metric}_held"):
                found, whole = gain(judge, runs, a, b), gain_of_default(judge)
                if relation == "no better" and whole is None:       # nothing gives the margin
                    found = None
                founds.append(found)
                verdicts.append(verdict(found, relation, max(0, whole[0]) / 2 if whole else 0))
            rows.append((text, metric, a, relation, b, founds[0], *verdicts))
    return rows


# ---------------------------------------------------------------- what is written

def gain_text(metric, found, before=0.0):
    """WER in percentage points, and in % of `before` if given."""
    if found is None:
        return ""
    factor, digits = (1, 3) if metric.startswith("sim") else (100, 2)
    mid, low, high = (f"{factor * x:+.{digits}f}" for x in found)
    return mid + (f" ({100 * found[0] / before:+.0f} %)" if before else "") + f" [{low}, {high}]"


def markdown(heads, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |"
                     for row in (heads, ["---"] * len(heads), *rows))


def table_text(name, runs, speed):
    """Ours beside the paper's, and the claims. speed: cell -> seconds per step, or {}."""
    title, cells = TABLES[name]
    paper, wer_0, sim_0 = name != "grpo", *map(statistics.mean, PRETRAINED[2:4])
    heads = ["", "WER %", "gain, reward judge", "gain, held-out judge", "SIM", "gain, reward judge",
             "gain, held-out judge", "severe %", *["paper: WER gain", "SIM gain"] * paper,
             *["speed-up", "paper"] * (name == "1")]

    def scores(label, records, cell=None):
        row = [label]
        for metric, form in (("wer", "{:.2f}"), ("sim", "{:.3f}")):
            row.append(form.format(mean(metric, records) * METRICS[metric][1]))
            for judge in (metric, f"{metric}_held"):
                found = cell and gain(judge, runs, cell)
                before = mean("wer", [b for b, _ in runs[cell]]) if found and judge == "wer" else 0
                row.append(gain_text(judge, found, before))
        return row + [f"{100 * mean('severe', records):.1f}"]
    rows = []
    if runs:
        rows = [scores("pretrained", [before for before, _ in next(iter(runs.values()))])
                + [f"of {wer_0:.3f}", f"of {sim_0:.3f}"] * paper + ["", ""] * (name == "1")]
    for cell in cells:
        row = [cell.name, "not run", *[""] * 6]
        if cell.name in runs:
            row = scores(cell.name, [after for _, after in runs[cell.name]], cell.name)
        if paper:
            wer, sim = cell.gain
            row += [f"{wer:+.3f} ({100 * wer / wer_0:+.0f} %)", f"{sim:+.3f}"]
        if cell.speed_up:
            ours = f"{speed['grpo-nfe32'] / speed[cell.name]:.1f}x" if speed else "tables.py speed"
            row += [ours, f"{cell.speed_up:.1f}x"]
        elif name == "1":                               # takes grpo-nfe32's time
            row += ["", ""]
        rows.append(row)
    text = f"## {'Table ' * name.isdigit()}{name}: {title}\n\n{markdown(heads, rows)}\n"
    if claims := judge_claims(name, runs):
        counts = ", ".join(f"{sum(row[6] == v for row in claims)} {v}" for v in (
            "reproduced", "not separable", "contradicted", "not run"))
        text += f"\nThe paper's claims, by the reward judge: {counts}.\n\n" + markdown(
            ("claim", "", "gain of the first", "verdict", "held-out judge"),
            [(claim, f"{metric.upper()}: {a} {relation} than {b}", gain_text(metric, found), *two)
             for claim, metric, a, relation, b, found, *two in claims]) + "\n"
    return text


def figure(path, name, runs):
    """Gains over the pretrained model with intervals, by both judges, and the paper's."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator
    cells = [cell for cell in TABLES[name][1] if cell.name in runs]
    fig, axes = plt.subplots(1, 2, figsize=(11, 1.6 + 0.45 * len(cells)), sharey=True)
    for k, (ax, metric) in enumerate(zip(axes, ("wer", "sim"))):
        def mark(y, value, low, high, style, color):
            ax.errorbar(value, y, xerr=[[value - low], [high - value]], fmt=style, color=color)
        for y, cell in enumerate(cells):
            for j, judge in enumerate((metric, f"{metric}_held")):
                if found := gain(judge, runs, cell.name):
                    before = mean(judge, [b for b, _ in runs[cell.name]])
                    scale = 100 / max(before, 1e-9) if metric == "wer" else 1
                    mark(y + 0.2 * j, *(scale * x for x in found), "os"[j], f"C{j}")
            if cell.gain:
                whole = statistics.mean(PRETRAINED.wer)
                value = 100 * cell.gain[0] / whole if metric == "wer" else cell.gain[1]
                mark(y + 0.1, value, value, value, "x", "k")
        unit = (100, 0.1)[k]        # log beyond half of it: cells that collapsed leave others room
        ax.set_xscale("symlog", linthresh=unit / 2, linscale=3)
        ax.xaxis.set_major_locator(FixedLocator(
            [unit * x for x in (-10, -2, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.5)]))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter("{x:g}")
        ax.axvline(0, color="gray", lw=0.8)
        ax.set_xlabel(("WER saved, % of the pretrained (log beyond 50)",
                       "SIM gained (log beyond 0.05)")[k])
    axes[0].set_yticks(range(len(cells)), [cell.name for cell in cells])
    axes[0].invert_yaxis()
    fig.suptitle(f"{TABLES[name][0]}: ● reward judge, ■ held-out judge, × paper", fontsize=11)
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def report(name, jobs, out, note):
    """Writes and prints the table and its figure, of the cells of which all `jobs` are there."""
    runs, seconds = {}, 0.0
    for cell in TABLES[name][1]:
        mine = [job for job in jobs if job.cell is cell]
        took = [finished(job) for job in mine]
        if all(took):
            seconds += sum(took)
            runs[cell.name] = [tuple(read_records(job.dir / f"eval_{part}.jsonl")
                                     for part in ("before", "after")) for job in mine]
    there, folder = Path(out) / "speed.json", Path(out) / name
    folder.mkdir(parents=True, exist_ok=True)
    text = table_text(name, runs, json.loads(there.read_text()) if there.exists() else {})
    if runs:
        prompts = len(next(iter(runs.values()))[0][0])
        text += (f"\n`{note}`: seeds 0 to {jobs[-1].seed}, {prompts} prompts, {clock(seconds)} in "
                 "all. Gains are over the pretrained model, with paired 95 % intervals.\n")
        figure(folder / "figure.png", name, runs)
    write_text(folder / "table.md", text)
    print(f"\n{text}\n{folder}/table.md and figure.png", flush=True)


# ---------------------------------------------------------------- speed

def time_steps(path, overrides, out, rounds):
    """Table 1's speed-up: a step of each method and NFE in turn, in one process, on the same
    prompts, all at the pretrained weights; AdamW's own step is left out. Medians over rounds."""
    overrides = [*overrides, f"out_dir={Path(out) / 'speed'}"]
    runs = {job.cell: Run(load_config(path, [*job.words, *overrides, "stages=grow"]), "")
            for job in make_jobs("1", path, overrides, 1, out) if job.cell.speed_up}
    world = make_world(next(iter(runs.values())))
    world.check(("grow",))
    trainers = {cell: train.GrowTrainer(run, world) for cell, run in runs.items()}
    logs = {cell: [] for cell in trainers}
    for step in range(rounds + 1):
        for cell, trainer in trainers.items():
            started = time.perf_counter()
            log = trainer.gradients(step)
            trainer.policy.zero_grad()
            logs[cell].append((time.perf_counter() - started, log["sec_rollout"],
                               log.get("sec_update", 0.0)))
            print(f"round {step} of {rounds}: {cell.name} {logs[cell][-1][0]:.2f} s"
                  + (" (warm-up, dropped)" if step == 0 else ""), flush=True)
    median = {cell: [statistics.median(column) for column in zip(*rows[1:])]
              for cell, rows in logs.items()}
    slowest = next(iter(median.values()))[0]                        # GRPO at NFE 32
    text = markdown(("", "s/step", "rollout", "update", "speed-up", "paper"), [
        (cell.name, *(f"{s:.2f}" for s in seconds), f"{slowest / seconds[0]:.1f}x",
         f"{cell.speed_up:.1f}x") for cell, seconds in median.items()])
    write_text(Path(out) / "speed.json", json.dumps({c.name: s[0] for c, s in median.items()}))
    write_text(Path(out) / "speed.md", text + "\n")
    print(f"\n{text}\n\nmedians of {rounds} rounds; {Path(out) / 'speed.md'}", flush=True)


# ---------------------------------------------------------------- command line

def check(config, overrides, args):
    """Refuses what no table could use, before any slow step."""
    for name in ("seeds", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}; wanted 1 or more")
    for word in overrides:
        key = word.split("=")[0]
        if key in ("method", "seed", "stages", "out_dir"):
            raise ValueError(f"{word}: each cell has its own {key}; use --seeds, --only or --out")
    if args.plan and args.table == "speed":
        raise ValueError("speed has no cells to plan; it takes a step of Table 1's cells "
                         "per round, --rounds of them")
    if config.evaluate.lists:
        raise ValueError("evaluate.lists: tables compare on the held-out split; leave it empty")
    check_device(config.device)
    for stage in ("vae", "judges", "pretrain") if config.world == "toy" else ("pretrain",):
        path = Path(config.weights_dir) / f"{stage}.safetensors"
        if not config.weights_dir or not path.exists():
            raise ValueError(f"no {stage}.safetensors in weights_dir={config.weights_dir!r}; all "
                             "cells start from one pretrained model: name the folder that holds "
                             "it, or make it with train.py stages=all")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("table", help=f"{', '.join(TABLES)}, or speed")
    parser.add_argument("--config", default="toy.yaml")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell")
    parser.add_argument("--only", nargs="+", default=[], metavar="CELL", help="run these cells")
    parser.add_argument("--out", default="out/tables")
    parser.add_argument("--plan", action="store_true", help="print cells and hours, and exit")
    parser.add_argument("--rounds", type=int, default=5, help="of speed")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    args = parser.parse_intermixed_args(words)
    overrides = args.overrides + [word for word in args.only if "=" in word]
    only = [word for word in args.only if "=" not in word]
    if args.table not in (*TABLES, "speed"):
        raise ValueError(f"unknown table {args.table!r}; known are {', '.join(TABLES)} and speed")
    config = load_config(args.config, overrides)
    check(config, overrides, args)
    if args.table == "speed":
        return time_steps(args.config, overrides, args.out, args.rounds)
    known = [cell.name for cell in TABLES[args.table][1]]
    if unknown := sorted(set(only) - set(known)):
        raise ValueError(f"table {args.table} has no cell {', '.join(unknown)}; it has "
                         f"{', '.join(known)}")
    jobs = make_jobs(args.table, args.config, overrides, args.seeds, args.out)
    wanted = [job for job in jobs if not only or job.cell.name in only]
    for job in wanted:
        c = job.config
        if c.method == "grpo" and c.grpo.lr == GrpoConfig.lr and c.grow.lr != GrowConfig.lr:
            raise ValueError(
                f"grpo.lr={c.grpo.lr:g} is the full model's, and grow.lr={c.grow.lr:g} is not: the "
                f"baseline would stand still; set grpo.lr in {args.config} (python tables.py grpo "
                "compares some)")
    if args.plan:
        for job in wanted:
            if job.seed == 0:
                print(f"{job.cell.name:12} {clock(estimate([job])):>8}  {job.dir.parent}  "
                      + " ".join(cell_words(job.cell, config)))
        print(f"with {args.seeds} seeds {len(wanted)} runs, about {clock(estimate(wanted))} "
              f"{MACHINE} if none is there yet")
        return None
    for job in jobs:
        finished(job)                               # refuses results of another config now
    note = "python tables.py " + " ".join(sys.argv[1:] if words is None else words)
    failed = run_jobs(wanted, args.config, lambda last: report(
        args.table, [job for job in jobs if job.seed <= last], args.out, note))
    if failed:
        raise ValueError("these runs failed, see above: " + ", ".join(
            f"{job.cell.name} seed {job.seed}" for job in failed) + "; the same command tries them "
            "again, and --only leaves them out")
    return None


if __name__ == "__main__":
    train.keep_freed_memory()
    try:
        run_main(main)
    except KeyboardInterrupt:
        sys.exit("stopped by SIGINT; the same command continues from there")
