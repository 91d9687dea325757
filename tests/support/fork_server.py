"""Runs the macko command in forked children that may be killed.

Each line on stdin is a request, each line on stdout an exit code. A request is JSON: args, and either operation and
before (SIGKILL before or after the n-th call that changes files) or delay (SIGKILL after so many seconds). This is a
program, since a fork of the test process would lose the threads of its OpenMP runtime.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from ggml_macko.commands import cli
from ggml_macko.native import library

OPERATIONS = ("write", "pwrite", "fsync", "link", "rename", "unlink")


def die_at(operation: int, before: bool) -> None:
    count = 0

    def wrap(function):
        def run(*args, **kwargs):
            nonlocal count
            count += 1
            if before and count == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if count == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for name in OPERATIONS:
        setattr(os, name, wrap(getattr(os, name)))


def child(request: dict) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  it lives as long as the child
    if "operation" in request:
        die_at(request["operation"], request["before"])
    os._exit(cli.main(request["args"]))


def main() -> None:
    cli.make_parser()
    library.version()  # loads all libraries before the forks, and starts no threads
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(request)
        if "delay" in request:
            time.sleep(request["delay"])
            os.kill(pid, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
