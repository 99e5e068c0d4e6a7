"""
Text to token ids: data/<name>/train.bin, val.bin and meta.json.
"""

import argparse
import contextlib
import difflib
import os
import re
import sys
from pathlib import Path


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and suggests the nearest flag for a mistyped one."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)

    def error(self, message):
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1) if unknown else []
        super().error(message + "".join(f" (did you mean {flag}?)" for flag in near))


def run(main):
    """Run a command line's main(): what a user can do wrong ends in one line and exit status 1, not in a traceback."""
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe (`| head`) has left: nothing more to say, to anyone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


@contextlib.contextmanager
def replacing(path, mode="wb"):
    """Open a file beside `path` that takes its place when the block ends well: whole, flushed to disk and renamed."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, mode, **({} if "b" in mode else {"encoding": "utf-8", "newline": ""})) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
