"""Every command that README.md and RESULTS.md show is one that its program takes."""
import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from config import load_config

ROOT = Path(__file__).resolve().parents[1]


def commands():
    """The text of each command, without what stands before its program; with its comment."""
    found = []
    for name in ("README.md", "RESULTS.md"):
        text = (ROOT / name).read_text()
        blocks = [line for line in text.replace("\\\n", " ").splitlines() if line[:4] == " " * 4]
        inline = [" ".join(span.split())
                  for span in re.findall(r"`((?:python|torchrun)\s[^`]*)`", text)]
        for command in blocks + inline:
            if match := re.search(r"(python|torchrun --nproc_per_node \d) (\w+\.py .*)", command):
                found.append(match[2])
    return sorted(set(found))


def test_there_are_commands():
    assert len(commands()) > 25
    assert {command.split(".py")[0] for command in commands()} == {
        "bench", "data", "evaluate", "rewards", "sample", "tables", "train", "vae"}


@pytest.mark.parametrize("command", commands())
def test_a_command_is_understood(command, monkeypatch):
    class Parsed(Exception):
        pass

    def stop_after(parse):
        def parsed(*args, **kwargs):
            raise Parsed(parse(*args, **kwargs))
        return parsed
    program, *words = shlex.split(command, comments=True)
    parser = argparse.ArgumentParser
    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(parser, name, stop_after(getattr(parser, name)))
    with pytest.raises(Parsed) as done:
        importlib.import_module(program.removesuffix(".py")).main(words)
    args = done.value.args[0]
    if hasattr(args, "overrides"):
        load_config(str(ROOT / args.config), args.overrides)
