"""Kills training runs and continues them, for test_interruption.py.

    python tests/lives.py FOLDER [TRIAL ...]        writes FOLDER/report.json

A life is a fork of this process, which has imported everything and computed nothing: it costs what
the stages cost, not the five seconds that Python and PyTorch take to begin.
"""
import json
import multiprocessing
import os
import random
import resource
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  by AdamW, slowly

import bench  # noqa: E402
import evaluate  # noqa: E402
import run as run_module  # noqa: E402
import toy  # noqa: E402
import train  # noqa: E402
from safetensors.torch import save  # noqa: E402

from run import Run, digest, readable  # noqa: E402
from worlds import ToyWorld  # noqa: E402

# Every stage in well under a second; a probe at each GROW step, so that there is a best one.
MICRO = (
    "corpus.pretrain=8 corpus.judge=6 corpus.rl=6 corpus.tune=2 corpus.eval=4 vae.steps=3 "
    "vae.batch=1 vae.dim=16 vae.dim_up=16 vae.layers=1 vae.latent_dim=4 model.latent_dim=4 "
    "model.lm.dim=32 model.lm.layers=1 model.lm.head_dim=16 model.lm.mlp_dim=32 "
    "model.encoder.dim=32 model.encoder.head_dim=16 model.encoder.mlp_dim=32 "
    "model.locdit.dim=32 model.locdit.layers=1 model.locdit.head_dim=16 model.locdit.mlp_dim=32 "
    "judges.asr_steps=2 judges.asr_batch=2 judges.speaker_steps=2 judges.speaker_batch=2 "
    "pretrain.steps=4 pretrain.pairs_per_step=2 grow.steps=4 grow.prompts_per_step=1 "
    "grow.group_size=2 grow.draws=1 sample.max_patches_extra=1 sample.max_patches_per_token=0.1 "
    "sample.nfe=1 evaluate.n=4 evaluate.nfe=1 guards.probe_every=1 guards.probe_n=2 "
    "guards.probe_nfe=1 guards.anchor=0 autocast=off out_dir=run corpus.cache_dir=corpus").split()
WORDS = ["--config", str(ROOT / "tests" / "micro.yaml"), *MICRO]
STAGES = {"start": 2, "corpus": 2, "vae": 3, "judges": 3, "pretrain": 3, "grow": 3,
          "evaluate": 1}                    # and in how many lives of a chain it is killed
ORDER = (*STAGES, "end")
CHAINS = 3


# ---- lives -------------------------------------------------------------------------------------

def life(folder, work, log="text"):
    """Runs work() in a fork, in `folder`, as the command would. Returns its exit status, negative
    for a signal; what it printed is in folder/log."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's `&` ignores it
            os.chdir(folder)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(out, 1)
            os.dup2(out, 2)
            work()
            status = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    life.pid = pid
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def command(*words):
    """python train.py WORDS, with what stands behind its __main__ guard."""
    sys.argv = ["train.py", *words]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


class Lines:
    """Counts the lines of this repository that a thread executes, of all files and of run.py
    alone; dies before line number `at` of stage `stage`, at the latest when that stage has ended.
    """

    def __init__(self, stage=None, at=None, of="all"):
        self.stage, self.at, self.of = stage, at, of
        self.now, self.counts, self.seen = None, {}, {}

    def begin(self, stage):
        if self.stage and ORDER.index(stage) > ORDER.index(self.stage):
            die()
        self.now = stage
        self.counts[stage] = {"all": 0, "run.py": 0}
        counting = self.stage in (None, stage)
        sys.settrace(self.call if counting else None)

    def call(self, frame, event, arg):
        path = frame.f_code.co_filename
        if path not in self.seen:
            self.seen[path] = Path(path).parent == ROOT and Path(path).name
        return self.line if self.seen[path] else None

    def line(self, frame, event, arg):
        if event == "line":
            count, name = self.counts[self.now], self.seen[frame.f_code.co_filename]
            count["all"] += 1
            count["run.py"] += name == "run.py"
            if self.stage and count[self.of] == self.at:
                die()
        return self.line


def trained(words, lines):
    """train.main with the stages' beginnings told to `lines`."""
    def told(owner, name, stage):
        work = getattr(owner, name)

        @wraps(work)
        def wrapped(*args):
            lines.begin(stage)
            return work(*args)
        setattr(owner, name, wrapped)
    for stage in ("corpus", "vae", "judges"):
        told(ToyWorld, f"make_{stage}", stage)
    for stage, name in (("pretrain", "train_ditar"), ("grow", "train_grow"),
                        ("evaluate", "run_evaluate")):
        told(train, name, stage)
    lines.begin("start")
    train.main(words)
    lines.begin("end")
    sys.settrace(None)


