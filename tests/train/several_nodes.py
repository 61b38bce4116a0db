"""A program: training on a cluster of several nodes that are lost and come back.

A process of its own, because a process can be part of one cluster only. Each node has room for one
worker, the head for none, so workers are on as many nodes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Read by Ray when it starts: a dead node is noticed after a second and a half.
os.environ |= {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "1000",
}

import ray
from ray.cluster_utils import Cluster

from mars_ray.config.train import TrainJob
from mars_ray.train.metrics import MetricsReader
from mars_ray.train.run import run_training


def lose_a_node(cluster: Cluster, job: TrainJob) -> None:
    """Two nodes; one is killed in the middle, and another one comes."""
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()

    def disturb() -> None:
        cluster.remove_node(nodes[1], allow_graceful=False)
        cluster.add_node(num_cpus=1)

    _train(job, [(210, disturb)])


def shrink_and_grow(cluster: Cluster, job: TrainJob) -> None:
    """Three nodes; one is killed and missed, and comes back later."""
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    lose = (150, lambda: cluster.remove_node(node, allow_graceful=False))
    # Early enough: what is left has to take longer than a node takes to come.
    _train(job, [lose, (200, lambda: cluster.add_node(num_cpus=1))])


def kill_the_driver(cluster: Cluster, job: TrainJob) -> None:
    """kill -9 of the driver in the middle; the same command again."""
    path = Path(job.output_dir).with_suffix(".json")
    path.write_text(job.model_dump_json())
    command = [sys.executable, __file__, "drive", cluster.address, str(path)]
    driver = subprocess.Popen(command)
    _wait_for_step(job, 130)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    subprocess.run(command, check=True)


def drive(address: str, job_file: str) -> None:
    """What `mars-ray train` does."""
    ray.init(address=address)
    run_training(TrainJob.model_validate_json(Path(job_file).read_text()))


def _train(job: TrainJob, disturbances: list[tuple[int, Callable[[], object]]]) -> None:
    # Nodes can only be added from the main thread.
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run_training, job)
        for step, disturb in disturbances:
            _wait_for_step(job, step)
            disturb()
        result.result()


def _wait_for_step(job: TrainJob, step: int) -> None:
    reader = MetricsReader(Path(job.output_dir) / "stages" / "ar" / "metrics.jsonl")
    while not any(record["step"] >= step for record in reader.new()):
        time.sleep(0.01)


def main(jobs_file: str) -> None:
    """All of it on one cluster: starting one takes longer than most of this."""
    jobs = [TrainJob.model_validate(job) for job in json.loads(Path(jobs_file).read_text())]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Ray wants a free port even for a dashboard that it does not start.
    head = {"num_cpus": 0, "include_dashboard": False, "dashboard_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address)
    for scenario, job in zip((lose_a_node, kill_the_driver, shrink_and_grow), jobs, strict=True):
        started = time.monotonic()
        print(scenario.__name__, flush=True)
        scenario(cluster, job)
        print(f"{scenario.__name__}: {time.monotonic() - started:.1f} s", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        drive(*sys.argv[2:])
    else:
        main(sys.argv[1])
