"""Replacements of processes: a pool of benchmarks, and runs of experiments, in the process of the test."""

from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout
from contextvars import copy_context

from rlxf.cli import main


class InProcessPool:
    """Process pool that runs jobs in this process."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def submit(self, make, *args):
        done = Future()
        try:
            done.set_result(make(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def train_in_process(job, lock, should_stop):
    """Train a run of an experiment in this process, and return its exit status, in place of ``_train``.

    The options of the calling command are in a context variable, which the inner command must not replace.
    """
    with open(job.sibling("log"), "a") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            copy_context().run(main, job.words)
        except SystemExit as exited:
            return exited.code or 0
    return 0
