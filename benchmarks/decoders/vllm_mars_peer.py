"""vLLM with this package's plug-in as a peer: the same engine as vLLM's peer, and drafts.

The Python of vLLM's environment runs it, where this package is installed, or is found by
PYTHONPATH with its entry points.
"""

import importlib
import json
import os
import sys
from importlib.metadata import entry_points
from typing import Any

# The script beside this one: what plain vLLM is measured by.
vllm_peer: Any = importlib.import_module("vllm_peer")


def main() -> None:
    """Argument: the settings (`decoders/__init__.py`)."""
    if "mars" not in entry_points(group="vllm.general_plugins").names:
        sys.exit(
            f"{sys.executable} has no mars-ray: install it there without its dependencies, or name "
            "its directory in PYTHONPATH (docs/how-to/vllm.md)"
        )
    # The plain peer has the runner that vLLM chooses; the plug-in works with this one.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    replies, settings = vllm_peer.own_stdout(), json.loads(sys.argv[1])
    llm = vllm_peer.load(
        settings,
        speculative_config={
            "method": "custom_class",
            "model": "mars_ray.vllm.proposer.MarsProposer",
            "num_speculative_tokens": 2 * settings["depths"],
        },
        additional_config={"mars": {"adapter": settings["draft_adapter"]}},
    )
    vllm_peer.say(replies, {"peer": "vllm-mars", "version": vllm_peer.version()})
    for line in sys.stdin:
        vllm_peer.say(replies, _answer(llm, json.loads(line)))


def _answer(llm: Any, task: dict[str, Any]) -> dict[str, Any]:
    before = _counts(llm)
    reply = vllm_peer.answer(llm, task)
    after = _counts(llm)
    return reply | {
        "forwards": after["total"]["forwards"] - before["total"]["forwards"],
        "steps": after["steps"] - before["steps"],
    }


def _counts(llm: Any) -> dict[str, Any]:
    return llm.collective_rpc("mars_counts")[0]


if __name__ == "__main__":
    main()
