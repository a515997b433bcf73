"""What the config sections and the command lines share: bounds of numbers, and how a user's mistake
is shown. Every check stands beside what it guards; here is only how it is said."""

import sys
import traceback
from pathlib import Path


def at_least(section, config, **least):
    """Raises ValueError for a field below its least value, as in at_least("grow", self, steps=1).
    """
    for name, low in least.items():
        if not getattr(config, name) >= low:
            raise ValueError(f"{section}.{name}={getattr(config, name)}; wanted {low} or more")


def shares(section, config, *names, one=True):
    """Raises ValueError for a field, or a number of a tuple, outside of 0 to 1. one: is 1 allowed?
    """
    for name in names:
        value = getattr(config, name)
        for v in value if isinstance(value, tuple) else (value,):
            if not 0 <= v <= 1 or v == 1 and not one:
                raise ValueError(f"{section}.{name}={value}; wanted 0 to 1"
                                 + ("" if one else ", and less than 1"))


def run_main(main):
    """Runs a command line. What our own code refuses (ValueError, ImportError) and what the disk
    does (OSError) end in one line on stderr and status 2. All else is a bug and keeps its
    traceback: a ValueError counts as ours only where one of our `raise` lines made it."""
    try:
        sys.exit(main())
    except (ValueError, ImportError, OSError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = Path(last.filename).parent == Path(__file__).parent and (last.line or "").startswith(
            "raise ")
        if not (ours or isinstance(error, OSError)):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
