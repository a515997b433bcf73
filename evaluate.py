"""Evaluation on held-out prompts: per-utterance scores, paired intervals, table, figure.

    python evaluate.py --ckpt out/toy                            its own table again, from its files
    python evaluate.py --ckpt out/a out/b out/c                  the same over several seeds' runs
    python evaluate.py --ckpt A --baseline B                     run A against run B, after RL
    python evaluate.py --ckpt out/toy --whisper FOLDER --limit 200   an independent recogniser; also
                                                                 of several runs together
    python evaluate.py --ckpt out/full --lists seedtts-en=en/meta.lst     public test sets, and
    python evaluate.py --wavs DIR --lists ... --asr FOLDER --speaker FILE    any system's wavs on
                                                                     them: see testsets.py

Paper: "Evaluation Metrics". Every number is a mean over utterances; differences are paired (same
prompt, same noise) and carry a 95 % bootstrap interval over prompts and, if several, over runs.
The summary is always recomputed from the per-utterance files.
"""

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import soundfile

import rewards as reward_module
from audio import SAMPLE_RATE
from checks import at_least, run_main
from judges import Whisper
from rewards import is_bad, wer
from sample import decode_wavs, generate

METRICS = {                     # name -> heading, factor, better
    "wer": ("WER % (reward judge)", 100, "down"),
    "wer_held": ("WER % (held-out judge)", 100, "down"),
    "wer_whisper": ("WER % (Whisper)", 100, "down"),
    "wer_whisper_capped": ("the same, an utterance at most 100", 100, "down"),
    "sim": ("SIM (reward judge)", 1, "up"),
    "sim_held": ("SIM (held-out judge)", 1, "up"),
    "severe": ("severe failures %", 100, "down"),
    "seconds": ("seconds of speech", 1, ""),
}


@dataclass(frozen=True)
class EvalConfig:
    split: str = "eval"         # or "tune": for choosing hyper-parameters, never reported
    n: int = 512                # held-out prompts, at most what the split has
    nfe: int = 32               # the paper evaluates at 32 whatever the rollouts used
    batch: int = 128
    seed: int = 0               # of the noise, the same before and after
    keep_wavs: int = 6          # pairs of wav files to listen to
    lists: dict = field(default_factory=dict)   # public test sets instead (testsets.py): name ->
    #                                             list file
    librispeech_root: str = ""  # LibriSpeech's test-clean folder, for the list librispeech-pc

    def __post_init__(self):
        at_least("evaluate", self, n=1, nfe=1, batch=1, keep_wavs=0)
        if self.split not in ("eval", "tune"):
            raise ValueError(f"evaluate.split={self.split!r}; wanted eval or tune")


# ---------------------------------------------------------------- scoring

def speak(model, vae, prompts, c, sample, seeds=None):
    """One utterance per prompt with fixed noise: list of wavs, list of Utterances.
    seeds: of each prompt's noise; None makes them from c.seed and the prompt's number."""
    wavs, utterances = [], []
    if seeds is None:
        seeds = [c.seed * 1_000_003 + i for i in range(len(prompts))]
    for i in range(0, len(prompts), c.batch):
        part = prompts[i:i + c.batch]
        out = generate(model, [p.token_ids for p in part], [p.latents for p in part],
                       [sample.cap(p.n_target) for p in part], seeds[i:i + c.batch],
                       nfe=c.nfe, cfg_scale=sample.cfg_scale, sway=sample.sway)
        utterances += out
        wavs += decode_wavs(vae, [p.latents for p in part], out)
    return wavs, utterances


def score(wavs, stopped, prompts, judges, whisper=None):
    """Per-utterance records. judges: name -> judge; "asr*" transcribe, "speaker*" embed.
    A bad wav (empty, silent, ...) scores WER 1 and SIM 0, like a rollout, and is a severe failure;
    so is a cap hit. No WER is clipped; Whisper's stands there capped beside it."""
    bad = [is_bad(w) for w in wavs]
    good = [i for i, b in enumerate(bad) if not b]
    records = [{"utt": i, "ref": p.text, "bad": bad[i], "stopped": bool(stopped[i]),
                "severe": float(bad[i] or not stopped[i]), "seconds": len(wavs[i]) / SAMPLE_RATE}
               for i, p in enumerate(prompts)]
    named = dict(judges) | ({"asr_whisper": whisper} if whisper else {})
    with reward_module.rng_untouched():
        for name, judge in named.items():
            kind, _, suffix = name.partition("_")
            suffix = f"_{suffix}" if suffix else ""
            audio = [wavs[i] for i in good]
            if kind == "asr":
                for record in records:
                    record |= {f"hyp{suffix}": "", f"wer{suffix}": 1.0}
                for i, hyp in zip(good, judge.transcribe(audio) if good else []):
                    records[i] |= {f"hyp{suffix}": hyp, f"wer{suffix}": wer(prompts[i].text, hyp)}
            else:
                for record in records:
                    record[f"sim{suffix}"] = 0.0
                if not good:
                    continue
                a = judge.embed(audio)
                b = judge.embed([prompts[i].wav for i in good])
                for i, value in zip(good, (a * b).sum(dim=1).tolist()):
                    records[i][f"sim{suffix}"] = value
    if whisper:                     # a clip on which Whisper loops must not decide a mean alone
        for record in records:
            record["wer_whisper_capped"] = min(1.0, record["wer_whisper"])
    return records


