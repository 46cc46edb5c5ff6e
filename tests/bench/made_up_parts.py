"""What parts of the GPU bench do in tests, in processes of their own; it imports nothing that takes long."""

import os
import time
from functools import partial

from engine.bench.gpu_report import Check, Measured


def measures(report, *, title, first=0):
    report.section(title, [partial(dict, us=us) for us in range(first, first + 2)])


def judges(report):
    report.check([Check("good", 0.0, 0.0), Check("bad", 1.0, 0.0)])


def dies(report):
    report.take(Measured("Decode", {"us": 7}))
    os._exit(3)


def is_killed(report):
    os.kill(os.getpid(), 9)


def hangs(report):
    report.take(Measured("Decode", {"us": 8}))
    time.sleep(600)


def raises(report):
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


def prints(report):
    print("what a library has to say")
    measures(report, title="Prefill")