# ---- what a run leaves -------------------------------------------------------------------------

def tensors_of(path):
    with readable(path) as file:
        return digest({key: file.get_tensor(key) for key in file.keys()})


def left(folder):
    """Everything of a finished run that must not depend on how often it was stopped."""
    run = Path(folder) / "run"
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    found = {path.name: tensors_of(path) for path in run.glob("*.safetensors")}
    found |= {path.name: path.read_text() for path in (*run.glob("eval_*.jsonl"),
                                                       run / "table.md")}
    config = json.loads((run / "config.json").read_text())
    found["config"] = repr({k: v for k, v in config.items() if k != "save_every_sec"})
    found |= {f"{r['stage']} {r['step']} {i}": repr({k: v for k, v in r.items()
                                                   if not k.startswith("sec")})
              for i, r in enumerate(records)}
    if (run / "grow.best.safetensors").exists():
        found["best"] = repr(sorted(run_module.load_meta(run / "grow.best.safetensors").items()))
    with_numpy = sorted((Path(folder) / "corpus").glob("*-????????????.npz"))
    found |= {path.name: digest({k: torch.from_numpy(v) for k, v in toy.np.load(path).items()})
              for path in with_numpy}
    return found | {"files": sorted(path.name for path in run.iterdir())}


def differences(folder, wanted):
    try:
        found = left(folder)
    except Exception as error:
        return [repr(error)]
    return [f"{key}: {found.get(key)} instead of {wanted.get(key)}"
            for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]


def broken(folder):
    """What a killed run left in pieces under a final name. A last log line may be."""
    wrong = []
    for path in (Path(folder) / "run").glob("*.safetensors"):
        try:
            tensors_of(path)
        except ValueError as error:
            wrong.append(f"{path.name}: {error}")
    config = Path(folder) / "run" / "config.json"
    if config.exists():
        try:
            json.loads(config.read_text())
        except ValueError as error:
            wrong.append(f"config.json: {error}")
    return wrong


# ---- the trials --------------------------------------------------------------------------------

