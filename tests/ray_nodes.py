"""What Ray's tasks do in tests."""

import os
import signal
import time

import psutil


def end(node):
    """Kill a node and its processes, as a machine that is switched off."""
    family = psutil.Process(node.pid).children(recursive=True)
    for process in (*family, node):
        process.kill()
    node.wait()


def number_and_process(number, caller, mark):
    """A call that is slow, so that others have their share; 1 is refused, 2 kills another once."""
    time.sleep(0.05)
    if number == 1:
        raise ValueError("number must not be 1, got 1")
    if number == 2 and os.getpid() != caller and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number, os.getpid()
