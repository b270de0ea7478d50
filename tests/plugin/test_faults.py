"""A rank that dies, hangs or raises: the others end soon, with a sentence, and the run can go on."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.utils.data import DataLoader, Dataset

from lightning_gradcomp.averaging.faults import is_lost_peer, others_end, post_reason
from lightning_gradcomp.plugin.base_strategy import RESTARTABLE, warn_of_stale_addresses
from tests.processes import Forked, free_port, run, start_world

SCRIPT = str(Path(__file__).with_name("fault_script.py"))
TORCHRUN = str(Path(__file__).with_name("elastic_script.py"))
TIMEOUT = 8.0
"""Seconds that a rank waits for another once both have started."""
LIMIT = 75
"""Seconds after which a case is killed and fails: two ranks start on a busy machine, wait for the timeout, and end."""
CASES = {  # those that wait first; last the one whose second rank has to import everything, with the cores to itself
    "stop 0": ("outside", "stop", "dgc", "0"),
    "stop, dense": ("outside", "stop", "ddp_dense"),
    "raise": ("outside", "raise", "dgc"),
    "start": ("outside", "kill", "dgc", "1", "start"),
    "save": ("outside", "kill", "dgc", "1", "save"),
    "sidecar": ("outside", "kill", "dgc", "1", "sidecar"),
    "metric": ("outside", "kill", "dgc", "1", "metric"),
    "kill, dga": ("outside", "kill", "dga"),
    "restart": ("torchrun", "kill", "dgc"),
    "kill, int8": ("outside", "kill", "ddp_int8"),
    "kill, eden": ("outside", "kill", "eden"),
    "kill": ("outside", "kill", "dgc"),
    "stop": ("Lightning", "stop", "dgc"),
}
"""Who starts the ranks, what happens, the strategy; and on which rank, and where: on rank 1 in a step if not given.
The rank that Lightning starts has to be ended by rank 0, too."""


def start(launcher, kind, strategy, folder, *where):
    """The processes of a case, the one to look at first."""
    arguments = (
        kind,
        folder,
        strategy,
        str(TIMEOUT if kind == "stop" else 5 * TIMEOUT),
        *where,
    )  # others end before
    if launcher == "outside":
        processes = start_world(2, SCRIPT, *arguments, timeout=LIMIT)
        return processes[::-1] if where[:1] == ("0",) else processes
    if launcher == "torchrun":
        variable, _, *options = RESTARTABLE.replace("HOST:PORT", f"localhost:{free_port()}").split()
        options += ["--nproc-per-node=2", SCRIPT, *arguments]
        return [Forked(TORCHRUN, *options, timeout=LIMIT, env=dict([variable.split("=")]))]
    return [Forked(SCRIPT, *arguments)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Case -> (return code, output). Most that stop wait for their timeout while the others run."""
    running, ended = {}, {}

    def end(case):
        first, *others = running.pop(case)
        done = first.end()
        output = done.stdout
        for other in others:
            if CASES[case][1] == "stop":  # one that is stopped may have been killed at its limit meanwhile
                other.kill()
                other.listener.join()
            output += other.output if CASES[case][1] == "stop" else other.end().stdout
        ended[case] = done.returncode, output

    for case, (launcher, kind, strategy, *where) in CASES.items():
        folder = str(tmp_path_factory.mktemp("fault"))
        running[case] = start(launcher, kind, strategy, folder, *where)
        if kind != "stop":
            end(case)
    for case in list(running):
        end(case)
    return ended


def moment(output, words):
    """When a line with `words` was printed."""
    [line] = [line for line in output.splitlines() if words in line and line[:1].isdigit()]
    return float(line.split()[0])


@pytest.mark.parametrize("case", [case for case in CASES if case != "restart"])
def test_the_run_ends_with_an_error(outcomes, case):
    assert outcomes[case][0] != 0


def test_a_killed_rank_is_noticed_at_once(outcomes):
    _, output = outcomes["kill"]
    assert "rank 0 of 2, step 8, averaging gradients: lost the other ranks" in output


@pytest.mark.parametrize("method", ["int8", "eden"])
def test_a_rank_killed_while_a_thread_exchanges_is_named(outcomes, method):
    _, output = outcomes[f"kill, {method}"]
    assert "rank 0 of 2, step 8, backward: the exchange failed; rank 1 does not respond" in output


def test_a_rank_killed_in_mid_round_is_named(outcomes):
    _, output = outcomes["kill, dga"]
    said = r"step \d+, averaging round \d: the exchange failed; rank 1 does not respond"
    assert re.search(said, output), output


@pytest.mark.parametrize(("case", "phase"), [("stop", "averaging gradients"), ("stop, dense", "")])
def test_a_rank_that_hangs_is_noticed_at_the_timeout(outcomes, case, phase):
    _, output = outcomes[case]
    assert f"rank 0 of 2, step 8, {phase}" in output
    assert "the exchange failed; rank 1 does not respond" in output
    waited = moment(output, "rank 0 ends") - moment(output, "stop on rank 1")
    assert TIMEOUT - 1 < waited < 5 * TIMEOUT


def test_a_store_that_hangs_is_not_waited_for(outcomes):
    _, output = outcomes["stop 0"]
    assert "rank 1 of 2, step 8, averaging gradients" in output
    assert "the exchange failed; rank 0 does not respond" in output


