"""A stand-in for ``benchmarks.worker``: it answers, complains, prints, hangs or dies as it is asked to."""

from __future__ import annotations

import os
import signal
import sys
import time

from benchmarks import worker


class Bench:
    def echo(self, value: object) -> dict[str, object]:
        return {"value": value}

    def fail(self) -> dict[str, object]:
        raise ValueError("the first line\nthe second")

    def crash(self) -> dict[str, object]:
        print("the library's last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
        return {}

    def leave(self) -> dict[str, object]:
        raise SystemExit(3)

    def hang(self) -> dict[str, object]:
        time.sleep(60)
        return {}

    def chatter(self) -> dict[str, object]:
        print("a library prints on what it takes for standard output", flush=True)
        os.write(1, b"and another one in C\n")
        return {}


if __name__ == "__main__":
    worker.serve(Bench)
