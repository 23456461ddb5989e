"""Free memory that the C library holds on to goes back to the system."""

from __future__ import annotations

import resource
import subprocess
import sys

FRAGMENTS = """
import torch
from respec.models.heap import give_back

def resident():
    return int(open('/proc/self/statm').read().split()[1]) * 4096 / 2**20

del_me = torch.ones(7 * 2**20)  # 28 MiB: once such a block has been freed, glibc puts blocks as large on the heap
del del_me
big, kept = [], []
for _ in range(8):
    big.append(torch.ones(2**20))
    kept.append(torch.ones(256))
big.clear()
held = resident()
give_back()
print(held - resident())
"""


def test_what_is_free_between_pieces_that_live_on_is_given_back():
    done = subprocess.run([sys.executable, "-c", FRAGMENTS], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 20, "MiB, of the 32 that have been freed"
    assert resource.getpagesize() == 4096, "what the figure above is reckoned with"


GROWTH = """
import torch
from respec.models.heap import Growth

growth = Growth(worth=64 * 2**20)
first = torch.ones(32 * 2**20)  # 128 MiB
print(growth.give_back())
small = torch.ones(4 * 2**20)
print(growth.give_back())
large = torch.ones(32 * 2**20)
print(growth.give_back(), growth.give_back())
"""


def test_a_process_that_has_not_grown_is_left_alone():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True", "False"]


KEPT = """
import contextlib, resource
import torch
from respec.models.heap import give_back, kept_heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def passed():
    before = faults()
    blocks = [torch.ones(2**20) for _ in range(40)]  # 160 MiB, 40960 pages
    blocks.clear()
    return faults() - before

for wrap in (contextlib.nullcontext, kept_heap):
    with wrap():
        passed()
        print(passed())
give_back()
print(passed())
"""


def test_passes_within_lie_in_the_same_memory_until_it_is_given_back():
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True)
    outside, within, after = map(int, done.stdout.split())
    assert within < 2000 < 20_000 < min(outside, after)