def kills(folder, lines, wanted):
    """Chains of lives, each killed before a random line of a stage; then one to the end."""
    rng, chains = random.Random(0), []
    for chain in range(CHAINS):
        here, deaths, wrong = folder / f"chain{chain}", [], []
        for stage, n in STAGES.items():
            for k in range(n):
                of = rng.choice(("all", "run.py") if lines[stage]["run.py"] > 9 else ("all",))
                # without its first steps a stage has fewer lines left; it may be over by then
                at = rng.randint(1, lines[stage][of] // (1 if k == n - 1 else 2))
                save = (0, 1e6, rng.choice((0, 1e6)))[chain]
                status = life(here, partial(trained, [*WORDS, f"save_every_sec={save}"],
                                            Lines(stage, at, of)))
                deaths.append((stage, of, at, status))
                wrong += broken(here)
        status = life(here, partial(trained, [*WORDS, "save_every_sec=0"], Lines()))
        chains.append({"deaths": deaths, "broken": wrong, "last": status,
                       "differences": differences(here, wanted)})
    return chains


def nth(n, before=None, after=None):
    """Makes a function die around its n-th call: what `before(*args)` does comes first, or the
    call itself."""
    def wrap(work):
        calls = [0]

        @wraps(work)
        def wrapped(*args, **named):
            calls[0] += 1
            if calls[0] == n and before:
                before(*args)
                die()
            result = work(*args, **named)
            if calls[0] == n:
                die()
            return result
        return wrapped
    return wrap


def half(path, data):
    """Half of what was to be written is on the disk."""
    with open(path, "wb") as file:
        file.write(data[:len(data) // 2])


def half_tensors(tensors, path):
    half(path, save(tensors))
    half(Path(path).with_name(".tmpAbCdEf"), save(tensors))         # safetensors' own scratch file


def half_line(run, stage, step, logs, bar):
    with open(run.dir / "log.jsonl", "a") as file:
        file.write('{"stage": "' + stage + f'", "step": {step}, "sec": 0.')


# where a life may end inside of an operation: owner, name, what has been done of it by then
NOTHING = lambda *args: None        # noqa: E731
MOMENTS = {
    "half the corpus": (toy.np, "savez", lambda path, **more: half(path, b"PK" * 99)),
    "half a text": (Path, "write_text", lambda path, text, *more: half(path, text.encode())),
    "half a safetensors file": (run_module, "save_file", half_tensors),
    "before a sync": (os, "fsync", NOTHING), "after a sync": (os, "fsync", None),
    "before a rename": (os, "replace", NOTHING), "after a rename": (os, "replace", None),
    "half a log line": (Run, "log", half_line), "after a log line": (Run, "log", None),
    "after a removal": (Path, "unlink", None),
    "before a finished stage is tidied": (Run, "tidy", NOTHING),
    "before a scratch folder goes": (shutil, "rmtree", NOTHING),
}
# ... and at which call of a life, in an order that goes through all stages
DEATHS = (("half the corpus", 2), ("half a text", 1), ("half a safetensors file", 2),
         ("after a rename", 2), ("before a sync", 3), ("before a finished stage is tidied", 1),
         ("half a log line", 3), ("after a removal", 1), ("half a text", 3),
         ("before a rename", 5), ("after a log line", 3), ("half a safetensors file", 3),
         ("before a finished stage is tidied", 2), ("after a sync", 6), ("half a log line", 3),
         ("half a safetensors file", 3), ("before a scratch folder goes", 6),
         ("before a finished stage is tidied", 4), ("half a text", 4))


def moments(folder, wanted):
    """One chain of lives that end inside of operations on files."""
    here, deaths, wrong = folder / "moments", [], []
    for name, n in DEATHS:
        owner, function, before = MOMENTS[name]

        def work():
            setattr(owner, function, nth(n, before)(getattr(owner, function)))
            train.main([*WORDS, "save_every_sec=0"])
        deaths.append((name, n, life(here, work)))
        wrong += broken(here)
    last = life(here, lambda: train.main([*WORDS, "save_every_sec=0"]))
    return {"deaths": deaths, "broken": wrong, "last": last,
            "differences": differences(here, wanted)}


def at_step(step, act, stage="grow"):
    """Plants act() at the end of a step of the training loop, before its log line."""
    log = Run.log

    def planted(run, name, now, logs, bar):
        if (name, now) == (stage, step):
            act()
        log(run, name, now, logs, bar)
    Run.log = planted


def before_grow(folder, whole):
    """A copy of a whole run as it was before GROW, with the best weights of an earlier one."""
    shutil.copytree(whole, folder)
    run = folder / "run"
    for path in (*run.glob("grow*"), *run.glob("eval*"), run / "table.md", run / "figure.png"):
        path.unlink()
    run_module.save_tensors(run / "grow.best.safetensors", {"a": torch.zeros(1)}, {"score": 9.0})
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join(x for x in lines if '"stage": "grow"' not in x))


def told(here, status):
    """What a life said, and the checkpoints that it left."""
    return {"status": status, "text": (here / "text").read_text(),
            "checkpoints": sorted(p.name for p in (here / "run").glob("*.resume.safetensors"))}


def signals(folder, whole, wanted):
    """SIGTERM and Ctrl-C in GROW's step 1, in its last checkpoint, in evaluation; two of them."""
    here, told_of = folder / "signals", {}
    before_grow(here, whole)
    last = "grow.0000004.resume.safetensors"

    def run(name, plant):
        def work():
            plant()
            command(*WORDS, "save_every_sec=1e6")
        told_of[name] = told(here, life(here, work))

    def in_last_checkpoint():
        save_file = run_module.save_file

        def slow(tensors, path, metadata):
            save_file(tensors, path, metadata)
            if path.name == last:
                signal.raise_signal(signal.SIGTERM)
        run_module.save_file = slow
    term, interrupt = (partial(signal.raise_signal, number)
                       for number in (signal.SIGTERM, signal.SIGINT))
    run("twice", lambda: at_step(0, lambda: (term(), time.sleep(0), interrupt(), time.sleep(1))))
    run("SIGTERM", lambda: at_step(1, term))
    run("SIGINT", lambda: at_step(2, interrupt))
    run("late", in_last_checkpoint)
    run("elsewhere", lambda: setattr(evaluate, "table", lambda *args: interrupt()))
    run("end", lambda: None)
    return told_of | {"differences": differences(here, wanted)}


def no_room(folder, whole, wanted):
    """No file may grow beyond a limit; then the folder takes no file at all; then all is well."""
    here, told_of = folder / "no_room", {}
    before_grow(here, whole)
    words = [*WORDS, "save_every_sec=0"]

    def limited():
        at_step(2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, 2**17)))
        command(*words)

    def read_only():
        if os.getuid() == 0:
            os.setuid(65_534)
        command(*words)
    told_of["full"] = told(here, life(here, limited))
    given = [here, *here.rglob("*")]
    if os.getuid() == 0:
        for path in given:
            os.chown(path, 65_534, 65_534)
    (here / "run").chmod(0o555)
    told_of["read only"] = told(here, life(here, read_only))
    (here / "run").chmod(0o755)
    told_of["end"] = told(here, life(here, lambda: command(*words)))
    return told_of | {"differences": differences(here, wanted)}


