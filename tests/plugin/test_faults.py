"""A rank that dies, hangs or raises: the others end soon, with a sentence, and the run can go on."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_gradcomp.plugin.named_faults import warn_of_stale_addresses
from tests.processes import run

SCRIPT = str(Path(__file__).with_name("fault_script.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
TIMEOUT = 12.0
"""Seconds that a rank waits for another: enough for six processes to start, far less than the test may take."""

CASES = {  # the long ones first
    "restart": (TORCHRUN, "kill", "dgc"),
    "stop": ((sys.executable,), "stop", "dgc"),
    "stop, dense": ((sys.executable,), "stop", "ddp_dense"),
    "kill": ((sys.executable,), "kill", "dgc"),
    "raise": ((sys.executable,), "raise", "dgc"),
    "term": ((sys.executable,), "term", "dgc"),
    "term, dense": ((sys.executable,), "term", "ddp_dense"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Case -> (folder, return code, output); three run at a time, since they mostly wait."""

    folders = {case: str(tmp_path_factory.mktemp("fault")) for case in CASES}  # which threads can't make

    def outcome(case):
        launcher, kind, strategy = CASES[case]
        folder = folders[case]
        timeout = TIMEOUT if kind == "stop" else 3 * TIMEOUT  # the others end before
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = run(*launcher, SCRIPT, kind, folder, strategy, str(timeout), timeout=120, env=own_store)
        return folder, done.returncode, done.stdout

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(CASES, pool.map(outcome, CASES), strict=True))


def moment(output, words):
    """When a line with `words` was printed."""
    [line] = [line for line in output.splitlines() if words in line and line[:1].isdigit()]
    return float(line.split()[0])


@pytest.mark.parametrize("case", ["kill", "stop", "raise", "stop, dense"])
def test_the_run_ends_with_an_error(outcomes, case):
    assert outcomes[case][1] != 0


def test_a_rank_that_was_killed_is_missed_at_once(outcomes):
    _, _, output = outcomes["kill"]
    assert "rank 0 of 2, step 8, averaging gradients: lost the other ranks" in output


@pytest.mark.parametrize(("case", "phase"), [("stop", "averaging gradients"), ("stop, dense", "")])
def test_a_rank_that_hangs_is_missed_after_the_timeout(outcomes, case, phase):
    _, _, output = outcomes[case]
    assert f"rank 0 of 2, step 8, {phase}" in output
    assert "the exchange failed; rank 1 gives no sign of life" in output
    waited = moment(output, "rank 0 ends") - moment(output, "stop on rank 1")
    assert TIMEOUT - 1 < waited < 3 * TIMEOUT


@pytest.mark.parametrize("case", ["term", "term, dense"])
def test_a_rank_that_is_told_to_end_tells_the_others_and_all_end_together(outcomes, case):
    _, _, output = outcomes[case]
    ends = [line for line in output.splitlines() if " ends with momentum " in line]
    assert len(ends) == 2 and all("SIGTERMException" in line for line in ends), output
    assert moment(output, "rank 0 ends") - moment(output, "term on rank 1") < TIMEOUT


def test_what_a_rank_raised_is_known_to_the_others(outcomes):
    _, _, output = outcomes["raise"]
    assert "step 8, averaging gradients: the exchange failed; rank 1 raised ArithmeticError: a mistake" in output
    assert moment(output, "rank 0 ends") - moment(output, "raise on rank 1") < TIMEOUT


@pytest.mark.parametrize("case", ["stop", "raise", "stop, dense"])
def test_the_optimizers_groups_are_as_the_user_set_them(outcomes, case):
    ends = [line for line in outcomes[case][2].splitlines() if " ends with momentum " in line]
    assert ends and all("ends with momentum [0.9]" in line for line in ends)


def test_the_last_checkpoint_loads_and_the_run_goes_on(outcomes):
    folder, _, _ = outcomes["stop"]
    done = run(sys.executable, SCRIPT, "none", folder, "dgc", str(TIMEOUT), timeout=90)
    assert done.returncode == 0, done.stdout
    assert "rank 0 did 30 steps, restored: True" in done.stdout


def test_torchruns_shared_store_is_warned_of_where_it_restarts(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.warns(UserWarning, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        warn_of_stale_addresses()


def test_under_torchrun_with_restarts_the_run_goes_on_by_itself(outcomes):
    _, code, output = outcomes["restart"]
    assert code == 0, output
    assert "kill on rank 1" in output
    assert "rank 0 did 30 steps, restored: True" in output and "rank 1 did 30 steps, restored: True" in output
