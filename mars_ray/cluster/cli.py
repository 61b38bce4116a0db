"""`mars-ray cluster`: several Ray nodes on this machine, to try out jobs of a cluster."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

cluster = typer.Typer(help="A Ray cluster of several nodes on this machine.", no_args_is_help=True)

Directory = Annotated[Path, typer.Option(help="Where its state and logs are kept.")]
_DIRECTORY = Path("~/.cache/mars-ray/cluster")


@cluster.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=64)] = 3,
    cpus_per_node: Annotated[int, typer.Option(min=1, help="As Ray counts; no limit.")] = 2,
    object_store_bytes: Annotated[int, typer.Option(min=80_000_000)] = 300_000_000,
    port: Annotated[int, typer.Option(min=1024, max=65535)] = 6379,
    dashboard_port: Annotated[int, typer.Option(min=1024, max=65535)] = 8265,
    directory: Directory = _DIRECTORY,
) -> None:
    """Start it; it stays until `mars-ray cluster down`."""
    from mars_ray.cluster.local import Plan
    from mars_ray.cluster.local import up as start

    plan = Plan(nodes, cpus_per_node, object_store_bytes, port, dashboard_port)
    started = start(plan, directory.expanduser())
    typer.echo(
        f"{nodes} nodes run. `mars-ray` and `ray job submit` use them with\n"
        "    export RAY_AUTH_MODE=token "
        f"RAY_ADDRESS={started.address} RAY_API_SERVER_ADDRESS={started.dashboard}",
        err=True,
    )
    print(json.dumps({"address": started.address, "dashboard": started.dashboard, "nodes": nodes}))


@cluster.command()
def down(directory: Directory = _DIRECTORY) -> None:
    """End it with all that runs on it; other clusters of this machine go on."""
    from mars_ray.cluster.local import down as stop

    ended = stop(directory.expanduser())
    print(json.dumps({"ended": len(ended.nodes)}))


@cluster.command()
def status(directory: Directory = _DIRECTORY) -> None:
    """Whether it runs; exit code 1 if nodes are missing."""
    from mars_ray.cluster.local import find

    found = find(directory.expanduser())
    if found is None:
        print(json.dumps({"nodes": [], "alive": 0}))
        raise typer.Exit(1)
    print(json.dumps(asdict(found) | {"alive": found.alive}))
    if found.alive < len(found.nodes):
        raise typer.Exit(1)