@pytest.mark.parametrize(
    ("case", "phase"),
    [
        ("start", "step 0, at the start of training"),
        ("save", "step 5, saving a checkpoint"),
        ("sidecar", "step 5, writing sidecar files"),
        ("metric", "step 8, in an exchange that is not the strategy's"),
    ],
)
def test_every_exchange_is_explained(outcomes, case, phase):
    _, output = outcomes[case]
    [line] = [line for line in output.splitlines() if "rank 0 ends with momentum" in line]
    assert f"rank 0 of 2, {phase}: " in output
    assert case == "metric" or f"ExchangeFailed: rank 0 of 2, {phase}: the exchange failed" in line


def test_what_a_rank_raised_is_told_the_others(outcomes):
    """Though a callback saves a checkpoint first, for which Lightning waits for all ranks."""
    _, output = outcomes["raise"]
    said = "rank 0 of 2, step 8, averaging gradients.*: the exchange failed; rank 1 raised ArithmeticError"
    assert re.search(said, output)
    assert moment(output, "rank 0 ends") - moment(output, "raise on rank 1") < 2 * TIMEOUT


@pytest.mark.parametrize("case", ["stop", "raise", "stop, dense"])
def test_the_optimizers_groups_are_as_the_user_set_them(outcomes, case):
    ends = [line for line in outcomes[case][1].splitlines() if " ends with momentum " in line]
    assert ends and all("ends with momentum [0.9]" in line for line in ends)


@pytest.mark.parametrize("rendezvous", ["static", "c10d", "restartable"])
def test_torchruns_shared_store_is_warned_of(monkeypatch, recwarn, rendezvous):
    """The default rendezvous shares its store whatever the variable says."""
    if rendezvous != "c10d":
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    backend = "static" if rendezvous == "static" else "c10d"
    options = {"rank": 0, "is_host": True} if backend == "static" else {}
    parameters = RendezvousParameters(backend, f"localhost:{free_port()}", "test", 1, 1, **options)
    shares = get_rendezvous_handler(parameters).use_agent_store
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(shares))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    warn_of_stale_addresses()
    said = [str(warning.message) for warning in recwarn if "try to reach dead ones" in str(warning.message)]
    assert len(said) == (rendezvous != "restartable")
    assert all(RESTARTABLE in line for line in said)


def test_torchrun_restarts_from_the_checkpoint(outcomes):
    """With the command of the documentation, and without a warning."""
    assert RESTARTABLE in (Path(__file__).parents[2] / "docs/checkpoints_and_faults.md").read_text()
    code, output = outcomes["restart"]
    assert "try to reach dead ones" not in output
    assert code == 0, output
    assert "kill on rank 1" in output
    assert "rank 0 did 30 steps, restored: True" in output and "rank 1 did 30 steps, restored: True" in output


class Slow(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise RuntimeError("DataLoader timed out after 30 seconds")


def test_a_data_loaders_timeout_is_no_lost_peer():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError) as caught:
            next(iter(DataLoader(Slow())))
        assert not is_lost_peer(caught.value)
        assert is_lost_peer(RuntimeError("Timed out waiting 3000ms for recv operation to complete"))
    finally:
        dist.destroy_process_group()


def test_a_missing_key_or_the_users_own_error_is_no_lost_peer():
    """Though their messages have "connection" in them."""
    net = torch.nn.ModuleDict({"connection": torch.nn.Linear(1, 1)})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"connection\.weight") as caught:
            net.load_state_dict({})
        assert not is_lost_peer(caught.value)
        with pytest.raises(RuntimeError) as caught:
            raise RuntimeError("the connection to the feature store is closed")
        assert not is_lost_peer(caught.value)
        assert not is_lost_peer(RuntimeError("no such layer: skip_connection"))
    finally:
        dist.destroy_process_group()


EXITS = """
import atexit, json, os, time
from unittest import mock
slow = []
atexit.register(lambda: slow and (time.sleep(0.5), print("ends", flush=True)))  # runs after that of `faults`
import torch.distributed as dist
from lightning_gradcomp.averaging import faults

class SlowStore:
    def clone(self):
        time.sleep(0.5)
        return self

    def set(self, key, value):
        print("told", value, flush=True)

def slow_to_connect():
    faults.STORE_SECONDS, faults.dist = 0.1, mock.Mock()
    faults.dist.get_world_size.return_value = 2
    faults.dist.distributed_c10d._get_default_store.return_value = SlowStore()
    faults.post_reason("a reason")
    print("ends", flush=True)

def explained():
    slow.append(True)
    faults.EXIT_SECONDS = 0.1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    faults.explanation(RuntimeError("Connection closed by peer"), 3, "averaging")

def destroyed():
    explained()
    dist.destroy_process_group()

for program in (slow_to_connect, destroyed, explained):
    output, own = os.pipe()
    child = os.fork()
    if child == 0:  # it ends as the interpreter does
        os.dup2(own, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        program()
        break
    os.close(own)
    text = open(output).read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text.split("\\n")[:-1]]), flush=True)
"""


@pytest.fixture(scope="module")
def exits():
    """(exit code, lines of output) of programs that end after a fault. All are forked from one process."""
    names = ("slow to connect", "group destroyed", "group kept")
    return dict(zip(names, map(json.loads, run(sys.executable, "-c", EXITS).stdout.splitlines()), strict=True))


def test_a_process_ends_after_its_reason_is_told(exits):
    """Though the store is slow to reach: a thread that is in torch while the interpreter ends aborts the process."""
    assert exits["slow to connect"] == [0, ["ends", "told a reason"]]


def test_an_exit_is_limited_while_a_group_that_failed_exists(exits):
    """Its destructors might wait for the lost rank. A program that goes on without it exits in its own time."""
    assert exits["group destroyed"] == [0, ["ends"]]
    assert exits["group kept"] == [-signal.SIGALRM, []]


def test_a_rank_alone_asks_no_store(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", None)
        post_reason("nobody waits")
        assert others_end()
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
