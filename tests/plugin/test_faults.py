"""A rank that dies, hangs or raises: the others end soon, with a sentence, and the run can go on."""

from pathlib import Path

import pytest

from lightning_gradcomp.plugin.base_strategy import warn_of_stale_addresses
from tests.processes import Forked, run_world, start_world

SCRIPT = str(Path(__file__).with_name("fault_script.py"))
TORCHRUN = str(Path(__file__).with_name("elastic_script.py"))
TIMEOUT = 15.0
"""Seconds that a rank waits for another: enough for one to start, far less than the test may take."""


def start(launcher, kind, strategy, folder):
    """The processes of a case, the one to look at first."""
    arguments = (kind, folder, strategy, str(TIMEOUT if kind == "stop" else 3 * TIMEOUT))  # the others end before
    if launcher == "outside":
        return start_world(2, SCRIPT, *arguments)
    script = (TORCHRUN, SCRIPT) if launcher == "torchrun" else (SCRIPT,)
    return [Forked(*script, *arguments, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})]


CASES = {  # those that wait first, and next those that leave the cores to the rank that is started for them
    "stop": ("Lightning", "stop", "dgc"),
    "stop, dense": ("outside", "stop", "ddp_dense"),
    "term, dense": ("outside", "term", "ddp_dense"),
    "raise": ("outside", "raise", "dgc"),
    "restart": ("torchrun", "kill", "dgc"),
    "kill": ("Lightning", "kill", "dgc"),
    "term": ("Lightning", "term", "dgc"),
}
"""Who starts the ranks, what happens, and the strategy. One that Lightning starts has to import everything; but there
rank 0 also sees to it that rank 1 ends."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Case -> (folder, return code, output). Those that stop wait for their timeout while the others run."""
    running, ended = {}, {}

    def end(case):
        folder, (first, *others) = running.pop(case)
        done = first.end()
        output = done.stdout
        for other in others:
            if CASES[case][1] == "stop":
                other.kill()
            output += other.end().stdout
        ended[case] = folder, done.returncode, output

    for case, options in CASES.items():
        folder = str(tmp_path_factory.mktemp("fault"))
        running[case] = folder, start(*options, folder)
        if options[1] != "stop":
            end(case)
    for case in list(running):
        end(case)
    return ended


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
    assert "rank 0 did 30 steps, restored: True" in run_world(2, SCRIPT, "none", folder, "dgc", str(TIMEOUT))


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
