"""`initialize`: what reaches JAX's coordination service, in clusters that are not there."""

import json
import socket
import subprocess
import sys
import time

import pytest

# What JAX hands to its service and client, in each of these surroundings, one after another.
PROGRAM = """
import json, os, socket, sys, types, warnings
import jax
from jax._src import distributed
from jax._src.clusters import cloud_tpu_cluster, k8s_cluster
import meshdp.launch

seen = {}

class Stub:
    def __getattr__(self, name):
        return lambda *args: None

def stub(kind):
    def make(*args, **kwargs):
        if "taken" in args[0]:
            raise RuntimeError("UNKNOWN: Failed to start RPC server")
        seen[kind] = [args, kwargs]
        return Stub()
    return make

distributed._jax.get_distributed_runtime_service = stub("service")
distributed._jax.get_distributed_runtime_client = stub("client")
distributed._jax.create_preemption_sync_manager = stub("preemption")

simple = types.SimpleNamespace
pod = simple(
    metadata=simple(
        labels={"job-name": "run-w"},
        owner_references=[simple(controller=True, kind="Job")],
        name="pod",
    ),
    spec=simple(subdomain="net"),
)
job = simple(metadata=simple(labels={}, name="run-w"), spec=simple(parallelism=5))
kubernetes = types.ModuleType("kubernetes")
kubernetes.config = simple(load_incluster_config=lambda: None)
kubernetes.client = simple(
    CoreV1Api=lambda: simple(list_namespaced_pod=lambda **_: simple(items=[pod])),
    BatchV1Api=lambda: simple(read_namespaced_job=lambda **_: job),
    exceptions=simple(ApiException=Exception),
)
k8s_cluster.K8sCluster._namespace = classmethod(lambda cls: "default")
socket.gethostbyname = lambda host: "10.0.0.9"

for case in json.loads(sys.argv[1]):
    seen.clear()
    distributed.global_state = distributed.State()
    clusters = "SLURM", "OMPI", "KUBERNETES", "JOB_", "TPU_", "MEGASCALE", "JAX_C"
    for name in list(os.environ):
        if name.startswith(clusters):
            del os.environ[name]
    os.environ.update(case["env"])
    sys.modules["kubernetes"] = kubernetes if case.get("kubernetes") else None
    cloud_tpu_cluster.running_in_cloud_tpu_vm = case.get("tpu", False)
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            meshdp.initialize(**case.get("arguments", {}))
        except (ValueError, RuntimeError) as e:
            error = "\\n".join([str(e), *getattr(e, "__notes__", [])])
    jax.config.update("jax_enable_preemption_service", True)
    print(json.dumps({**seen, "error": error, "up": jax.distributed.is_initialized()}))
"""

SLURM = {
    "SLURM_JOB_ID": "4096",
    "SLURM_STEP_NODELIST": "node[07-09],other1",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.1.2.3,10.4.5.6:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_VERSION": "4.1.6",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", "HOSTNAME": "pod"}
TPU = {
    "TPU_WORKER_HOSTNAMES": "host0,host1",
    "TPU_WORKER_ID": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "host0",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}
CASES = {
    "slurm": {"env": SLURM},
    "slurm, less patient": {"env": SLURM, "arguments": {"heartbeat_seconds": 7}},
    "open mpi": {"env": OPEN_MPI},
    "kubernetes": {"env": POD, "kubernetes": True},
    "tpu": {"env": TPU, "tpu": True},
    "arguments": {
        "env": {},
        "arguments": {
            "coordinator_address": "10.0.0.1:99",
            "num_processes": 2,
            "process_id": 0,
            "local_device_ids": [3],
        },
    },
    "alone": {"env": {}},
    "no address": {"env": {}, "arguments": {"num_processes": 2, "process_id": 0}},
    "no kubernetes": {"env": POD},
    "no port": {
        "env": {},
        "arguments": {
            "coordinator_address": "here:taken",
            "num_processes": 2,
            "process_id": 0,
        },
    },
    "no patience": {"env": {}, "arguments": {"heartbeat_seconds": 0}},
}


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(list(CASES.values()))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    ("case", "address", "number"),
    [
        ("slurm", "node07:61440", 4),
        ("open mpi", "10.1.2.3:61441", 2),
        ("kubernetes", "run-w-0.net:55527", 3),
        ("tpu", "host0:8482", 3),
        ("arguments", "10.0.0.1:99", 0),
    ],
)
def test_what_jax_finds_out_about_the_cluster_reaches_it(found, case, address, number):
    (client_address, process, *_), options = found[case]["client"]
    assert (client_address, process) == (address, number)
    assert options["heartbeat_timeout"] == 30
    assert found[case]["up"] and found[case]["error"] is None


def test_process_0_serves_and_listens_on_every_address(found):
    (address, processes), options = found["arguments"]["service"]
    assert (address, processes, options["heartbeat_timeout"]) == ("[::]:99", 2, 30)


def test_the_patience_can_be_chosen(found):
    assert found["slurm, less patient"]["client"][1]["heartbeat_timeout"] == 7


def test_a_signal_is_not_swallowed_by_the_preemption_service(found):
    assert not any("preemption" in x for x in found.values())


def test_alone_there_is_nothing_to_join(found):
    assert found["alone"] == {"error": None, "up": False}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "no address",
            (
                "num_processes=2, but no coordinator_address: give the host and port of "
                'process 0, such as "10.0.0.1:1234".'
            ),
        ),
        (
            "no kubernetes",
            (
                "This is a pod of an indexed Kubernetes job, but JAX cannot find the others: "
                "pip install 'jax[k8s]', or give coordinator_address, num_processes and "
                "process_id."
            ),
        ),
        (
            "no port",
            (
                "UNKNOWN: Failed to start RPC server\n"
                "Process 0 listens on the port of here:taken, which something else on this "
                "machine may use: choose another port (coordinator_address, or "
                "JAX_COORDINATOR_PORT in a cluster)."
            ),
        ),
        ("no patience", "heartbeat_seconds=0: expected at least 1."),
    ],
)
def test_processes_that_cannot_be_joined_are_an_error(found, case, words):
    assert found[case] == {"error": words, "up": False}


LEAVES = """
import os, sys, time
from meshdp.launch import initialize
initialize(sys.argv[1], 2, int(sys.argv[2]), heartbeat_seconds=3)
if sys.argv[2] == "1":
    exec(sys.argv[3])
time.sleep(100)
"""


def pair(leave):
    """Two processes that no launcher watches, of which the second leaves so."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, address, str(i), leave],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (0, 1)
    ]


@pytest.mark.slow
def test_a_process_that_is_gone_ends_the_others_in_time_without_a_launcher():
    begun = time.monotonic()
    killed, raised = pair("os.kill(os.getpid(), 9)"), pair("raise RuntimeError('boom')")
    (_, of_killed), _, (_, of_raised), (_, said) = (
        p.communicate(timeout=90) for p in (*killed, *raised)
    )
    assert time.monotonic() - begun < 60  # JAX alone: 100 s and 300 s
    assert [killed[1].returncode, raised[1].returncode] == [-9, 1]
    assert said.rstrip().endswith("RuntimeError: boom")
    for p, err in ((killed[0], of_killed), (raised[0], of_raised)):
        assert p.returncode not in (0, None)
        assert "JAX distributed service detected fatal errors" in err
