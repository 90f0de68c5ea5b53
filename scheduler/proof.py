"""A prover at work in a process of its own, beside a search: it can be stopped at any moment, in the midst of a solver's step too.

The problem goes to the standard input of the process, pickled, then the cost of each better plan, a line each.  It writes a line for each
better bound, and ends when nothing is left to prove or its input ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import pickle
import queue
import subprocess
import sys
import threading
import time

from .errors import StrategyError
from .prover import Prover

__all__ = ["Proof", "serve"]


class Proof:
    """A proof under way.

    Attributes:
        bound: seconds below which no sequence within the budget stays, as far as proven by now.
    """

    def __init__(self, prover: Prover, seconds: float) -> None:
        """Have a copy of a prover go on.

        Args:
            prover: what is to be proven, and what was done for it.
            seconds: processor time for the proof, beside what starting takes.

        Raises:
            StrategyError: scipy is not installed.
        """
        if importlib.util.find_spec("scipy") is None:
            raise StrategyError("the stage bound needs scipy, which is not installed; ask for no bound")
        self.bound = prover.bound
        known = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)}
        # A session of its own: Ctrl-C is for the one who waits for the plan.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import {__name__} as proof; proof.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=known,
            start_new_session=True,
        )
        self._news: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._news.put(pickle.dumps((prover, seconds)))
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def tell(self, cost: float) -> None:
        """Say what the best plan costs: a bound that meets it ends the work."""
        self._news.put(f"{cost!r}\n".encode())

    @property
    def done(self) -> bool:
        """Whether the bound is final."""
        return not self._threads[1].is_alive()

    def stop(self) -> None:
        """End the work; the bound stands."""
        self._process.kill()
        self._process.wait()
        self._news.put(None)
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        # It may have ended already.
        with contextlib.suppress(OSError), pipe:
            while (news := self._news.get()) is not None:
                pipe.write(news)
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                # One that was stopped in the midst of a line has told nothing by it.
                if line.endswith(b"\n"):
                    self.bound = max(self.bound, float(line))


def serve() -> None:
    """What the process does."""
    source = sys.stdin.buffer
    # What a library prints must not be taken for a bound.
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    prover, seconds = pickle.load(source)
    enough = math.inf

    def listen() -> None:
        nonlocal enough
        for line in source:
            enough = min(enough, float(line))
        os._exit(0)

    def tell(bound: float) -> None:
        sink.write(f"{bound!r}\n".encode())
        sink.flush()

    threading.Thread(target=listen, daemon=True).start()
    prover.work(seconds, lambda: enough, tell, time.process_time)