def not_finite(folder, whole):
    """The reference's velocity is infinite in some GROW steps."""
    def poisoned(*steps):
        gradients = train.GrowTrainer.gradients

        def planted(trainer, step):
            bias = trainer.reference.locdit_out.bias
            kept = bias.data.clone()
            if step in steps:
                bias.data.fill_(float("inf"))
            logs = gradients(trainer, step)
            bias.data.copy_(kept)
            return logs
        train.GrowTrainer.gradients = planted
    told_of = {}
    for name, steps, bad in (("one", 4, (1,)), ("ten", 12, range(1, 12))):
        here = folder / f"not_finite_{name}"

        def work():
            poisoned(*bad)
            train.main([*WORDS, f"weights_dir={whole / 'run'}", "stages=grow",
                        f"corpus.cache_dir={whole / 'corpus'}", f"grow.steps={steps}",
                        "guards.probe_every=0"])
        told_of[name] = told(here, life(here, work)) | {
            "log": [json.loads(x) for x in (here / "run/log.jsonl").read_text().splitlines()]}
    return told_of


def orphans(folder):
    """A run is killed while another process speaks its corpus. Seconds until that one has ended."""
    def work():
        toy.ESpeak.speak = lambda *args: time.sleep(60)
        threading.Timer(0.5, die).start()
        train.main(WORDS)
    status, started = life(folder / "orphans", work), time.time()
    while time.time() < started + 30:
        try:
            os.killpg(life.pid, 0)          # a life leads a group, which its workers are in
        except ProcessLookupError:
            break
        time.sleep(0.05)
    return {"status": status, "seconds": time.time() - started}


def growth(folder, whole):
    """Memory and time of 300 GROW steps."""
    def work():
        measure = bench.growth

        def kept(*args):
            rows = measure(*args)
            Path("growth.json").write_text(json.dumps(rows.tolist()))
            return rows
        bench.growth = kept
        bench.main([*WORDS, "rewards.weights.wer=0", "grow.redraws=0", "--growth", "300"])
    status = life(whole, work)
    return {"status": status, "text": (whole / "text").read_text(),
            "rows": json.loads((whole / "growth.json").read_text())}


def main(folder, *names):
    torch.set_num_threads(1)
    train.keep_freed_memory()
    evaluate.figure = lambda path, *rest: path.write_bytes(b"stands for a figure")
    evaluate.bootstrap_means.__defaults__ = (20, 0)
    fork = multiprocessing.get_context("fork")      # spawned ones would import everything again
    toy.multiprocessing = SimpleNamespace(get_context=lambda kind: fork,
                                          parent_process=multiprocessing.parent_process)
    whole, lines = folder / "whole", Lines()

    def counted():
        trained([*WORDS, "save_every_sec=0"], lines)
        Path("lines.json").write_text(json.dumps(lines.counts))
    if life(whole, counted):
        raise RuntimeError((whole / "text").read_text())
    counts, wanted = json.loads((whole / "lines.json").read_text()), left(whole)
    trials = {"orphans": lambda: orphans(folder), "signals": lambda: signals(folder, whole, wanted),
              "no_room": lambda: no_room(folder, whole, wanted),
              "not_finite": lambda: not_finite(folder, whole),
              "growth": lambda: growth(folder, whole), "moments": lambda: moments(folder, wanted),
              "kills": lambda: kills(folder, counts, wanted)}
    report = {"lines": counts, "seconds": {}}
    for name in names or trials:
        started = time.time()
        report[name] = trials[name]()
        report["seconds"][name] = round(time.time() - started, 1)
    (folder / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
