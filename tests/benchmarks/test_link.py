"""The emulated link has its rate and its delay, and leaves nothing behind."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run

SCRIPT = str(Path(__file__).with_name("link_script.py"))
ROOT = str(Path(__file__).resolve().parents[2])
LINK = (sys.executable, "-m", "benchmarks.link", "--nodes", "2")
HERE = sys.platform == "linux" and not os.geteuid() and shutil.which("ip") and shutil.which("tc")


def allowed():
    """Whether this process may make namespaces: root of a container often may not."""
    name = f"maybe{os.getpid()}"  # another process of pytest asks the same
    made = HERE and not subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode
    return bool(made and not subprocess.run(["ip", "netns", "del", name], capture_output=True).returncode)


pytestmark = pytest.mark.skipif(not allowed(), reason="an emulated link needs Linux, root, ip and tc")


def times(*options):
    done = run(*LINK, *options, "--", sys.executable, SCRIPT, cwd=ROOT, timeout=40)
    assert done.returncode == 0, done.stdout
    figures, *counts = done.stdout.splitlines()
    megabyte, round_trip = map(float, figures.split())
    sent = [int(line.split()[-2].replace(",", "")) for line in counts]
    return megabyte, round_trip, sent


def test_a_rate_is_kept_and_what_was_sent_is_counted():
    megabyte, round_trip, (by_0, by_1) = times("--rate-mbit", "20")
    assert 0.35 < megabyte < 0.8 and round_trip < 0.02  # 0.4 s, less what the bucket holds
    assert 1_000_000 < by_1 < 1_200_000 and by_0 < 100_000


@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="needs netem or TUN")
def test_a_delay_is_one_way():
    _, round_trip, _ = times("--rate-mbit", "100", "--delay-ms", "15")
    assert 0.03 <= round_trip < 0.06


def test_a_failing_node_ends_the_others_and_leaves_no_namespace():
    done = run(*LINK, "--", sys.executable, SCRIPT, "fail", cwd=ROOT, timeout=40)
    assert done.returncode == 3
    own = next(line for line in done.stdout.splitlines() if line.startswith("link")).removesuffix("n1")
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not re.search(rf"^{own}(s|n\d)\b", left, re.MULTILINE)  # another test may have a network of its own


def test_a_node_sends_one_payload_to_the_other():
    """Ten steps on 2 nodes of 2 ranks, twice; all else that crosses the link is the same both times."""
    script = str(Path(SCRIPT).with_name("nodes_script.py"))
    done = run(*LINK, "--ranks-per-node", "2", "--", sys.executable, script, cwd=ROOT, timeout=90)
    assert done.returncode == 0, done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("dense ", "compressed "))]
    figures = {inside: tuple(map(int, numbers)) for inside, *numbers in lines}
    announced, crossed, equal = (dict(zip(figures, each, strict=True)) for each in zip(*figures.values(), strict=True))
    assert equal == {"dense": 1, "compressed": 1}
    counts = [line for line in done.stdout.splitlines() if line.startswith("node ")]
    assert max(int(line.split()[-2].replace(",", "")) for line in counts) > sum(crossed.values())
    payload = announced["compressed"] / 3  # to each of the other ranks
    assert announced["dense"] == pytest.approx(payload / 2, rel=0.01)  # its part, to the other node
    # Of 2 x 3 payloads that leave a node's ranks, 4 cross the link; with one worker a node, 1 does.
    saved = crossed["compressed"] - crossed["dense"]
    assert saved == pytest.approx(10 * 3 * payload, rel=0.15)  # headers, and what TCP sends again on a busy machine