def write_records(path, records):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records),
                    encoding="utf-8")


def read_records(path):
    if not Path(path).exists():
        raise ValueError(f"no {path}; run the evaluate stage of that run first "
                         "(python train.py --config ... stages=evaluate)")
    records = []
    with open(path, encoding="utf-8") as file:          # splitlines would also split in a text
        for number, line in enumerate(file, 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path} line {number} is no json ({error}); was it cut off? "
                                 "evaluate that run again") from error
    return records


# ---------------------------------------------------------------- statistics

def bootstrap_means(differences, samples=4_000, seed=0):
    """Means of resampled paired differences (runs, prompts), both resampled: (samples,)."""
    d = np.atleast_2d(np.asarray(differences, dtype=np.float64))
    rng = np.random.default_rng(seed)
    means = np.empty(samples)
    for k in range(samples):
        rows = rng.integers(0, d.shape[0], d.shape[0])
        columns = rng.integers(0, d.shape[1], d.shape[1])
        means[k] = d[np.ix_(rows, columns)].mean()
    return means


def interval(means):
    """The middle 95 % of bootstrap_means."""
    return np.quantile(means, 0.025), np.quantile(means, 0.975)


def bootstrap(differences, samples=4_000, seed=0):
    """95 % interval of the mean of paired differences (runs, prompts): both are resampled."""
    return interval(bootstrap_means(differences, samples, seed))


def compare(before, after, metric):
    """before, after: lists of runs, each a list of records over the same prompts."""
    for run in (*before, *after):
        if [r["ref"] for r in run] != [r["ref"] for r in before[0]]:
            raise ValueError("the systems were evaluated on different prompts; evaluate all of "
                             "them with the same evaluate section and corpus")
    b = np.array([[r[metric] for r in run] for run in before])
    a = np.array([[r[metric] for r in run] for run in after])
    low, high = bootstrap(a - b)
    return {"before": b.mean(), "after": a.mean(), "diff": (a - b).mean(), "low": low,
            "high": high}


