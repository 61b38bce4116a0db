"""A program: a service on a cluster of two nodes, one of which is lost while clients ask.

A process of its own, because a process can be part of one cluster only. Prints what happened.
"""

import asyncio
import collections
import json
import os
import sys
import time
from typing import Any

# Read by Ray when it starts: a dead node is noticed after a second and a half.
os.environ |= {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "1000",
}

import httpx
import ray
from ray.cluster_utils import Cluster

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.serve.deploy import start

ASKED = {
    "model": "mars",
    "messages": [{"role": "user", "content": "count from one to ten"}],
    "temperature": 0,
    "max_tokens": 60,
}
AFTER_S = 6.0


def run(checkpoint: str, port: int) -> dict[str, Any]:
    """Statuses and texts of all replies, before the node is lost and after."""
    node_args = {"num_cpus": 4, "resources": {"replica": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node_args)
    # Room for a replica, not for an ingress.
    node = cluster.add_node(num_cpus=0, resources={"replica": 1})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address)
    job = ServeJob(
        checkpoint=checkpoint,
        model_name="mars",
        port=port,
        replicas=2,
        cpus_per_replica=0,
        resources_per_replica={"replica": 1},
        default_mode=ExactMode(),
        engine=EngineConfig(max_batch=8, max_context=200, device="cpu", threads=1),
    )
    url = start(job)
    replies = asyncio.run(ask_while(url, lambda: cluster.remove_node(node, allow_graceful=False)))
    # Without an orderly end of Serve, which would wait for the replica that finds no node any more.
    ray.shutdown()
    cluster.shutdown()
    return {
        "statuses": dict(collections.Counter(str(status) for status, _ in replies)),
        "texts": sorted({text for status, text in replies if status == 200}),
        "others": [text for status, text in replies if status != 200],
    }


async def ask_while(url: str, lose) -> list[tuple[int, str]]:
    """Four clients ask on and on, and the node goes meanwhile."""
    until = time.monotonic() + 1.0 + AFTER_S
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        asking = [asyncio.create_task(ask_on(client, until)) for _ in range(4)]
        await asyncio.sleep(1.0)
        await asyncio.to_thread(lose)
        return [reply for own in await asyncio.gather(*asking) for reply in own]


async def ask_on(client: httpx.AsyncClient, until: float) -> list[tuple[int, str]]:
    replies = []
    while time.monotonic() < until:
        reply = await client.post("/v1/chat/completions", json=ASKED)
        is_right = reply.status_code == 200
        text = reply.json()["choices"][0]["message"]["content"] if is_right else reply.text
        replies.append((reply.status_code, text))
    return replies


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]))))
