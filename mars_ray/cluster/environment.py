"""What every process of a Ray cluster that runs this project has in its environment."""

from collections.abc import Mapping

# Serve's proxies read the others when they start: what stands in front of them
# (serve/front_door.py), and that messages go to a replica over gRPC and not as Ray's objects, which
# takes less of a CPU for each (docs/log.md). With a token, both ask for it.
NODE_ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mars_ray.serve.front_door.middlewares",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}