def table(before, after, real=None, labels=("before", "after")):
    """Markdown table over runs; `real` are the records of natural speech, the judges' own bound."""
    n = f"{len(before)} run(s) x {len(before[0])} prompts"
    lines = [f"| {n} | {labels[0]} | {labels[1]} | difference | 95 % interval | real speech |",
             "|---|---|---|---|---|---|"]
    for metric, (heading, factor, better) in METRICS.items():
        if metric not in before[0][0] or metric not in after[0][0]:
            continue
        c = {k: v * factor for k, v in compare(before, after, metric).items()}
        natural = ""
        if real and metric in real[0] and metric != "severe":
            natural = f"{factor * np.mean([r[metric] for r in real]):.3f}"
        sure = ""
        if better and c["low"] * c["high"] > 0:
            sure = " better" if (c["diff"] < 0) == (better == "down") else " worse"
        lines.append(f"| {heading} | {c['before']:.3f} | {c['after']:.3f} | {c['diff']:+.3f} | "
                     f"[{c['low']:+.3f}, {c['high']:+.3f}]{sure} | {natural} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- figure

def smooth(values, width=9):
    values = np.asarray(values, dtype=float)
    width = min(width, len(values))
    kernel = np.ones(width) / width
    return np.convolve(np.pad(values, (width // 2, width - 1 - width // 2), "edge"), kernel,
                       "valid")


def figure(path, log, pairs):
    """Curves of a run's log (list of dicts) above spectrograms: pairs of (title, wav before, wav
    after)."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig = plt.figure(figsize=(12, 3 + 2.1 * 2))
    grid = fig.add_gridspec(3, 12, height_ratios=(1.25, 1, 1), hspace=0.55, wspace=4)
    step = [r["step"] for r in log]
    panels = (("rewards of the rollouts", (("wer", "1 - WER"), ("sim", "SIM"))),
              ("spread within a group", (("wer_spread", "1 - WER"), ("sim_spread", "SIM"))),
              ("anchor  ‖v - v_ref‖²", (("anchor", None),)))
    for k, (title, series) in enumerate(panels):
        ax = fig.add_subplot(grid[0, 4 * k:4 * k + 4])
        series = [(name, label) for name, label in series if name in log[0]]
        for j, (name, label) in enumerate(series):
            values = [r[name] for r in log]
            ax.plot(step, values, alpha=0.25, color=f"C{j}")
            ax.plot(step, smooth(values), color=f"C{j}", label=label)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("step", fontsize=8)
        ax.tick_params(labelsize=8)
        if series and series[0][1]:
            ax.legend(fontsize=8)
    width = 12 // max(1, len(pairs))
    for k, (title, *both) in enumerate(pairs):
        for row, (label, wav) in enumerate(zip(("before", "after"), both), start=1):
            ax = fig.add_subplot(grid[row, width * k:width * (k + 1)])
            ax.specgram(np.asarray(wav) + 1e-6 * np.sin(np.arange(len(wav))), NFFT=512,
                        noverlap=384, Fs=SAMPLE_RATE, vmin=-120, vmax=-30, cmap="magma")
            ax.set_ylim(0, 5_000)
            ax.tick_params(labelsize=7)
            ax.set_title(f"{label}: {title}" if row == 1 else label, fontsize=8)
    fig.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(fig)


def write_report(out_dir, wavs_before, wavs_after, prompts, real, before, after, keep):
    """Records, table, figure and wav files of one run, all under out_dir."""
    out_dir = Path(out_dir)
    for name, records in (("real", real), ("before", before), ("after", after)):
        write_records(out_dir / f"eval_{name}.jsonl", records)
    text = table([before], [after], real)
    (out_dir / "table.md").write_text(text + "\n")
    folder = out_dir / "wavs"
    folder.mkdir(exist_ok=True)
    # those that changed most come first: the ones worth hearing
    order = sorted(range(len(before)), key=lambda i: -abs(before[i]["wer"] - after[i]["wer"]))
    order = [i for i in order if not (before[i]["bad"] or after[i]["bad"])][:keep]
    for i in order:
        for name, wav in (("prompt", prompts[i].wav), ("before", wavs_before[i]),
                          ("after", wavs_after[i])):
            soundfile.write(folder / f"{i:04d}_{name}.wav", wav.numpy(), SAMPLE_RATE)
    path = out_dir / "log.jsonl"
    log = [r for r in map(json.loads, path.read_text().splitlines())
           if r["stage"] == "grow" and "patches" in r] if path.exists() else []
    if log:
        figure(out_dir / "figure.png", log,
               [(before[i]["ref"], wavs_before[i].numpy(), wavs_after[i].numpy())
                for i in order[:3]])
    return text


# ---------------------------------------------------------------- command line

def evaluate_lists(args):
    """--lists: the public test sets (testsets.py), spoken by runs or given as --wavs."""
    import testsets
    for word in args.lists:
        if "=" not in word:
            raise ValueError(f"--lists {word!r} is not of the form NAME=FILE, e.g. "
                             "seedtts-en=seedtts_testset/en/meta.lst")
    lists = dict(word.split("=", 1) for word in args.lists)
    if len(lists) < len(args.lists):
        raise ValueError(f"--lists names a test set twice: {args.lists}")
    judges = {name: value for name in ("asr", "zh_asr", "speaker", "utmos")
              if (value := getattr(args, name))}
    if args.wavs:
        return testsets.score_wavs(args.wavs, lists, judges, args.librispeech_root, args.limit)
    from train import open_run
    from worlds import make_world
    for folder in args.ckpt:
        run = open_run(folder)
        c = run.config
        root = args.librispeech_root or c.evaluate.librispeech_root
        run.config = replace(c, rewards=replace(c.rewards, **judges), evaluate=replace(
            c.evaluate, lists=lists, librispeech_root=root))
        testsets.run_lists(run, make_world(run), args.limit)


def evaluate_anew(folders, whisper, limit):
    """Speak and score the first `limit` held-out prompts again, with Whisper as a further judge.
    Returns three lists over the runs: records before RL, after it, and of real speech. They are
    written to each folder; what several runs share, their start and real speech, is done once."""
    from train import load_ditar, open_run
    from worlds import make_world
    runs, done, rows = [open_run(folder) for folder in folders], {}, []
    for run in runs:
        run.find("grow")                        # an unfinished run is refused before any slow step
    for run in runs:
        c, row = run.config, []
        world, judge = make_world(run), Whisper(whisper, run.device, c.rewards.lang)
        prompts, real = world.held_out(limit, c.evaluate.split)
        for stage, name in (("pretrain", "before"), ("grow", "after"), ("", "real")):
            key = json.dumps([stage and run.digest(stage), run.digest("vae"), run.digest("judges"),
                              asdict(c.evaluate), asdict(c.sample), asdict(c.rewards)])
            if key not in done:
                wavs, stopped = real, [True] * len(real)
                if stage:
                    wavs, spoken = speak(run.fast(load_ditar(run, stage)), world.vae, prompts,
                                         c.evaluate, c.sample)
                    stopped = [u.stopped for u in spoken]
                done[key] = score(wavs, stopped, prompts, world.judges, judge)
            row.append(done[key])
            write_records(run.dir / f"whisper_{name}.jsonl", done[key])
        rows.append(row)
    return zip(*rows)


def require_one_evaluation(folders):
    """Raises ValueError for runs whose utterances are no pairs: other prompts, noise, steps,
    guidance or judges, by their last command's config."""
    first = None
    for folder in folders:
        path = Path(folder) / "config.json"
        if not path.exists():
            raise ValueError(f"no {path}; {folder} is no output folder of train.py")
        config = json.loads(path.read_text())
        ours = {f"{section}.{name}": config[section][name] for section, names in (
            ("evaluate", ("split", "nfe", "seed")), ("sample", ("cfg_scale", "sway")),
            ("rewards", ("asr", "speaker"))) for name in names}
        first = first or ours
        if wrong := [f"{name} {value!r}, not {first[name]!r}" for name, value in ours.items()
                     if value != first[name]]:
            raise ValueError(f"{folder} was evaluated in another way than {folders[0]} "
                             f"({', '.join(wrong)}); evaluate both alike: train.py "
                             "stages=evaluate, with the fields of one")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ckpt", nargs="+", help="output folder(s) of train.py")
    parser.add_argument("--baseline", nargs="+", help="other runs; default: the same before RL")
    parser.add_argument("--whisper", help="folder or hub id: speak and score anew with it")
    parser.add_argument("--lists", nargs="+", metavar="NAME=FILE", help="public test sets")
    parser.add_argument("--librispeech-root", default="", help="LibriSpeech's test-clean")
    parser.add_argument("--wavs", help="folder of any system's UTT.wav (or SET/UTT.wav) to score")
    for judge, what in (("asr", "a Whisper folder or hub id"),
                        ("zh-asr", "paraformer (the default), whisper, a folder or hub id"),
                        ("speaker", "wavlm_large_finetune.pth"),
                        ("utmos", "utmos22_strong_step7459_v1.pt")):
        parser.add_argument(f"--{judge}", help=f"for --lists: {what}")
    parser.add_argument("--limit", type=int, help="prompts for --whisper (200) or of each list")
    args = parser.parse_args(words)
    if not (args.ckpt or args.wavs) or (args.ckpt and args.wavs):
        raise ValueError("give either --ckpt, output folders of train.py, or --wavs with --lists")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit {args.limit}; wanted at least 1")
    if args.lists and not (args.baseline or args.whisper):
        return evaluate_lists(args)
    if args.lists or args.wavs or args.asr or args.zh_asr or args.speaker or args.utmos:
        raise ValueError("--wavs and the judges go with --lists; --baseline and --whisper do not")
    if args.baseline and args.whisper:
        raise ValueError("--whisper compares a run with its own start; without --baseline")
    if args.limit is not None and not args.whisper:
        raise ValueError("--limit goes with --whisper or --lists; the records of a run are whole")
    if args.whisper:
        require_one_evaluation(args.ckpt)
        before, after, real = evaluate_anew(args.ckpt, args.whisper, args.limit or 200)
        print(table(before, after, real[0]))
        return
    after = [read_records(Path(d) / "eval_after.jsonl") for d in args.ckpt]
    if args.baseline:
        before = [read_records(Path(d) / "eval_after.jsonl") for d in args.baseline]
        if len(before) != len(after):
            raise ValueError(f"{len(after)} runs in --ckpt, {len(before)} in --baseline; "
                             "give as many of each")
        labels = ("baseline", "ckpt")
    else:
        before = [read_records(Path(d) / "eval_before.jsonl") for d in args.ckpt]
        labels = ("before", "after")
    require_one_evaluation([*args.ckpt, *(args.baseline or ())])
    print(table(before, after, read_records(Path(args.ckpt[0]) / "eval_real.jsonl"), labels))


if __name__ == "__main__":
    run_main(main)
