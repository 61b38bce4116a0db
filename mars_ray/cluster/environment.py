"""What every process of a Ray cluster that runs this project has in its environment."""

from collections.abc import Mapping

# Serve's proxies read the second one when they start (serve/front_door.py).
NODE_ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mars_ray.serve.front_door.middlewares",
}
